"""The DFlash head's loss: random blocks of the model's own replies, near drafts weighing more than far ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from engine.model.dflash_head import DFlashLayer, DFlashNet, DFlashShape
from engine.model.head_file import rounded_as_stored
from engine.train.attend import block_attention
from engine.train.features import Window
from engine.train.loss import head_loss, soft_targets
from engine.train.target import FrozenTarget


@dataclass(frozen=True, slots=True)
class DFlashPlan:
    """Size of the head and weights of the loss."""

    layers: int = 3
    block: int = 8
    chain_size: int = 288
    candidates: int = 16
    argmax_share: float = 0.3
    reach: float = 4.0
    """The loss of draft `k` weighs `exp(-(k - 1) / reach)`."""
    unknown_share: float = 0.3
    """Blocks that train without the token before each row, as the candidates are found."""


def new_net(target: FrozenTarget, plan: DFlashPlan, taps: tuple[int, ...]) -> DFlashNet:
    """A head that starts from the target's last layers."""
    c = target.config
    shape = DFlashShape(
        c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size, plan.layers, plan.block,
        plan.chain_size, taps, c.rms_eps,
    )  # fmt: skip
    net = DFlashNet(shape, target.rope)
    generator = torch.Generator().manual_seed(12)
    d, queries = c.hidden_size, c.num_heads * c.head_dim
    with torch.no_grad():
        for matrix in (net.fusion, net.chain_in):
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * 0.02)
        net.fusion[:, -d:] += torch.eye(d)
        net.mask.copy_(torch.randn(d, generator=generator) * 0.02)
        net.final_norm.copy_(target.weights.final_norm)
        for draft, layer in zip(net.layers, target.weights.layers[-plan.layers :], strict=True):
            ours = cast(DFlashLayer, draft)
            ours.q_weight.copy_(layer.qkv[:queries])
            ours.kv_weight.copy_(layer.qkv[queries:])
            for name in ("attn_norm", "out", "ffn_norm", "gate_up", "down"):
                getattr(ours, name).copy_(getattr(layer, name))
            ours.context_norm.copy_(layer.attn_norm)
    return net.to(target.device)


class DFlashTraining:
    """Loss and evaluation of one head against one target."""

    def __init__(self, target: FrozenTarget, net: DFlashNet, vocab_ids: torch.Tensor, plan: DFlashPlan) -> None:
        self.target, self.net, self.plan = target, net, plan
        self.vocab_ids = vocab_ids.to(target.device)
        self.head = target.weights.head[self.vocab_ids].contiguous()
        known = torch.zeros(target.config.vocab_size, dtype=torch.bool, device=target.device)
        known[self.vocab_ids] = True
        self._known = known

    def loss(self, window: Window) -> torch.Tensor:
        """Mean over random blocks of the drafts' weighted cross-entropies."""
        batch, width = window.replies.shape[0], self.plan.block - 1
        device = window.start.device
        with torch.no_grad():
            targets = soft_targets(self.target.norm(window.top()).flatten(0, 1), self.head, self.plan.argmax_share)
        draws = torch.rand(batch, -(-window.slots // self.plan.block), device=device)
        anchors = (draws * (window.replies[:, None] - 1).clamp(min=1)).long()  # [batch, blocks]
        hidden = self.block_hidden(window, anchors)
        before, after = self._neighbours(window, anchors)
        known_before = torch.rand(anchors.shape, device=device)[..., None, None] >= self.plan.unknown_share
        embedded = torch.where(known_before, self.target.embed(before), self.net.unknown.to(self.target.dtype))
        slot = anchors[..., None] + torch.arange(1, width + 1, device=device)
        learn = (slot < window.replies[:, None, None]) & self._known[after]
        decay = torch.exp(-torch.arange(width, device=device) / self.plan.reach)
        weights = (learn * decay).flatten()
        row = torch.arange(batch, device=device)[:, None, None] * window.slots
        index = (row + slot.clamp(max=window.slots - 1)).flatten()
        read = self.net.chained(hidden, embedded).flatten(0, 2).to(self.head.dtype)
        return head_loss(read, self.head, targets, index, weights) / weights.sum().clamp(min=1)

    def block_hidden(self, window: Window, anchors: torch.Tensor) -> torch.Tensor:
        """Rows of the drafts of the blocks that begin after slots `anchors`, `[batch, blocks, block - 1, hidden]`."""
        net, block = self.net, self.plan.block
        batch, blocks = anchors.shape
        time = torch.arange(window.taps.shape[1], device=anchors.device)
        fused = net.fuse(window.taps)
        newest = window.positions().gather(1, anchors)  # position of the newest hidden state of each block
        visible = time <= newest[..., None]
        last = self.target.embed(window.token_after(1).gather(1, anchors))
        masks = net.mask.to(last.dtype).expand(batch, blocks, block - 1, -1)
        x = torch.cat((last[:, :, None], masks), 2)
        positions = newest[..., None] + 1 + torch.arange(block, device=anchors.device)
        positions = positions.clamp(max=self.target.config.max_context - 1)
        for module in net.layers:
            layer = cast(DFlashLayer, module)
            past = layer.context(fused, time.expand(batch, -1))
            q, k, v = layer.qkv(x, positions)
            x = layer.finish(x, block_attention(q, past, visible, (k, v)))
        return x[:, :, 1:]

    def _neighbours(self, window: Window, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens before and at each draft, int64 `[batch, blocks, block - 1]`."""
        span = [window.token_after(k).gather(1, anchors) for k in range(1, self.plan.block + 1)]
        tokens = torch.stack(span, -1)
        return tokens[..., :-1], tokens[..., 1:]

    @torch.no_grad()
    def hits(self, window: Window, ids: int, *, chain: bool) -> torch.Tensor:
        """bool `[batch, slots, block - 1]`: whether a slot's drafts are the reply's tokens, the drafts before given."""
        anchors = torch.arange(window.slots, device=window.start.device)
        anchors = torch.minimum(anchors, window.replies[:, None] - 1)
        before, after = self._neighbours(window, anchors)
        hidden = self.block_hidden(window, anchors)
        head = self.head[:ids].t()
        open_rows = self.net.chained(hidden, self.net.unknown.expand_as(hidden))
        logits = open_rows.to(self.head.dtype) @ head
        if chain:
            best = logits.topk(min(self.plan.candidates, ids), -1).indices
            linked = self.net.chained(hidden, self.target.embed(before)).to(self.head.dtype) @ head
            drafted = best.gather(-1, linked.gather(-1, best).argmax(-1, keepdim=True)).squeeze(-1)
        else:
            drafted = logits.argmax(-1)
        slot = anchors[..., None] + torch.arange(1, self.plan.block, device=anchors.device)
        return (self.vocab_ids[drafted] == after) & (slot < window.replies[:, None, None])


def rounded_net(net: DFlashNet) -> DFlashNet:
    """A copy with its matrices rounded as the file stores them."""
    first = cast(DFlashLayer, net.layers[0])
    copy = DFlashNet(net.shape, first.rope).to(net.mask.device)
    state = net.state_dict()
    copy.load_state_dict({n: rounded_as_stored(t) if t.ndim == 2 and t.shape[0] > 8 else t for n, t in state.items()})
    return copy
