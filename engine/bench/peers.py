"""Other engines on the same file, threads and prompts, run in this process in turn with ours."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from engine.bench.local import LocalEngine
from engine.core.device import Device
from engine.core.vocabulary import Vocabulary

Prompt = Sequence[int]


class PeerMissingError(RuntimeError):
    """The peer is not installed here; the message says how to get it."""


class Contestant(Protocol):
    """All three calls return tokens per second."""

    name: str

    def decode(self, prompt: Prompt, count: int) -> float:
        """Greedy tokens after the first, of one sequence."""
        ...

    def prefill(self, prompt: Prompt) -> float: ...

    def together(self, prompts: Sequence[Prompt], count: int) -> float:
        """Greedy tokens of all sequences over the whole time, prompts included."""
        ...


class Ours:
    """The whole scheduler on a device in this thread, telemetry records included."""

    def __init__(self, device: Device, vocabulary: Vocabulary, name: str = "metrale", **levers: object) -> None:
        self.name = name
        self._device, self._vocabulary, self._levers = device, vocabulary, {"prefix_cache": "off", **levers}

    def decode(self, prompt: Prompt, count: int) -> float:
        out = self._run([prompt], count)
        stamps = [(at, tokens) for _, at, tokens in out.out.emitted_at]
        return sum(tokens for _, tokens in stamps[1:]) * 1e9 / (stamps[-1][0] - stamps[0][0])

    def prefill(self, prompt: Prompt) -> float:
        started = time.perf_counter_ns()
        out = self._run([prompt], 1)
        return len(prompt) * 1e9 / (out.out.emitted_at[0][1] - started)

    def together(self, prompts: Sequence[Prompt], count: int) -> float:
        started = time.perf_counter_ns()
        out = self._run(prompts, count)
        tokens = sum(len(reply.tokens) for reply in out.out.replies.values())
        return tokens * 1e9 / (out.out.emitted_at[-1][1] - started)

    def _run(self, prompts: Sequence[Prompt], count: int) -> LocalEngine:
        engine = LocalEngine(self._device, self._vocabulary, batch=max(len(prompts), 1), **self._levers)
        for at, prompt in enumerate(prompts):
            engine.submit(f"r{at}", prompt, count, ignore_eos=True)
        engine.run()
        return engine


class Transformers:
    """`transformers` generate with its dynamic cache, the weights dequantised from the same file."""

    def __init__(self, model: Path, threads: int, dtype: str) -> None:
        try:
            import transformers
        except ImportError:
            raise PeerMissingError(
                "transformers is not installed; install metrale[peers] to compare with it."
            ) from None
        import torch

        torch.set_num_threads(threads)
        where = {"gguf_file": model.name} if model.is_file() else {}
        folder = model.parent if model.is_file() else model
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **where)
        self._torch, self._model = torch, loaded.eval()
        self.name = f"transformers {transformers.__version__} {dtype}"

    def decode(self, prompt: Prompt, count: int) -> float:
        first, whole = self._timed([prompt], 1), self._timed([prompt], count)
        return (count - 1) / (whole - first)

    def prefill(self, prompt: Prompt) -> float:
        return len(prompt) / self._timed([prompt], 1)

    def together(self, prompts: Sequence[Prompt], count: int) -> float:
        return len(prompts) * count / self._timed(prompts, count)

    def _timed(self, prompts: Sequence[Prompt], count: int) -> float:
        torch = self._torch
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        return time.perf_counter() - started


class LlamaCpp:
    """llama.cpp through `llama-cpp-python`, the same GGUF file."""

    def __init__(self, model: Path, threads: int, sequences: int = 8) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise PeerMissingError(
                "llama-cpp-python is not installed; install metrale[peers] (it compiles) to compare with llama.cpp."
            ) from None
        self._lib: Any = llama_cpp
        self.name = f"llama.cpp {importlib.metadata.version('llama-cpp-python')}"
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = 8192, 2048, 512
        context.n_seq_max, context.n_threads, context.n_threads_batch = sequences, threads, threads
        context.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def decode(self, prompt: Prompt, count: int) -> float:
        self._clear()
        (token,) = self._feed([(0, 0, prompt)])
        started = time.perf_counter()
        for at in range(count - 1):
            (token,) = self._feed([(0, len(prompt) + at, [token])])
        return (count - 1) / (time.perf_counter() - started)

    def prefill(self, prompt: Prompt) -> float:
        self._clear()
        started = time.perf_counter()
        self._feed([(0, 0, prompt)])
        return len(prompt) / (time.perf_counter() - started)

    def together(self, prompts: Sequence[Prompt], count: int) -> float:
        self._clear()
        started = time.perf_counter()
        tokens = [self._feed([(seq, 0, prompt)])[0] for seq, prompt in enumerate(prompts)]
        for at in range(count - 1):
            rows = [(seq, len(prompts[seq]) + at, [token]) for seq, token in enumerate(tokens)]
            tokens = self._feed(rows)
        return len(prompts) * count / (time.perf_counter() - started)

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _feed(self, rows: Sequence[tuple[int, int, Prompt]]) -> list[int]:
        """Feed (sequence, position, tokens) and return the argmax after the last token of each."""
        batch, at, ends = self._batch, 0, []
        for seq, start, tokens in rows:
            for offset, token in enumerate(tokens):
                batch.token[at], batch.pos[at] = token, start + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, seq
                batch.logits[at] = offset == len(tokens) - 1
                at += 1
            ends.append(at - 1)
        batch.n_tokens = at
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp refused a batch.")
        return [self._argmax(end) for end in ends]

    def _argmax(self, row: int) -> int:
        import numpy as np

        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())


PEERS: dict[str, Callable[[Path, int], list[Contestant]]] = {
    "transformers": lambda model, threads: [
        Transformers(model, threads, "float32"),
        Transformers(model, threads, "bfloat16"),
    ],
    "llama.cpp": lambda model, threads: [LlamaCpp(model, threads)],
}
"""Contestants by the name that `--vs` takes; several settings of a peer compete, and the better one counts."""
