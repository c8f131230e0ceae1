"""A draw at a temperature as a plain numpy reading of the contract, word for word, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.core.device import RowPlan


def reference_draw(row: npt.NDArray[Any], plan: RowPlan) -> int:
    """The token that a row of logits `[vocab]` gives at `plan.uniform`."""
    scaled = row.astype(np.float64) / plan.temperature
    order = np.lexsort((np.arange(len(row)), -scaled))
    probs = np.exp(scaled - scaled.max())
    kept = (probs / probs.sum())[order]
    if plan.top_k > 0:
        kept[plan.top_k :] = 0
    kept /= kept.sum()
    if plan.top_p < 1:
        kept[np.cumsum(kept) - kept >= plan.top_p] = 0
    if plan.min_p > 0:
        kept[kept < plan.min_p * kept[0]] = 0
    kept /= kept.sum()
    return int(order[np.searchsorted(np.cumsum(kept), plan.uniform, side="right")])
