"""The program's own two themes, and one colour for each lane that can be told apart on dark and on light ground."""

from __future__ import annotations

from textual.theme import Theme

LANE_NAMES = ("prefill", "mixed", "ngram", "self_spec", "mtp", "dflash", "pipelined", "plain")

_DARK = ("#8a93a6", "#6cb6ff", "#5fd38d", "#f2c14e", "#e58fd8", "#ff9d6c", "#7fd4e8", "#c9d1d9")
_LIGHT = ("#5b6472", "#0b5fb0", "#13713f", "#7a5600", "#93307f", "#a2420e", "#0f6675", "#24292f")

DARK = Theme(
    name="metrale-dark",
    primary="#7cb7ff",
    secondary="#8ea4c8",
    accent="#ffb454",
    warning="#f2c14e",
    error="#ff7b72",
    success="#5fd38d",
    foreground="#d7dde6",
    background="#0f131a",
    surface="#151b24",
    panel="#1e2631",
    dark=True,
)
LIGHT = Theme(
    name="metrale-light",
    primary="#0b5fb0",
    secondary="#47546b",
    accent="#a2420e",
    warning="#7a5600",
    error="#b3261e",
    success="#13713f",
    foreground="#1f2530",
    background="#fbfbf9",
    surface="#f2f3f0",
    panel="#e4e7e3",
    dark=False,
)


def lane_variables(dark: bool) -> dict[str, str]:
    """Style variables: `$lane-...`, and `$quiet` for what explains a number."""
    colors = dict(zip(LANE_NAMES, _DARK if dark else _LIGHT, strict=True))
    lanes = {f"lane-{name.replace('_', '-')}": color for name, color in colors.items()}
    return lanes | {"quiet": "#8d99ab" if dark else "#586273"}


ARM_LANES = {"self": "self_spec", "verify": "ngram"}
"""Arms of the gate whose lane has another name; `ngram:3` is the arm that drafts three by n-gram."""


def arm_style(arm: str) -> str:
    drafter = arm.partition(":")[0]
    return lane_style(ARM_LANES.get(drafter, drafter))


def lane_style(name: str) -> str:
    return f"$lane-{name.replace('_', '-')}" if name in LANE_NAMES else "$foreground"
