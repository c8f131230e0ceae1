"""The chat pane: transcript, prompt and status line, with the live panel beside it where there is room."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content

from tui import charts, words
from tui.charts import Part
from tui.conversation import Reply
from tui.panels.chat.prompt import Prompt
from tui.panels.chat.side import Side
from tui.panels.chat.transcript import Transcript
from tui.state import Phase, State
from tui.widgets import Cell, Panel, muted


class ChatPanel(Panel):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.welcome, self.status = Cell(id="welcome"), Cell(id="chat-status")
        self.transcript, self.prompt, self.side = Transcript(id="transcript"), Prompt(id="prompt"), Side(id="side")

    def compose(self) -> ComposeResult:
        with Horizontal():
            with Vertical(id="talk"):
                yield self.welcome
                yield self.transcript
                yield self.prompt
                yield self.status
            yield self.side

    def show(self, state: State, now: float) -> None:
        empty = not state.conversation.turns and not self.transcript.noted
        self.welcome.display = empty
        if empty:
            self.welcome.put(greeting(state, now))
        self.transcript.tick(now)
        self.status.put(self._status(state))
        self.prompt.lever_names = list(state.levers)
        if self.side.display:
            self.side.show(state, now)

    def landed(self) -> None:
        self.prompt.editor.focus()

    async def follow(self, state: State, now: float) -> None:
        await self.transcript.follow(state.conversation, now)

    def _status(self, state: State) -> Content:
        parts: list[Part] = gauge(state)
        parts.append(muted(f"  {self.metrale.settings.summary()}  "))
        if not self.side.display and state.latest is not None:
            parts += [(f"{words.number(state.latest.tokens_per_s)} tok/s", "$text-primary"), muted(" engine  ")]
        parts.append(muted(state.conversation.name))
        return Content.assemble(*parts)


def gauge(state: State) -> list[Part]:
    """How full the context is with what was said so far."""
    reply: Reply | None = state.reply
    whole = (reply.max_context if reply else 0) or (state.facts.max_context if state.facts else 0)
    if not whole:
        return [muted("context –")]
    used = (reply.prompt_tokens + (reply.usage.output_tokens if reply.usage else len(reply.tokens))) if reply else 0
    share = used / whole
    color = "$text-error" if share > 0.9 else "$text-warning" if share > 0.75 else "$text-success"
    return [muted("context "), *charts.bar(share, 8, color), muted(f" {words.count(used)}/{words.count(whole)} tokens")]


def greeting(state: State, now: float) -> Content:
    """What stands where nothing has been said yet: how loading goes, or what to do."""
    loading = state.loading
    if state.link.phase is Phase.REFUSED:
        return charts.join([[("Not connected", "bold $text-error")], [(state.link.reason, "")]])
    if loading.state == "failed":
        return charts.join([[("The model could not be loaded", "bold $text-error")], [(loading.message, "")]])
    if not state.ready:
        return _progress(state, now)
    facts = state.facts
    lines: list[list[Part]] = [
        [(facts.model if facts else "ready", "bold $text-primary")],
        [muted(f"{facts.device} · {facts.dtype} · context {words.count(facts.max_context)} tokens" if facts else "")],
        [],
        [("Enter", "bold"), muted(" sends   "), ("Ctrl+J", "bold"), muted(" breaks the line   "), ("Esc", "bold"),
         muted(" stops")],
        [("/", "bold"), muted(" commands   "), ("F2", "bold"), muted(" where tokens came from   "), ("Ctrl+L", "bold"),
         muted(" levers   "), ("F1", "bold"), muted(" help")],
    ]  # fmt: skip
    return charts.join(lines)


def _progress(state: State, now: float) -> Content:
    loading = state.loading
    if state.link.phase is not Phase.OPEN or not loading.stage:
        waited = words.seconds(now - state.link.since) if state.link.since else ""
        what = "Loading the model" if state.link.phase is Phase.OPEN else "Waiting for the engine"
        return charts.join([[(what, "bold"), muted(f"  {waited}")], [muted(state.link.reason)]])
    share = loading.done / loading.total if loading.total else 0.0
    whole = f"  {words.size(loading.done, loading.unit)} of {words.size(loading.total, loading.unit)}"
    amount = whole if loading.total else ""
    lines: list[list[Part]] = [
        [("Loading the model", "bold"), muted(f"  {loading.stage}")],
        [
            *charts.bar(share, 40),
            (f" {words.percent(share):>5}", "bold"),
            muted(amount),
        ],
        [muted("You may write already; Enter sends it as soon as the model is ready.")],
    ]
    return charts.join(lines)
