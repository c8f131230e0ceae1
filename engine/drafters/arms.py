"""What a decode step can be: plain, or a drafter with a number of drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from engine.core.device import DrafterName


@dataclass(frozen=True, slots=True)
class ArmKey:
    """Plain (no drafter, no drafts), or a drafter with a draft count."""

    drafter: DrafterName | None = None
    drafts: int = 0
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.drafter.value}:{self.drafts}" if self.drafter else "plain")


PLAIN: Final = ArmKey()

Offer = Mapping[DrafterName | None, Sequence[int]]
"""Rising draft counts by drafter; plain offers 0."""


@cache
def arm_of(drafter: DrafterName | None, drafts: int) -> ArmKey:
    """The one key of an arm."""
    return ArmKey(drafter, drafts)


@cache
def arms_of(drafter: DrafterName, most: int) -> tuple[ArmKey, ...]:
    """The arms of a drafter with 1 to `most` drafts."""
    return tuple(arm_of(drafter, drafts) for drafts in range(1, most + 1))
