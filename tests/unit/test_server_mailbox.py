"""What waits for one client of the wire."""

from __future__ import annotations

from engine.protocol.events import Token
from engine.protocol.wire import Delta
from engine.server.mailbox import Mailbox


async def test_merged_deltas_spell_the_ids_that_come_without_their_text() -> None:
    mailbox = Mailbox(lambda token: f"<{token}>")
    corrected = Token(id=1, lane="mtp", draft=0, step=1, text="a", rejected=(7, 8))
    likely = Token(id=2, lane="plain", draft=0, step=2, text="b", top=((2, -0.1), (9, -2.0)))
    for token in (corrected, likely):
        mailbox.put(Delta(request_id="r", text="", tokens=(token,)))
    delta = await mailbox.next()
    assert isinstance(delta, Delta)
    assert (delta.text, delta.tokens) == ("ab", (corrected, likely))
    assert delta.spelled == {7: "<7>", 8: "<8>", 2: "<2>", 9: "<9>"}


async def test_a_delta_of_plain_tokens_spells_nothing() -> None:
    mailbox = Mailbox(lambda token: f"<{token}>")
    mailbox.put(Delta(request_id="r", text="", tokens=(Token(id=1, lane="plain", draft=0, step=1, text="a"),)))
    delta = await mailbox.next()
    assert isinstance(delta, Delta)
    assert delta.spelled == {}
