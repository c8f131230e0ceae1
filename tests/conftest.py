"""Fixtures that every part of the suite may use."""

from __future__ import annotations

import os
from pathlib import Path

# Threads of torch that spin while they wait take the cores from each other on a busy machine: tests with two of them
# were up to fifteen times as slow. It is read when torch is imported, hence here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest

from engine.fetch import DEFAULT_MODEL, resolve_model

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched into the user's cache on first use. Mark such tests `model`."""
    return resolve_model(DEFAULT_MODEL)
