"""Trains the MTP head: KL to the target on its own replies, unrolled as deep as the head drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.head_file import rounded_as_stored
from engine.model.mtp_head import MTPNet, MTPShape
from engine.train.attend import Pair, chain_attention
from engine.train.features import Window
from engine.train.loss import head_loss, soft_targets
from engine.train.target import FrozenTarget


@dataclass(frozen=True, slots=True)
class MTPPlan:
    """Size of the head and weights of the loss."""

    intermediate_size: int = 2560
    depth: int = 4
    depth_decay: float = 0.8
    argmax_share: float = 0.3


def default_taps(layers: int) -> tuple[int, ...]:
    """A low, a middle and the top layer."""
    return tuple(sorted({layers // 3, 2 * layers // 3, layers - 1}))


def new_net(target: FrozenTarget, plan: MTPPlan, taps: tuple[int, ...]) -> MTPNet:
    """A head that starts from the target's last layer; what the target has no counterpart for starts small."""
    c = target.config
    shape = MTPShape(c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, plan.intermediate_size, taps, c.rms_eps)
    net = MTPNet(shape, target.rope)
    layer, d, f = target.weights.layers[-1], c.hidden_size, min(c.intermediate_size, plan.intermediate_size)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for matrix in (net.first, net.again, net.gate_up, net.down):
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * 0.02)
        net.qkv_weight.copy_(layer.qkv)
        net.out.copy_(layer.out)
        net.gate_up[:f].copy_(layer.gate_up[:f])
        net.gate_up[plan.intermediate_size :][:f].copy_(layer.gate_up[c.intermediate_size :][:f])
        net.down[:, :f].copy_(layer.down[:, :f])
        net.attn_norm.copy_(layer.attn_norm)
        net.ffn_norm.copy_(layer.ffn_norm)
        net.final_norm.copy_(target.weights.final_norm)
        net.first[:, -2 * d : -d] += torch.eye(d)
        net.again[:, :d] += torch.eye(d)
    return net.to(target.device)


class MTPTraining:
    """Loss and evaluation of one head against one target."""

    def __init__(self, target: FrozenTarget, net: MTPNet, vocab_ids: torch.Tensor, plan: MTPPlan) -> None:
        self.target, self.net, self.plan = target, net, plan
        self.vocab_ids = vocab_ids.to(target.device)
        self.head = target.weights.head[self.vocab_ids].contiguous()
        known = torch.zeros(target.config.vocab_size, dtype=torch.bool, device=target.device)
        known[self.vocab_ids] = True
        self._known = known

    def loss(self, window: Window) -> torch.Tensor:
        """Mean over the reply's slots of the depths' weighted cross-entropies."""
        batch, slots = window.replies.shape[0], window.slots
        with torch.no_grad():
            normed = self.target.norm(window.top()).flatten(0, 1)
            targets = soft_targets(normed, self.head, self.plan.argmax_share)
        row = torch.arange(batch * slots, device=normed.device)
        hidden, index, weights = [], [], []
        for depth, output in enumerate(self.outputs(window, self.plan.depth), start=1):
            learn = window.predicts(depth + 1) & self._known[window.token_after(depth + 1)]
            hidden.append(output.flatten(0, 1))
            index.append((row + depth).clamp(max=batch * slots - 1))
            weights.append(learn.flatten() * self.plan.depth_decay ** (depth - 1))
        read = self.net.read_out(torch.cat(hidden)).to(self.head.dtype)
        total = head_loss(read, self.head, targets, torch.cat(index), torch.cat(weights))
        return total / torch.cat(weights).sum().clamp(min=1)

    def outputs(self, window: Window, depth: int) -> Iterator[torch.Tensor]:
        """Block outputs `[batch, slots, hidden]` of draft 1, 2 ...; drafts after the first see true tokens, which is
        what they see when they are verified up to there."""
        net, positions = self.net, window.positions()
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        time = torch.arange(window.taps.shape[1], device=positions.device)
        fused = net.fuse(window.taps, self.target.embed(window.tokens[:, 1:]))
        q, k, v = net.qkv(fused, time.expand(fused.shape[:2]))
        visible = time <= positions[:, :, None]
        x, q = fused[rows, positions], q[rows, positions]
        own: list[Pair] = []
        for step in range(depth):
            if step:
                x = net.fuse_again(x, self.target.embed(window.token_after(step + 1)))
                q, key, value = net.qkv(x, positions + step)
                own.append((key, value))
            x = net.finish(x, chain_attention(q, (k, v), visible, own))
            yield x

    @torch.no_grad()
    def hits(self, window: Window, depth: int, ids: int) -> torch.Tensor:
        """bool `[batch, slots, depth]`: whether draft `d` of a slot is the reply's token, the drafts before given."""
        found = []
        for step, output in enumerate(self.outputs(window, depth), start=1):
            logits = self.net.read_out(output).to(self.head.dtype) @ self.head[:ids].t()
            drafted = self.vocab_ids[logits.argmax(-1)]
            found.append((drafted == window.token_after(step + 1)) & window.predicts(step + 1))
        return torch.stack(found, -1)


def rounded_net(net: MTPNet) -> MTPNet:
    """A copy with its matrices rounded as the file stores them."""
    copy = MTPNet(net.shape, net.rope).to(net.token_norm.device)
    state: dict[str, Any] = {
        name: rounded_as_stored(t) if t.ndim == 2 and t.shape[0] > 8 else t for name, t in net.state_dict().items()
    }
    copy.load_state_dict(state)
    return copy
