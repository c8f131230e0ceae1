"""How far `metrale whatif` is from real runs: one recorded run is asked about others, which then really run.

All runs decode the same texts, prompt by prompt in turn, so that they meet the same machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from engine.bench.local import LocalEngine, load_prompts, open_text
from engine.bench.result import BenchResult
from engine.bench.whatif import policy_of, throughput, what_if
from engine.model.open import open_device

BASE: dict[str, bool | int | float | str] = {"drafter": "mtp", "num_drafts": 3, "mtp_gate": "auto"}
ASKED: dict[str, dict[str, bool | int | float | str]] = {
    "recorded": {},
    "margin 0.3": {"gate_margin": 0.3},
    "reprobe 64": {"gate_reprobe_tokens": 64},
    "K=1": {"num_drafts": 1},
    "K=2": {"num_drafts": 2},
    "plain": {"mtp_gate": "off"},
    "force": {"mtp_gate": "force"},
}
MOST_TOKENS = 400


def check(model: Path, seeds: int, prompts: int, tokens: int, progress: Callable[[str], None] = print) -> BenchResult:
    """Percent by which each prediction is off, over runs with different prompts and draws."""
    text, vocabulary = open_text(model)
    device = open_device(model, kv_tokens=8192, max_batch_size=1)
    asked = load_prompts(Path(__file__).with_name("prompts.jsonl"), text, MOST_TOKENS)
    result = BenchResult(f"what-if against real runs, {prompts} replies of {tokens} tokens each")
    errors: dict[str, list[float]] = defaultdict(list)
    rng = random.Random(11)
    for seed in range(seeds):
        engines = {
            name: LocalEngine(device, vocabulary, batch=1, prefix_cache="off", trace_level=2, **{**BASE, **levers})
            for name, levers in ASKED.items()
        }
        for number in range(prompts):
            prompt = asked[(seed * prompts + number) * 7 % len(asked)]
            for name in rng.sample(list(engines), len(engines)):
                engine = engines[name]
                engine.submit(f"{name} {number}", prompt.ids, tokens, temperature=0.7, seed=seed, ignore_eos=True)
                engine.run()
        recorded = engines["recorded"].out.steps
        for name, levers in ASKED.items():
            answer = what_if(recorded, policy_of(BASE), policy_of(BASE, levers))
            real = throughput(engines[name].out.steps)
            errors[name].append((answer.outcomes[1].tokens_per_s / real - 1) * 100)
            progress(f"seed {seed}: {name}: {errors[name][-1]:+.1f} %, real {real:.0f} tokens/s")
    for name, values in errors.items():
        result.add(f"{name}, % off", values)
    result.figures["median of the sizes, %"] = statistics.median(abs(e) for each in errors.values() for e in each)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    print(check(args.model, args.seeds, args.prompts, args.tokens).text())


if __name__ == "__main__":
    main()
