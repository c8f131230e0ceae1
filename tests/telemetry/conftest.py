"""Stores in temporary directories, closed whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from telemetry.store import Store

OpenStore = Callable[..., Store]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    opened: list[Store] = []

    def open_one(path: Path = tmp_path / "metrale.duckdb", **settings: object) -> Store:
        store = Store(path, **{"flush_s": 0.02, "commit_s": 0.05, **settings})
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()
