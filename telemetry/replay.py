"""A recorded run played into a hub of its own, so that every screen shows it as it showed it live."""

from __future__ import annotations

from telemetry.batch import pack
from telemetry.database import Connection
from telemetry.hub import Hub
from telemetry.migrations import scalar
from telemetry.recorded import Period, recorded_levers, records
from telemetry.recovery import context_of

BEFORE_S = 60.0
"""A seek plays this much first, for windows and percentiles."""
_AT_ONCE_S = 10.0


class Replay:
    """Time moves when `advance` says so; pause, speed and the wire are the caller's.

    Subscribe to `hub` and read windows exactly as from the live one; its clock stands at the position.
    """

    def __init__(self, cursor: Connection, run: int) -> None:
        self._cursor = cursor
        self.run = run
        self._context = context_of(cursor, run)
        self.run_id = self._context.record.run_id
        first, last = (
            scalar(cursor, f"SELECT epoch_us({what}) FROM lane_steps WHERE run = ?", [run])
            for what in ("min(start)", "max(start + to_microseconds(dur_us))")
        )
        self._start_us = int(first or self._context.record.unix_ns // 1000)
        self.duration_s = (int(last) - self._start_us) / 1e6 if last else 0.0
        self.position_s = 0.0
        self._changes = [change for change in recorded_levers(cursor, run) if not change.error]
        self.hub = Hub(clock_ns=self._clock_ns)
        self.seek(0.0)

    def seek(self, position_s: float) -> None:
        """Jump; totals then count from shortly before the position."""
        target = min(max(0.0, position_s), self.duration_s)
        self.position_s = max(0.0, target - BEFORE_S)
        self.hub.update(pack([self._context.record]))
        self.advance(target - self.position_s)

    def advance(self, seconds: float) -> bool:
        """Play so many seconds of the run; False at its end."""
        target = min(self.position_s + max(0.0, seconds), self.duration_s)
        while self.position_s < target:
            until = min(self.position_s + _AT_ONCE_S, target)
            period = Period(self._unix_us(self.position_s), self._unix_us(until) + (until >= self.duration_s))
            self.position_s = until
            self.hub.update(pack(records(self._cursor, self.run, period)))
        return self.position_s < self.duration_s

    @property
    def levers(self) -> dict[str, bool | int | float | str]:
        """Values at the position: those at the start of the run, and the changes until then."""
        now_ns = self._unix_us(self.position_s) * 1000 - self._context.offset_us * 1000
        values = dict(self._context.record.levers)
        for change in self._changes:
            if change.time_ns <= now_ns:
                values[change.name] = change.new
        return values

    @property
    def time(self) -> float:
        """Unix seconds at the position."""
        return self._unix_us(self.position_s) / 1e6

    def _unix_us(self, position_s: float) -> int:
        return self._start_us + round(position_s * 1e6)

    def _clock_ns(self) -> int:
        return self._unix_us(self.position_s) * 1000
