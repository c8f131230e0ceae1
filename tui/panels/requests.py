"""Requests: those that run and the last that ended; sorted, filtered, cancelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Input

from engine.protocol import wire
from tui import words
from tui.state import State
from tui.widgets import Cell, Panel, age


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    show: Callable[[wire.RequestView], str]
    order: Callable[[wire.RequestView], Any]
    width: int
    number: bool = True


COLUMNS = (
    Column("request", lambda r: r.request_id, lambda r: r.request_id, 18, False),
    Column("state", lambda r: words.finish(r.reason) if r.reason else r.state, lambda r: r.state, 12, False),
    Column("age", lambda r: words.seconds(r.age_s), lambda r: r.age_s, 7),
    Column("prompt", lambda r: words.count(r.prompt_tokens), lambda r: r.prompt_tokens, 7),
    Column("output", lambda r: words.count(r.output_tokens), lambda r: r.output_tokens, 7),
    Column("tok/s", lambda r: words.number(r.tokens_per_s or None), lambda r: r.tokens_per_s, 7),
    Column("TTFT", lambda r: words.milliseconds(r.ttft_ms), lambda r: r.ttft_ms or 0.0, 9),
    Column("accepted", lambda r: f"{r.accepted}/{r.drafted}" if r.drafted else words.DASH,
           lambda r: r.accepted / r.drafted if r.drafted else -1.0, 9),
    Column("lane", lambda r: words.lane(r.lane) if r.lane else words.DASH, lambda r: r.lane, 10, False),
)  # fmt: skip


class RequestsPanel(Panel):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", "Sort by the next column"),
        Binding("S", "sort(-1)", "Sort by the column before"),
        Binding("r", "turn", "Turn the order round"),
        Binding("slash,f", "filter", "Filter"),
        Binding("x,delete", "cancel", "Cancel the request"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._sort, self._down = 2, False
        self._state = State()
        self._cells: dict[str, tuple[str, ...]] = {}
        self._order: list[str] = []

    def compose(self) -> ComposeResult:
        yield Cell(id="req-note", classes="box")
        yield Input(placeholder="show only requests with this in any column", id="req-filter", compact=True)
        yield DataTable(id="req-table", cursor_type="row", zebra_stripes=True)

    def on_mount(self) -> None:
        table = self._table
        for column in COLUMNS:
            table.add_column(_cell(column, column.title), key=column.title, width=column.width)
        self.query_one(Input).display = False

    def landed(self) -> None:
        self._table.focus()

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#req-table", DataTable)

    def show(self, state: State, now: float) -> None:
        self._state = state
        rows = self._rows(state)
        column = COLUMNS[self._sort]
        order = "falling" if self._down else "rising"
        self.title("#req-note", "Requests", age(state, state.requests_at, now))
        note = f"{len(rows)} shown, {order} {column.title}.  s sorts, r turns, / filters, x cancels"
        self.query_one("#req-note", Cell).put(note if state.requests else "No request has run yet.")
        self._fill(rows)

    def _rows(self, state: State) -> list[wire.RequestView]:
        needle = self.query_one(Input).value.lower()
        rows = list(state.requests.rows) if state.requests else []
        if needle:
            rows = [row for row in rows if any(needle in column.show(row).lower() for column in COLUMNS)]
        return sorted(rows, key=COLUMNS[self._sort].order, reverse=self._down)

    def _fill(self, rows: list[wire.RequestView]) -> None:
        """Changes only the cells that differ; builds the table anew when rows came, went or moved."""
        table = self._table
        order = [row.request_id for row in rows]
        cells = {row.request_id: tuple(column.show(row) for column in COLUMNS) for row in rows}
        if order != self._order:
            chosen = self._chosen()
            table.clear()
            for name in order:
                table.add_row(*map(_cell, COLUMNS, cells[name]), key=name)
            if chosen in order:
                table.move_cursor(row=order.index(chosen), animate=False)
        else:
            for name, new in cells.items():
                for column, before, after in zip(COLUMNS, self._cells[name], new, strict=True):
                    if before != after:
                        table.update_cell(name, column.title, _cell(column, after))
        self._order, self._cells = order, cells

    def _chosen(self) -> str:
        row = self._table.cursor_row
        return self._order[row] if 0 <= row < len(self._order) else ""

    def action_sort(self, by: int) -> None:
        self._sort = (self._sort + by) % len(COLUMNS)
        self.metrale.repaint()

    def action_turn(self) -> None:
        self._down = not self._down
        self.metrale.repaint()

    def action_filter(self) -> None:
        field = self.query_one(Input)
        field.display = True
        field.focus()

    def on_input_changed(self) -> None:
        self.metrale.repaint()

    def on_input_submitted(self) -> None:
        field = self.query_one(Input)
        field.display = bool(field.value)
        self._table.focus()

    def action_cancel(self) -> None:
        chosen = self._chosen()
        rows = self._state.requests.rows if self._state.requests else ()
        row = next((row for row in rows if row.request_id == chosen), None)
        if row is None or row.state == "finished":
            self.app.notify("Only a request that has not ended can be cancelled.")
        else:
            self.send(wire.Stop(request_id=chosen))
            self.app.notify(f"Asked to cancel {chosen}.", markup=False)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self._down = not self._down if self._sort == event.column_index else self._down
        self._sort = event.column_index
        self.metrale.repaint()


def _cell(column: Column, text: str) -> Text:
    return Text(text, justify="right" if column.number else "left")
