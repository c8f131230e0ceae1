"""Draws: a pure function of seed and position, uniform and independent enough for sampling."""

from __future__ import annotations

from engine.core.draws import uniform


def test_the_same_seed_and_position_always_draw_the_same() -> None:
    assert uniform(1, 5) == uniform(1, 5)
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400


def test_draws_fill_the_unit_interval_evenly() -> None:
    bins = [0] * 20
    for seed in range(40):
        for position in range(500):
            value = uniform(seed, position)
            assert 0.0 <= value < 1.0
            bins[int(value * 20)] += 1
    chi_square = sum((count - 1000) ** 2 / 1000 for count in bins)
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    pairs = [
        (uniform(s, p) - 0.5, uniform(s, p + 1) - 0.5, uniform(s + 1, p) - 0.5) for s in range(50) for p in range(50)
    ]
    along = sum(a * b for a, b, _ in pairs) / len(pairs) * 12
    across = sum(a * c for a, _, c in pairs) / len(pairs) * 12
    assert abs(along) < 0.08
    assert abs(across) < 0.08
