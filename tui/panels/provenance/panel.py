"""Origins: each token of a reply with its lane, step, draft position, likelihood, refused drafts, gate's reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import exp
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.timer import Timer

from engine.protocol.events import Token
from tui import charts, words
from tui.charts import Part
from tui.conversation import Reply
from tui.panels.provenance.step import gate_line, known, passed_over, query, step_line, wanted
from tui.panels.provenance.token_map import TokenMap, underline
from tui.state import State
from tui.themes import lane_style
from tui.widgets import Cell, Panel, muted

REST_S = 0.15
"""How long the cursor rests on a token before its step is asked for."""


class ProvenancePanel(Panel):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left_square_bracket", "reply(-1)", "Reply before"),
        Binding("right_square_bracket", "reply(1)", "Reply after"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._back = 0
        """How many replies before the last one is shown."""
        self._asking: Timer | None = None

    def compose(self) -> ComposeResult:
        yield Cell(id="origin-legend", classes="box")
        yield TokenMap(id="origin-tokens", classes="box")
        yield Cell(id="origin-token", classes="box")

    def landed(self) -> None:
        self.query_one(TokenMap).focus()
        self._ask_soon()

    def show(self, state: State, now: float) -> None:
        replies = _replies(state)
        self._back = max(0, min(self._back, len(replies) - 1))
        reply = replies[-1 - self._back] if replies else None
        tokens = reply.tokens if reply else ()
        which = f"reply {len(replies) - self._back} of {len(replies)}; [ and ] change" if replies else ""
        self.title("#origin-legend", "Where the tokens came from", which)
        self.query_one("#origin-legend", Cell).put(legend(tokens))
        tokens_map = self.query_one(TokenMap)
        tokens_map.show(tokens)
        self.title("#origin-tokens", "Reply", "arrows move, n next refusal; at the left: lanes of the line")
        index = tokens_map.cursor
        token = tokens[index] if index < len(tokens) else None
        self.title("#origin-token", f"Token {index + 1} of {len(tokens)}" if token else "Token")
        self.query_one("#origin-token", Cell).put(detail(state, reply, index, token))

    @on(TokenMap.Moved)
    def _moved(self) -> None:
        self._ask_soon()
        self.metrale.repaint()

    def _ask_soon(self) -> None:
        """Asks for the step under the cursor once the cursor rests."""
        if self._asking is not None:
            self._asking.stop()
        self._asking = self.set_timer(REST_S, self._ask)

    def _ask(self) -> None:
        state = self.metrale.state
        replies, cursor = _replies(state), self.query_one(TokenMap).cursor
        reply = replies[-1 - self._back] if replies else None
        if reply is not None and cursor < len(reply.tokens) and wanted(state, reply, reply.tokens[cursor].step):
            self.send(query(reply, reply.tokens[cursor].step))

    def action_reply(self, by: int) -> None:
        self._back -= by
        self._ask_soon()
        self.metrale.repaint()


def _replies(state: State) -> list[Reply]:
    return [turn.reply for turn in state.conversation.turns if turn.reply is not None and turn.reply.tokens]


def legend(tokens: tuple[Token, ...]) -> Content:
    if not tokens:
        return Content.styled("No reply yet. Say something in the chat first.", "$quiet")
    by_lane = Counter(token.lane for token in tokens)
    lanes: list[Part] = []
    for name, amount in by_lane.most_common():
        lanes += [muted(f"{words.LANE_MARKS.get(name, '?')} "), (words.lane(name), lane_style(name)),
                  muted(f" {words.percent(amount, len(tokens))}   ")]  # fmt: skip
    refused = sum(len(token.rejected) for token in tokens)
    accepted = sum(1 for token in tokens if token.draft)
    marks: list[Part] = [
        ("own token", ""), muted("   "), ("draft 1", "underline"), muted("   "), ("draft 2+", "underline bold"),
        muted("   "), ("refusal here", "italic"), muted(f"   {accepted} drafts accepted, {refused} refused"),
    ]  # fmt: skip
    return charts.join([lanes, marks])


def detail(state: State, reply: Reply | None, index: int, token: Token | None) -> Content:
    if reply is None or token is None:
        return Content("\n" * 6)
    seen = {t.id: t.text for each in _replies(state) for t in each.tokens if t.text} | dict(state.spelled)
    row = known(state, reply, token.step)
    return charts.join(
        [_what(token), _origin(token), _likely(token, seen), _refused(token, seen),
         step_line(row, token.step), passed_over(row), gate_line(row, reply, index)]
    )  # fmt: skip


def _what(token: Token) -> list[Part]:
    text = repr(words.harmless(token.text)) if token.text else "(text came out with a later token)"
    return [muted("token      "), (text, f"bold {lane_style(token.lane)} {underline(token)}".strip()),
            muted(f"  id {token.id}")]  # fmt: skip


def _origin(token: Token) -> list[Part]:
    place = "the model's own token" if token.draft == 0 else f"draft {token.draft} of its step, accepted"
    lane = (words.lane(token.lane), f"bold {lane_style(token.lane)}")
    return [muted("origin     "), lane, (f", {place}", "")]


def _likely(token: Token, seen: Mapping[int, str]) -> list[Part]:
    if token.logprob is None:
        return [muted("likelihood not asked for; /set logprobs 5 asks with the next message")]
    parts: list[Part] = [muted("likelihood "), (words.percent(exp(token.logprob)), "bold")]
    others = [(other, logprob) for other, logprob in token.top if other != token.id]
    if others:
        parts.append(muted("   instead "))
    for other, logprob in others[:5]:
        parts += [(_named(other, seen), ""), muted(f" {words.percent(exp(logprob))}  ")]
    return parts


def _refused(token: Token, seen: Mapping[int, str]) -> list[Part]:
    if not token.rejected:
        return [muted("refused    no draft was refused here")]
    drafts = "  ".join(_named(draft, seen) for draft in token.rejected)
    return [muted("refused    "), (drafts, "$text-error strike"), muted("  drafted here; the model said otherwise")]


def _named(token_id: int, seen: Mapping[int, str]) -> str:
    """The token's text where a reply has shown it or the server spelled it; its number otherwise."""
    return repr(words.harmless(seen[token_id])) if seen.get(token_id) else f"#{token_id}"
