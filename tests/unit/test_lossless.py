"""What `metrale verify-lossless` counts, and how the findings of several processes become one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.bench.local import Prompt
from engine.bench.lossless import Finding, compare, merge, ways
from engine.cli.bench import verify_lossless
from engine.core.device import Device, DrafterName, Sampled, Step, StepKind, StepResult
from tests.fakes.scripted_device import ScriptedDevice, encode, vocabulary

MTP = frozenset({DrafterName.MTP})
PROMPTS = [Prompt(name, "test", encode(name * 3)) for name in ("abc", "defg", "hi")]


class Tilted(ScriptedDevice):
    """Verifies otherwise than it decodes: what losslessness means to rule out. Its choices lead by 0.25 nats."""

    def forward(self, step: Step) -> StepResult:
        shift = 1 if step.kind is StepKind.VERIFY else 0
        rows = super().forward(step).sampled
        return StepResult(tuple(tuple(_leading((choice.token + shift) % 26) for choice in row) for row in rows))


def _leading(token: int) -> Sampled:
    return Sampled(token, -0.5, ((token, -0.5), (token + 1, -0.75)))


def findings(device: Device, name: str) -> list[Finding]:
    chosen = [way for way in ways(("ngram", "mtp"), (1,)) if way.name == name]
    return compare(device, vocabulary(), PROMPTS, 8, chosen, lambda tokens: device)


def test_equal_replies_are_compared_to_their_end() -> None:
    (found,) = findings(ScriptedDevice(drafters=MTP), "mtp x3 b1")
    assert (found.replies, found.differing, found.compared, found.tokens) == (3, 0, 24, 24)


def test_a_verify_that_decides_otherwise_is_found_with_its_place_and_margin() -> None:
    (found,) = findings(Tilted(drafters=MTP), "mtp x3 b1")
    assert found.differing == 3
    assert found.compared < found.tokens
    assert found.widest_margin == pytest.approx(0.25)
    assert found.first.startswith("prompt abc, token ")


def test_the_findings_of_shards_add_up_by_way() -> None:
    one = Finding("a", 2, 20, 1, 15, 0.5, "prompt 1", {"mtp": 3}, 1)
    two = Finding("a", 3, 30, 0, 30, 0.0, "", {"mtp": 1, "plain": 2})
    other = Finding("b", 1, 10, 0, 10)
    assert merge([one, other, two]) == [
        Finding("a", 5, 50, 1, 45, 0.5, "prompt 1", {"mtp": 4, "plain": 2}, 1),
        Finding("b", 1, 10, 0, 10),
    ]


@pytest.mark.parametrize(("differing", "code"), [(0, 0), (1, 1)])
def test_merged_files_are_printed_and_end_as_one_run_would(tmp_path: Path, differing: int, code: int) -> None:
    for name in "ab":
        found = Finding("mtp x3 b1", 2, 20, differing, 20)
        (tmp_path / name).write_text(json.dumps([dataclasses.asdict(found)]))
    files = [f"--merge={tmp_path / name}" for name in "ab"]
    result = CliRunner().invoke(verify_lossless, files, standalone_mode=False)
    assert result.return_value == code
    assert "1 ways, 4 replies, 40 tokens" in result.output


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b"])
def test_a_shard_that_is_none_is_refused(shard: str) -> None:
    result = CliRunner().invoke(verify_lossless, ["--shard", shard])
    assert result.exit_code != 0
    assert "A shard is I/N" in str(result.exception) + result.output
