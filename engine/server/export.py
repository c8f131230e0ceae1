"""Telemetry on its way out of the owning process: Parquet files in one archive."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

from engine.server.ports import Telemetry


def packed(telemetry: Telemetry, run: int) -> Path:
    """A tar file of one run (0: of all), which the caller removes. Blocks; raises `QueryRefusedError`."""
    with tempfile.TemporaryDirectory(prefix="metrale-export-") as folder:
        telemetry.export(run, Path(folder))
        with tempfile.NamedTemporaryFile(prefix="metrale-export-", suffix=".tar", delete=False) as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                for path in sorted(Path(folder).iterdir()):
                    archive.add(path, path.name)
            return Path(file.name)
