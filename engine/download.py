"""One file over HTTP: goes on where an interrupted download stopped and appears under its name only when whole."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

_CHUNK = 1 << 18
_TIMEOUT_S = 30.0


class DownloadError(RuntimeError):
    """What went wrong, in a few words; the part that arrived stays for the next attempt."""


def download(url: str, target: Path, progress: Callable[[int, int], None]) -> None:
    """Fetch `url` into `target` by way of `target.part`. Raises `DownloadError`."""
    parts = urlsplit(url)
    part = target.with_name(target.name + ".part")
    if parts.scheme == "file":
        shutil.copyfile(url2pathname(parts.path), part)
    elif parts.scheme in ("http", "https"):
        _fetch(url, part, progress)
    else:
        raise DownloadError(f"addresses of the kind {parts.scheme!r} are not supported")
    os.replace(part, target)


def _fetch(url: str, part: Path, progress: Callable[[int, int], None]) -> None:
    have = part.stat().st_size if part.exists() else 0
    try:
        with _open(url, have) as response:
            if response.status != 206:
                have = 0  # the server sends the whole file again
            total = have + int(response.headers.get("Content-Length") or 0)
            _append(response, part, have, total, progress)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise DownloadError(f"the server answers {error.code} {error.reason}") from None
        if have and error.headers.get("Content-Range") == f"bytes */{have}":
            return  # nothing is missing: the last attempt ended just before the rename
        part.unlink()  # the part is longer than the file: it belongs to another one
        _fetch(url, part, progress)
    except urllib.error.URLError as error:
        raise DownloadError(f"no connection: {error.reason}") from None
    except (TimeoutError, ConnectionError, HTTPException) as error:
        raise DownloadError(f"the connection broke: {error or type(error).__name__}") from None


def _open(url: str, have: int) -> HTTPResponse:
    headers = {"Accept-Encoding": "identity", "User-Agent": "metrale"}
    if have:
        headers["Range"] = f"bytes={have}-"
    context = ssl.create_default_context(cafile=_pip_certificates()) if url.startswith("https:") else None
    response: HTTPResponse = urllib.request.urlopen(
        urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S, context=context
    )
    return response


def _append(response: HTTPResponse, part: Path, have: int, total: int, progress: Callable[[int, int], None]) -> None:
    with part.open("ab" if have else "wb") as sink:
        progress(have, total)
        while chunk := response.read(_CHUNK):
            sink.write(chunk)
            have += len(chunk)
            progress(have, total)
    if total and have < total:
        raise DownloadError(f"the connection ended after {have} of {total} bytes")


def _pip_certificates() -> str | None:
    """The certificate bundle that the user gave to pip, None for the system's own."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if key.rpartition(".")[2] == "cert" and Path(value.strip("'\"")).is_file():
            return value.strip("'\"")
    return None
