"""Hidden rows wait for the draft head without holes, without rejected drafts and within their bound."""

from __future__ import annotations

import torch

from engine.model.heads import RING_ROWS, HeadRows, HiddenRing


def _rows(start: int, count: int) -> torch.Tensor:
    """Each row holds its own position."""
    return torch.arange(start, start + count, dtype=torch.float32).view(-1, 1, 1)


def _tokens(start: int, count: int) -> tuple[int, ...]:
    return tuple(1000 + position for position in range(start, start + count))


def _filled(*spans: tuple[int, int]) -> HiddenRing:
    ring = HiddenRing()
    for start, count in spans:
        ring.append(start, _rows(start, count), _tokens(start, count))
    return ring


def _positions(rows: HeadRows) -> list[int]:
    return [int(value) for value in rows.hidden.flatten()]


def test_consumed_rows_carry_the_token_that_followed_each() -> None:
    ring = _filled((0, 5), (5, 1), (6, 1))
    (run,) = ring.consume(9, 7, _tokens(0, 7), 77, [3])
    assert _positions(run) == [0, 1, 2, 3, 4, 5, 6]
    assert run.next_tokens == (*_tokens(1, 6), 77)
    assert (run.seq, run.start, run.kv_start) == (9, 0, 0)
    assert ring.oldest == -1


def test_rejected_draft_rows_are_trimmed() -> None:
    ring = _filled((0, 3), (3, 5))
    (run,) = ring.consume(1, 5, _tokens(0, 5), 77, [0])
    assert _positions(run) == [0, 1, 2, 3, 4]
    assert run.next_tokens[-1] == 77


def test_rows_that_are_fed_again_replace_the_old_ones() -> None:
    ring = _filled((0, 6))
    ring.append(4, _rows(40, 2), (1, 2))
    (run,) = ring.consume(1, 6, _tokens(0, 6), 7, [0])
    assert _positions(run) == [0, 1, 2, 3, 40, 41]


def test_a_gap_splits_the_rows_and_restarts_the_heads_memory() -> None:
    ring = _filled((0, 3), (8, 2))
    first, second = ring.consume(1, 10, _tokens(0, 10), 7, [0])
    assert (first.start, first.kv_start) == (0, 0)
    assert (second.start, second.kv_start) == (8, 8)
    assert second.next_tokens == (1009, 7)


def test_the_heads_memory_goes_on_where_it_ended() -> None:
    ring = _filled((0, 4))
    ring.consume(1, 4, _tokens(0, 4), 1004, [0])
    ring.append(4, _rows(4, 3), _tokens(4, 3))
    (run,) = ring.consume(1, 6, _tokens(4, 2), 7, [0])
    assert (run.start, run.kv_start) == (4, 0)
    ring.append(2, _rows(2, 1), _tokens(2, 1))
    (again,) = ring.consume(1, 3, _tokens(2, 1), 7, [0])
    assert (again.start, again.kv_start) == (2, 0)


def test_the_ring_stays_bounded_and_the_memory_of_the_head_begins_after_what_was_shed() -> None:
    ring = _filled((0, 600), (600, 600))
    ring.shed()
    assert ring.rows == RING_ROWS
    assert ring.oldest == 176
    (rest,) = ring.consume(1, 1200, _tokens(170, 1030), 7, [0])
    assert (rest.start, rest.kv_start) == (176, 176)


def test_state_survives_the_spill_store() -> None:
    ring = _filled((0, 3), (3, 2))
    again = HiddenRing.from_state(ring.state(), torch.device("cpu"))
    (one,), (two,) = (r.consume(1, 5, _tokens(0, 5), 7, [0]) for r in (ring, again))
    assert torch.equal(one.hidden, two.hidden)
    assert one.next_tokens == two.next_tokens


def test_rows_of_a_prompt_whose_successor_was_fed_are_taken_at_once() -> None:
    ring = HiddenRing()
    hidden = torch.arange(5.0)[:, None, None]
    ring.append(0, hidden[:3], (7, 8, 9))
    first = ring.take_known(1, [0])
    assert first is not None
    assert (first.start, first.next_tokens, first.kv_start) == (0, (8, 9), 0)
    ring.append(3, hidden[3:], (10, 11))
    rest = ring.take_known(1, [0])
    assert rest is not None
    assert (rest.start, rest.next_tokens, rest.kv_start) == (2, (10, 11), 0)
    assert torch.equal(rest.hidden, hidden[2:4])
    assert ring.take_known(1, [0]) is None
    (newest,) = ring.consume(1, 5, (7, 8, 9, 10, 11), 12, [0])
    assert (newest.start, newest.next_tokens, newest.kv_start) == (4, (12,), 0)


def test_rows_that_follow_a_token_of_the_devices_own_are_not_taken_at_once() -> None:
    ring = HiddenRing()
    ring.append(0, torch.zeros(1, 1, 1), (7,))
    ring.append(1, torch.zeros(1, 1, 1), (-1,))
    assert ring.take_known(1, [0]) is None
    assert ring.rows == 2
