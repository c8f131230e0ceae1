"""What the routes of the page send: types, caching, security headers, and nothing outside their folder."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from dashboards.app import STATIC, assets, routes
from dashboards.panels import words
from engine.protocol.wire import WIRE_PATH
from telemetry.names import Finish, GateReason, Lane, Refusal

SOURCES = sorted(
    path for path in STATIC.rglob("*") if path.suffix in {".js", ".html", ".css"} and "vendor" not in path.parts
)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=routes()))


def test_the_index_has_a_strict_policy_and_no_inline_code(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", answer.text)


def test_the_index_names_the_path_of_the_wire(client: TestClient) -> None:
    assert f'data-wire="{WIRE_PATH}"' in client.get("/").text


def test_every_file_that_the_index_names_is_served(client: TestClient) -> None:
    for path in re.findall(r'(?:src|href)="(/static/[^"]+)"', client.get("/").text):
        assert client.get(path).status_code == 200, path


def test_every_module_that_a_module_imports_is_served(client: TestClient) -> None:
    for source in (path for path in SOURCES if path.suffix == ".js"):
        for name in re.findall(r'from "(\.[^"]+)"', source.read_text()):
            target = (source.parent / name).resolve().relative_to(STATIC)
            assert client.get(f"/static/{target}").headers["content-type"].startswith("text/javascript"), name


def test_a_known_etag_is_answered_without_the_body(client: TestClient) -> None:
    first = client.get("/static/app.js")
    again = client.get("/static/app.js", headers={"If-None-Match": f'W/"other", {first.headers["etag"]}'})
    assert again.status_code == 304
    assert again.content == b""
    assert again.headers["etag"] == first.headers["etag"]
    assert client.get("/static/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["../app.py", "%2e%2e/app.py", "..%2fapp.py", "nothing.js", "", "package.json"])
def test_nothing_but_the_files_of_the_page_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/static/{path}").status_code == 404


def test_the_page_only_reads(client: TestClient) -> None:
    assert client.post("/").status_code == 405


def test_no_source_of_the_page_names_another_host() -> None:
    for source in SOURCES:
        found = re.findall(r"(?:https?|wss?)://(?!www\.w3\.org)[^\s`\"'$]+", source.read_text())
        assert not found, f"{source.name}: {found}"


def test_no_source_of_the_page_turns_text_into_markup() -> None:
    for source in SOURCES:
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", source.read_text()
        )
        assert not found, f"{source.name}: {found}"


def test_every_colour_of_the_themes_is_stated_once_for_both() -> None:
    sheet = (STATIC / "style.css").read_text()
    stated = re.findall(r"(--[\w-]+): ([^;]+);", sheet)
    assert len(stated) > 20
    assert len({name for name, _ in stated}) == len(stated)
    both = re.compile(r"light-dark\((#\w{6}|rgb\([^)]*\)), (#\w{6}|rgb\([^)]*\))\)")
    assert [name for name, value in stated if not both.fullmatch(value)] == []


def test_the_vendored_library_comes_with_licence_and_origin() -> None:
    served = assets()
    assert b"MIT License" in served["vendor/uplot/LICENSE"].body
    assert b"1.6.32" in served["vendor/uplot/README.md"].body
    assert b"(v1.6.32)" in served["vendor/uplot/uPlot.iife.min.js"].body


def test_the_package_ships_every_file_that_is_served() -> None:
    project = tomllib.loads((STATIC.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    names = {path.rpartition("/")[2] for path in assets() if path != "words.json"}
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_every_word_of_telemetry_has_a_sentence_on_the_page() -> None:
    said = words()
    for section, names in (("lanes", Lane), ("refusals", Refusal), ("gate", GateReason), ("finishes", Finish)):
        assert set(said[section]) == {name.value for name in names}, section  # type: ignore[call-overload]
    codes = [entry["code"] for entry in said["lanes"].values()]  # type: ignore[attr-defined]
    assert len(set(codes)) == len(codes)


def test_the_page_loads_no_torch_and_no_database() -> None:
    check = (
        "import sys, dashboards.app; dashboards.app.routes();"
        "print([name for name in ('torch', 'duckdb', 'textual') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
