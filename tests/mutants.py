"""Rules of the scheduler's contract, broken one at a time: each mutant must fail a policy test.

`python -m tests.mutants` copies the tree, applies one mutation after the other, runs the policy tests and prints which
test noticed. Exit 1 if a mutant survives.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("engine", "telemetry", "tests", "pyproject.toml")
POLICY_TESTS = ("tests/traces", "tests/unit/lanes", "tests/unit/core", "tests/unit/drafters")


@dataclass(frozen=True)
class Mutant:
    rule: str
    path: str
    before: str
    after: str


MUTANTS = (
    Mutant("admission reserves what a request may still emit", "engine/lanes/admission.py",
           "need + _reservation(engine, seq, reserve) <= engine.pool.num_blocks", "need <= engine.pool.num_blocks"),
    Mutant("nobody overtakes a parked sequence", "engine/lanes/admission.py",
           "queues.waiting_count and not queues.parked and", "queues.waiting_count and"),
    Mutant("first come, first served", "engine/core/queues.py",
           "self.waiting.append(seq)", "self.waiting.appendleft(seq)"),
    Mutant("Decode is skipped after a mixed step", "engine/lanes/prefill.py",
           "return Flow.SKIP_REST if did_mixed_step else Flow.PROCEED", "return Flow.PROCEED"),
    Mutant("a mixed step keeps to the gap that a client is used to", "engine/core/pacing.py",
           "int((allowance - self.decode_ns)", "int(2 * (allowance - self.decode_ns)"),
    Mutant("a prompt row is forecast at its position", "engine/core/pacing.py",
           "return self.near + self.far * position", "return self.near"),
    Mutant("accepted drafts equal the target's own tokens", "engine/lanes/emit.py",
           "agrees = row < len(drafts) and choice.token == drafts[row]", "agrees = row < len(drafts)"),
    Mutant("nothing is emitted past the end of a reply", "engine/lanes/emit.py",
           "if seq.is_finished or not agrees:", "if not agrees:"),
    Mutant("rejected rows leave no KV behind", "engine/lanes/park.py",
           "keep = engine.pool.blocks_for(seq.seq_len)\n", "keep = len(seq.blocks)\n"),
    Mutant("the victim has generated the fewest tokens", "engine/lanes/park.py",
           "min(exposed or active, key=lambda s: (len(s.emitted), s.slot))",
           "max(exposed or active, key=lambda s: (len(s.emitted), s.slot))"),
    Mutant("a sequence just resumed is not parked again", "engine/lanes/park.py",
           "return min(exposed or active,", "return min(active,"),
    Mutant("a preempted sequence does not sample its last token again", "engine/lanes/run.py",
           "samples = count == seq.unfed and seq.last_token is None", "samples = count == seq.unfed"),
    Mutant("over-run rows are dropped", "engine/lanes/pipeline.py",
           "        if not seq.is_finished\n    ]", "        if True\n    ]"),
    Mutant("new work settles the pipelined step", "engine/lanes/plan.py",
           "        settle(engine)\n", "        pass\n"),
    Mutant("levers change at tick boundaries only", "engine/lanes/plan.py",
           "ctx.levers.apply(lever.name, new)", "pass"),
    Mutant("a stale lever write is refused", "engine/lanes/plan.py",
           "change.expected is not None and change.expected != old", "False"),
    Mutant("draws depend on the position", "engine/lanes/chain.py",
           "[uniform(seq.seed, position) for position", "[uniform(seq.seed, first) for position"),
    Mutant("a block is shared only for an equal prefix", "engine/core/blocks.py",
           "parent + array", "array"),
    Mutant("at least one prompt token is fed", "engine/lanes/prefill.py",
           "engine.pool.match(seq.feed[:-1])", "engine.pool.match(seq.feed)"),
    Mutant("deadlines are never skipped", "engine/lanes/end.py",
           "finish(engine, seq, Finish.DEADLINE)", "pass"),
    Mutant("post-think tokens are counted on every path", "engine/core/token_state.py",
           "self.post_think += 1", "pass"),
    Mutant("n-gram history includes the newest token", "engine/lanes/draft.py",
           "news = seq.emitted[found.indexed :]", "news = seq.emitted[found.indexed : -1]"),
    Mutant("a stop string is found across tokens", "engine/core/reply.py",
           "self._held += text\n", "self._held = text\n"),
    Mutant("verify rows are planned against their drafts", "engine/lanes/chain.py",
           "        state.advance(token, vocabulary.bytes_of(token))\n", ""),
    Mutant("thinking closes by force past its budget", "engine/lanes/chain.py",
           "if state.thinking and state.force_close and", "if False and"),
    Mutant("speculation waits while any sequence thinks", "engine/lanes/eligibility.py",
           'if state.thinking and not levers.flag("dflash_spec_think"):', "if False:"),
)  # fmt: skip


def main() -> int:
    survivors = 0
    for mutant in MUTANTS:
        noticed = try_mutant(mutant)
        survivors += not noticed
        print(f"{'killed by ' + noticed if noticed else 'SURVIVED':<110} {mutant.rule}", flush=True)
    return 1 if survivors else 0


def try_mutant(mutant: Mutant) -> str:
    """The first test that fails with the mutation in place, or an empty string."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors", "*.so"))
            else:
                shutil.copy(source, target)
        path = Path(folder) / mutant.path
        text = path.read_text()
        if mutant.before not in text:
            raise SystemExit(f"{mutant.path} no longer holds {mutant.before!r}; mend the mutant {mutant.rule!r}.")
        path.write_text(text.replace(mutant.before, mutant.after, 1))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=60", *POLICY_TESTS]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed.group(1) if failed else ("collection" if done.returncode not in (0, 5) else "")


if __name__ == "__main__":
    sys.exit(main())
