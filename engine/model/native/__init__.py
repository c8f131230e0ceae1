"""The compiled CPU path: C++ sources, how they are built and how Python calls them.

The package imports nothing at its top so that `python -m engine.model.native.build` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.model.backend import Backend, BackendRequest


def open_backend(request: BackendRequest) -> Backend:
    """The native backend for a GGUF file; raises `BackendUnavailable` where it cannot run."""
    from engine.model.native_backend import open_backend as opener

    return opener(request)
