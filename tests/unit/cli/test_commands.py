"""Commands without an engine: help, usage, one sentence for every error, exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest

from engine.cli.chat import _print_reply
from engine.cli.main import COMMANDS, CommandTable, cli, main
from engine.levers.catalog import LEVERS
from engine.protocol.commands import CHAT_SAMPLING, Sampling
from engine.protocol.events import Usage
from engine.protocol.wire import Done
from tui.sessions import Store, new_conversation

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in a home of its own: exit code, output, errors."""
    for name in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"METRALE_{name}", str(tmp_path / name.lower()))
    for name in ("METRALE_URL", "METRALE_DB", "METRALE_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setattr("sys.stdin", io.StringIO())

    def called(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return called


def every_command() -> list[list[str]]:
    """The words of every command and subcommand."""
    found: list[list[str]] = []

    def walk(command: click.Command, words: list[str]) -> None:
        if words:
            found.append(words)
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                walk(child, [*words, name])

    walk(cli, [])
    return found


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_the_help_of_every_command_has_a_sentence_and_an_example(words: list[str], run: Run) -> None:
    code, out, _ = run(*words, "--help")
    assert code == 0
    assert f"Example: metrale {words[0]}" in " ".join(out.split()) or "Example: eval" in out
    assert out.split("\n\n")[1].strip()


def test_the_table_in_the_help_names_every_command_and_loads_none(run: Run) -> None:
    assert isinstance(cli, CommandTable)
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lever"], "Did you mean 'levers'?"),
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--num-drafts", "99"], "1 to 15"),
        (["serve", "--drafter", "ngrm"], "Did you mean 'ngram'?"),
        (["serve", "--preset", "nowhere"], "There is no preset"),
        (["levers", "set", "num_drafts", "99"], "1 to 15"),
        (["levers", "get", "num_draft"], "Did you mean 'num_drafts'?"),
        (["levers", "set", "num_drafts", "3", "--for", "soon"], "90s"),
        (["levers", "set"], "Missing argument"),
        (["query", "SELECT 1", "--format", "xml"], "parquet"),
        (["query", "SELECT 1", "--url", "ftp://x"], "is not the address"),
        (["whatif"], "gate_margin"),
        (["train", "nothing"], "mtp"),
        (["bench", "decode", "--vs", "nobody"], "llama.cpp"),
        (["completion", "tcsh"], "zsh"),
        (["chat", "-p", "x", "--temperature", "9"], "temperature"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_two(words: list[str], says: str, run: Run) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert says in err
    assert err.startswith("Error: ")
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["levers", "set", "num_drafts", "3"], "metrale serve"),
        (["levers", "undo"], "metrale serve"),
        (["query", "SELECT 1"], "There is no database"),
        (["report"], "There is no database"),
        (["query", "SELECT 1", "--url", "http://127.0.0.1:9"], "No server answers"),
        (["top"], "terminal"),
        (["pull", "nobody"], "smollm2"),
        (["serve", "--no-tui", "nobody.gguf"], "nobody.gguf"),
        (["chat", "-p", "x", "nobody.gguf"], "nobody.gguf"),
        (["levers", "preset", "show", "nobody"], "no preset"),
    ],
)
def test_a_failure_is_one_sentence_and_exit_code_one(words: list[str], says: str, run: Run) -> None:
    code, _, err = run(*words)
    assert code == 1
    assert says in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_debug_shows_where_a_failure_came_from(run: Run) -> None:
    _, _, err = run("query", "SELECT 1", "--debug")
    assert "Traceback" in err


def test_every_lever_is_a_flag_with_its_variable_and_lossy_ones_are_marked(run: Run) -> None:
    _, out, _ = run("serve", "--help")
    text = " ".join(out.split())
    for lever in LEVERS.values():
        assert lever.flag in text
        assert lever.env in text
    assert text.count("LOSSY") == sum(not lever.lossless for lever in LEVERS.values())


def test_levers_without_an_engine_show_what_a_start_here_would_use(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_NUM_DRAFTS", "7")
    code, out, _ = run("levers", "list", "--json")
    assert code == 0
    found = {lever["name"]: lever for lever in json.loads(out)}
    assert set(found) == set(LEVERS)
    assert (found["num_drafts"]["value"], found["num_drafts"]["source"]) == (7, "environment")
    assert run("levers", "get", "num-drafts")[1] == "7\n"


def test_presets_are_saved_shown_compared_and_deleted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_NUM_DRAFTS", "7")
    assert run("levers", "preset", "save", "mine")[0] == 0
    assert run("levers", "preset", "show", "mine")[1] == "num_drafts: 7\n"
    monkeypatch.delenv("METRALE_NUM_DRAFTS")
    assert run("levers", "diff", "mine")[1] == "num_drafts: 7 | 3\n"
    assert json.loads(run("levers", "preset", "list", "--json")[1]) == ["mine"]
    assert run("levers", "preset", "delete", "mine")[0] == 0


def test_doctor_looks_at_everything_and_fixes_nothing(run: Run) -> None:
    _, out, _ = run("doctor", "--json")
    found = {finding["what"] for finding in json.loads(out)}
    assert {"python", "packages", "device", "memory", "model", "database", "port"} <= found


def test_models_are_listed_without_one_being_here(run: Run) -> None:
    code, out, _ = run("models", "--json")
    assert code == 0
    assert json.loads(out)[0]["path"] is None


def test_completion_scripts_are_printed(run: Run) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_METRALE_COMPLETE" in run("completion", shell)[1]


def test_a_reader_that_closes_the_pipe_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m engine.cli levers list | head -1"
    found = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in found.stderr
    assert found.stdout


def test_a_conversation_that_is_not_saved_is_one_sentence_before_anything_starts(run: Run) -> None:
    code, out, err = run("chat", "--conversation", "nope")
    assert (code, out) == (1, "")
    assert err == "Error: There is no saved conversation 'nope'; none is saved yet.\n"
    store = Store()
    store.write(replace(new_conversation(0.0), title="Birds"))
    _, _, err = run("chat", "--conversation", "nope")
    assert err == "Error: There is no saved conversation 'nope'; there are: 'Birds'.\n"
    code, _, err = run("chat", "--conversation", "Birds")
    assert code == 2, "it is there, but the screen needs a terminal"


@pytest.mark.parametrize(("given", "temperature"), [(None, CHAT_SAMPLING.temperature), (0.0, 0.0)])
async def test_one_answer_is_drawn_as_the_screens_draw(given: float | None, temperature: float) -> None:
    asked: list[Sampling] = []

    class Client:
        async def chat(self, turns: object, sampling: Sampling, limits: object) -> AsyncIterator[Done]:
            asked.append(sampling)
            yield Done(request_id="r", reason="stop", usage=Usage())

    once = {"system": None, "max_tokens": None, "temperature": given, "as_json": False}
    assert await _print_reply(Client(), "Hello?", once) == 0
    [sampling] = asked
    assert (sampling.temperature, sampling.top_p) == (temperature, CHAT_SAMPLING.top_p)
