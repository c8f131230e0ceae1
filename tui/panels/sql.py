"""SQL: an editor, the result as a table, and the named views; the server runs the query, read-only."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import DataTable, OptionList, TextArea
from textual.widgets.option_list import Option

from engine.protocol import wire
from tui import words
from tui.state import QueryRun, State
from tui.widgets import Cell, Panel

VIEWS = "SELECT view_name FROM duckdb_views() WHERE NOT internal ORDER BY view_name"
CELL_WIDTH = 40


class SqlEditor(TextArea):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+j,f5,ctrl+enter", "run_query", "Run", priority=True),
        Binding("tab", "screen.focus_next", show=False),
    ]

    def action_run_query(self) -> None:
        for ancestor in self.ancestors:
            if isinstance(ancestor, SqlPanel):
                ancestor.ask(self.text)

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter" and self.text.rstrip().endswith(";"):
            event.stop()
            event.prevent_default()
            self.action_run_query()
        else:
            await super()._on_key(event)


class SqlPanel(Panel):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._asked, self._views_asked = "", ""
        self._drawn: wire.QueryResult | None = None
        self._views: tuple[str, ...] = ()

    def compose(self) -> ComposeResult:
        with Horizontal(id="sql-top"):
            yield SqlEditor("SHOW TABLES;", highlight_cursor_line=False, id="sql-editor", classes="box")
            yield OptionList(id="sql-views", classes="box", compact=True)
        with Vertical():
            yield Cell(id="sql-note", classes="box")
            yield DataTable(id="sql-table", zebra_stripes=True)

    def on_mount(self) -> None:
        self.title("#sql-editor", "SQL", "; Enter or ^j runs")
        self.title("#sql-views", "Named views", "Enter shows")
        self.title("#sql-note", "Result")

    def landed(self) -> None:
        self.query_one(SqlEditor).focus()
        if not self._views_asked:
            self._views_asked = self._query(VIEWS)

    def ask(self, sql: str) -> None:
        text = sql.strip().rstrip(";").strip()
        if text:
            self._asked = self._query(text)

    def _query(self, sql: str) -> str:
        query_id = self.metrale.fresh_id()
        return query_id if self.metrale.send(wire.Query(query_id=query_id, sql=sql)) else ""

    def show(self, state: State, now: float) -> None:
        run = state.queries.get(self._asked)
        self.query_one("#sql-note", Cell).put(_note(run, now))
        if run is not None and run.result is not None and run.result is not self._drawn:
            self._drawn = run.result
            self._fill(run.result)
        views = state.queries.get(self._views_asked)
        names = tuple(str(row[0]) for row in views.result.rows) if views and views.result else ()
        if names != self._views:
            self._views = names
            self.query_one(OptionList).clear_options()
            self.query_one(OptionList).add_options(Option(Content(name)) for name in names)

    def _fill(self, result: wire.QueryResult) -> None:
        table: DataTable[str] = self.query_one("#sql-table", DataTable)
        table.clear(columns=True)
        table.add_columns(*result.columns)
        table.add_rows([_cell(value) for value in row] for row in result.rows)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        sql = f'SELECT * FROM "{self._views[event.option_index]}" LIMIT 100;'
        self.query_one(SqlEditor).load_text(sql)
        self.ask(sql)


def _note(run: QueryRun | None, now: float) -> Content:
    if run is None:
        return Content.styled("Nothing was asked yet. Choose a view or write a query; it is read-only.", "$quiet")
    result = run.result
    if result is None:
        return Content.styled(f"running for {words.seconds(now - run.since)}", "$text-accent")
    if result.error:
        return Content.styled(words.harmless(result.error), "$text-error")
    cut = ", cut off" if result.truncated else ""
    rows = f"{words.count(len(result.rows))} rows{cut}"
    return Content.styled(f"{rows} in {words.milliseconds(result.seconds * 1000)}", "$quiet")


def _cell(value: object) -> str:
    if value is None:
        return words.DASH
    text = f"{value:.6g}" if isinstance(value, float) else words.harmless(str(value))
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"
