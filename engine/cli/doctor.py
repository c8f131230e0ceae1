"""`metrale doctor`: what is there, what is missing, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from engine import __version__
from engine.cli import places
from engine.cli.errors import sentence_of
from engine.cli.options import DEFAULT_MODEL, DEFAULT_PORT, database_of, db_option, json_option

PACKAGES = (
    "torch",
    "duckdb",
    "opentelemetry-sdk",
    "textual",
    "starlette",
    "uvicorn",
    "websockets",
    "tokenizers",
    "gguf",
)
NEEDED_MB = 1500


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: str
    """ok, warning or missing."""
    detail: str
    fix: str = ""


@click.command(epilog="Example: metrale doctor --json")
@db_option
@json_option
def doctor(database: Path | None, as_json: bool) -> int:
    """Device, memory, versions, ports, database: what is missing and how to fix it."""
    findings = list(examine(database_of(database)))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            fix = f" -> {finding.fix}" if finding.fix else ""
            click.secho(f"{finding.state:8}", fg=_COLOURS[finding.state], nl=False)
            click.echo(f"{finding.what:{width}}  {finding.detail}{fix}")
    return 1 if any(finding.state == "missing" for finding in findings) else 0


_COLOURS = {"ok": "green", "warning": "yellow", "missing": "red"}


def examine(database: Path) -> Iterator[Finding]:
    """Every check; one that fails says so instead of ending the others."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python, _packages, _device, _compiler, _memory, _model, lambda: _database(database), _state, _port, _terminal,
    )  # fmt: skip
    for check in checks:
        try:
            yield check()
        except Exception as error:
            yield Finding("check", "warning", sentence_of(error))


def _python() -> Finding:
    fine = sys.version_info >= (3, 11)
    fix = "" if fine else "install Python 3.11 or later"
    return Finding("python", "ok" if fine else "missing", f"{platform.python_version()}, metrale {__version__}", fix)


def _packages() -> Finding:
    found, absent = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    if absent:
        return Finding("packages", "missing", f"without {', '.join(absent)}", "run `make setup`")
    return Finding("packages", "ok", ", ".join(found))


def _device() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("device", "missing", "torch is not installed", "run `make setup`")
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Finding("device", "ok", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("device", "ok", f"CPU with {cores} cores, no GPU that torch can use")


def _compiler() -> Finding:
    chosen = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "")
    if chosen:
        return Finding("compiler", "ok", f"{shutil.which(chosen) or chosen}")
    return Finding("compiler", "warning", "no C++ compiler; the slower kernels are used", "install g++ or clang++")


def _memory() -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines}
        free = sizes["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return Finding("memory", "warning", "this system does not say how much is free")
    state = "ok" if free >= NEEDED_MB else "warning"
    fix = "" if state == "ok" else "close something; the default model wants 1.5 GB"
    return Finding("memory", state, f"{free / 1024:.1f} of {sizes['MemTotal'] / 1024:.1f} GiB free", fix)


def _model() -> Finding:
    from engine.fetch import list_models

    here = [entry.name for entry in list_models() if entry.path]
    if here:
        return Finding("model", "ok", f"here: {', '.join(here)}")
    return Finding("model", "warning", "no model is here yet", f"run `metrale pull {DEFAULT_MODEL}`")


def _database(database: Path) -> Finding:
    owner = places.live_owner(database)
    if owner:
        return Finding("database", "ok", f"{database}, owned by the engine at {owner.url}")
    if not database.exists():
        return Finding("database", "ok", f"{database} will be made by the first start")
    from telemetry.database import StoreError, open_for_reading

    try:
        connection = open_for_reading(database)
    except StoreError as error:
        return Finding("database", "missing", str(error))
    row = connection.execute("SELECT count(*) FROM runs").fetchone()
    connection.close()
    return Finding("database", "ok", f"{database}, {row[0] if row else 0} runs, {database.stat().st_size / 1e6:.1f} MB")


def _state() -> Finding:
    folder = places.state_dir()
    probe = folder if folder.exists() else next(parent for parent in folder.parents if parent.exists())
    if not os.access(probe, os.W_OK):
        return Finding("state", "missing", f"{folder} cannot be written", "set METRALE_STATE to a directory of yours")
    free = shutil.disk_usage(probe).free
    state = "ok" if free > 2**30 else "warning"
    return Finding("state", state, f"{folder}, {free / 2**30:.1f} GiB free on its disk")


def _port() -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError:
            return Finding("port", "warning", f"{DEFAULT_PORT} is in use", "serve on another one with --port")
    return Finding("port", "ok", f"{DEFAULT_PORT} is free")


def _terminal() -> Finding:
    if not sys.stdout.isatty():
        return Finding("terminal", "ok", "output is not a terminal; `metrale chat -p` works")
    size = shutil.get_terminal_size()
    state = "ok" if size.columns >= 80 and size.lines >= 24 else "warning"
    return Finding("terminal", state, f"{size.columns}x{size.lines}", "" if state == "ok" else "make it 80x24 at least")
