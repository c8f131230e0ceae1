"""Compiles the C++ sources beside this file with the system compiler and caches the library by what went into it."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import platformdirs

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300
_COMMON = (
    "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread",
    # Every variant must round alike: no contraction but where the source asks for it.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")


class BuildError(RuntimeError):
    """The library cannot be built here; the text says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One call of the compiler: a source and the flags of one variant."""

    name: str
    source: str
    flags: tuple[str, ...] = ()


def units(machine: str) -> tuple[Unit, ...]:
    """What is compiled for a machine type as `platform.machine` names it."""
    plain = tuple(Unit(name, f"{name}.cpp") for name in ("check", "draft", "model", "pack", "pool", "scratch"))
    variants = [_variant("portable", "portable")]
    if machine.lower() in ("x86_64", "amd64"):
        variants += [
            _variant("avx512", "AVX-512 VNNI", "-DMETRALE_AVX512", *_AVX512),
            _variant("avxvnni", "AVX-VNNI", "-DMETRALE_AVX2", *_AVX2, "-mavxvnni"),
            _variant("avx2", "AVX2", "-DMETRALE_AVX2", *_AVX2),
        ]
    return (*variants, *plain)


def _variant(name: str, title: str, *flags: str) -> Unit:
    defines = (f"-DMETRALE_VARIANT=metrale_{name}", f'-DMETRALE_TITLE="{title}"')
    return Unit(name, "variant.cpp", (*defines, *flags))


def library_path() -> Path:
    """Where the library for these sources, this compiler and this machine lies or would lie.

    Raises `BuildError` without a compiler.
    """
    compiler = find_compiler()
    digest = hashlib.sha256()
    for part in _ingredients(compiler):
        digest.update(len(part).to_bytes(8, "little") + part)
    return cache_directory() / f"native-{digest.hexdigest()[:20]}.so"


def build(*, force: bool = False) -> Path:
    """The library, compiled if it is not cached yet; safe when several processes do it at once.

    Raises `BuildError` when there is no compiler or it fails.
    """
    target = library_path()
    if target.exists() and not force:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            finished = _compile(find_compiler(), Path(scratch))
            os.replace(finished, target)
    except OSError as error:
        raise BuildError(f"the native kernels cannot be written to {target.parent} ({error.strerror})") from None
    return target


def find_compiler() -> str:
    """Path of the C++ compiler: the first of `COMPILERS` on the search path."""
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"there is no C++ compiler ({', '.join(COMPILERS)}): install one for the fast CPU path")


def cache_directory() -> Path:
    """`METRALE_CACHE`, or the user's cache directory."""
    return Path(os.environ.get("METRALE_CACHE") or platformdirs.user_cache_dir("metrale")) / "native"


def _ingredients(compiler: str) -> Iterator[bytes]:
    yield platform.machine().encode()
    yield sys.platform.encode()
    yield _run([compiler, "--version"], "the compiler does not start").encode()
    yield repr((_COMMON, units(platform.machine()))).encode()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            yield source.name.encode()
            yield source.read_bytes()


def _compile(compiler: str, scratch: Path) -> Path:
    todo = units(platform.machine())
    with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        objects = list(workers.map(lambda unit: _compile_unit(compiler, unit, scratch), todo))
    library = scratch / "native.so"
    _run([compiler, "-shared", "-pthread", "-o", str(library), *map(str, objects)], "linking failed")
    return library


def _compile_unit(compiler: str, unit: Unit, scratch: Path) -> Path:
    made = scratch / f"{unit.name}.o"
    command = [compiler, *_COMMON, *unit.flags, "-c", str(SOURCES / unit.source), "-o", str(made)]
    _run(command, f"compiling {unit.name} failed")
    return made


def _run(command: Sequence[str], failure: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the native kernels cannot be built: {failure} ({error})") from None
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200].strip())
        raise BuildError(f"the native kernels cannot be built: {failure} ({reason})")
    return done.stdout


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(str(error))
