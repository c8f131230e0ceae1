"""Fixtures of the end-to-end tests; without the default model they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.fetch import FetchError, resolve_model
from tests.e2e.processes import Home, Serving, serving


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def model() -> Path:
    try:
        return resolve_model("smollm2", fetch=False)
    except FetchError as error:
        pytest.skip(str(error))


@pytest.fixture
def served(home: Home, model: Path) -> Iterator[Serving]:
    with serving(home) as running:
        yield running
