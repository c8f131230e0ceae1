"""`metrale train dflash`: data from the model itself, training, measurement, a head file with its provenance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.model.dflash_head import DFlashNet
from engine.train.dflash_fit import DFlashPlan, DFlashTraining, new_net, rounded_net
from engine.train.features import Window
from engine.train.fit import Report
from engine.train.mtp_fit import default_taps
from engine.train.session import Session, TrainRequest

DRAFT_VOCABULARIES = (8192, 16_384)


def train_dflash(
    model_path: Path, out: Path, minutes: float, device: str = "auto", progress: Report = print, **options: Any
) -> dict[str, Any]:
    """Train a DFlash head for `minutes` and write it to `out`; returns its provenance and figures.

    `options` are further fields of `TrainRequest` (`corpus_path`, `prompts_path`, sizes).
    """
    return run_dflash(TrainRequest(Path(model_path), Path(out), minutes, device, **options), DFlashPlan(), progress)


def run_dflash(request: TrainRequest, plan: DFlashPlan, progress: Report) -> dict[str, Any]:
    session = Session(request, default_taps, progress)
    net = new_net(session.target, plan, session.taps)
    training = DFlashTraining(session.target, net, session.vocab_ids, plan)

    def measure() -> dict[str, Any]:
        return _measure(session, training, rounded_net(net))

    return session.train("dflash", net, net.shape.as_dict(), training.loss, plan, measure)


def _measure(session: Session, training: DFlashTraining, net: DFlashNet) -> dict[str, Any]:
    """Acceptance of the head as stored, with the chain per size of the draft vocabulary and without it."""
    stored = DFlashTraining(session.target, net, training.vocab_ids, training.plan)
    sizes = sorted({min(size, len(training.vocab_ids)) for size in DRAFT_VOCABULARIES})
    measured = {}
    for ids, chain in [(sizes[0], False), *((size, True) for size in sizes)]:

        def hits(window: Window, ids: int = ids, chain: bool = chain) -> Any:
            return stored.hits(window, ids, chain=chain)

        name = f"ids={ids}" + ("" if chain else ", no chain")
        measured[name] = session.measure(hits, training.plan.block - 1)
        session.report(f"{name}: held out {measured[name]['held_out']}, prompts {measured[name].get('prompts')}")
    return measured
