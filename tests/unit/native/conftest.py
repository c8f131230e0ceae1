"""The native tests need the library; where it cannot be built they are skipped with the reason."""

from __future__ import annotations

import pytest

from engine.model.native.build import BuildError
from engine.model.native.library import load, variants


def _variants() -> tuple[str, ...]:
    try:
        return variants(load())
    except (BuildError, OSError):
        return ()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", _variants())


@pytest.fixture(autouse=True, scope="session")
def library() -> None:
    try:
        load()
    except (BuildError, OSError) as error:
        pytest.skip(str(error))
