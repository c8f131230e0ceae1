"""`metrale train mtp` and `metrale train dflash`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from engine.cli.options import DEFAULT_MODEL, json_option
from engine.cli.serve import find_model


@click.command(epilog="Example: metrale train mtp --minutes 8 --out head.safetensors")
@click.argument("kind", type=click.Choice(["mtp", "dflash"]))
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The head file; else KIND.safetensors.")
@click.option("--minutes", type=click.FloatRange(0.01), default=8.0, help="Time for the optimisation itself.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to train.")
@click.option("--corpus", type=click.Path(path_type=Path), help="Self-made data: read if it is there, else written.")
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), help="Prompts to measure acceptance on.")
@json_option
def train(
    kind: str, model: str, out: Path | None, minutes: float, device: str, corpus: Path | None, prompts: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Train a draft head of KIND for MODEL from the model's own output; no other data is used."""
    path = find_model(model)
    target = out or Path(f"{kind}.safetensors")
    options: dict[str, Any] = {"corpus_path": corpus, "prompts_path": prompts}
    found = _trainer(kind)(path, target, minutes, device, lambda line: click.echo(line, err=True), **options)
    if as_json:
        click.echo(json.dumps(found, indent=2, default=str))
    else:
        click.echo(f"Wrote {target}.")


def _trainer(kind: str) -> Any:
    if kind == "mtp":
        from engine.train.mtp import train_mtp

        return train_mtp
    from engine.train.dflash import train_dflash

    return train_dflash
