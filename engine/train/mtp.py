"""`metrale train mtp`: data from the model itself, training, measurement, a head file with its provenance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.model.mtp_head import MTPNet
from engine.train.features import Window
from engine.train.fit import Report
from engine.train.mtp_fit import MTPPlan, MTPTraining, default_taps, new_net, rounded_net
from engine.train.session import Session, TrainRequest

DRAFT_VOCABULARIES = (4096, 8192, 16_384)
DEPTH = 5


def train_mtp(
    model_path: Path, out: Path, minutes: float, device: str = "auto", progress: Report = print, **options: Any
) -> dict[str, Any]:
    """Train an MTP head for `minutes` and write it to `out`; returns its provenance and figures.

    `options` are further fields of `TrainRequest` (`corpus_path`, `prompts_path`, sizes).
    """
    return run_mtp(TrainRequest(Path(model_path), Path(out), minutes, device, **options), MTPPlan(), progress)


def run_mtp(request: TrainRequest, plan: MTPPlan, progress: Report) -> dict[str, Any]:
    session = Session(request, default_taps, progress)
    net = new_net(session.target, plan, session.taps)
    training = MTPTraining(session.target, net, session.vocab_ids, plan)

    def measure() -> dict[str, Any]:
        return _measure(session, training, rounded_net(net))

    return session.train("mtp", net, net.shape.as_dict(), training.loss, plan, measure)


def _measure(session: Session, training: MTPTraining, net: MTPNet) -> dict[str, Any]:
    """Acceptance of the head as stored, per size of the draft vocabulary."""
    stored = MTPTraining(session.target, net, training.vocab_ids, training.plan)
    sizes = sorted({min(size, len(training.vocab_ids)) for size in DRAFT_VOCABULARIES})
    measured = {}
    for ids in sizes:

        def hits(window: Window, ids: int = ids) -> Any:
            return stored.hits(window, DEPTH, ids)

        measured[f"ids={ids}"] = session.measure(hits, DEPTH)
        session.report(f"ids={ids}: {_line(measured[f'ids={ids}'])}")
    return measured


def _line(measured: dict[str, Any]) -> str:
    parts = [f"held out {measured['held_out']['K=3']}"]
    for task, counts in measured.get("prompts", {}).items():
        parts.append(f"{task} {counts['K=3']}")
    return "; ".join(parts)
