"""Fixtures that every part of the suite may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.fetch import DEFAULT_MODEL, resolve_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched into the user's cache on first use. Mark such tests `model`."""
    return resolve_model(DEFAULT_MODEL)
