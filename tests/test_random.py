"""Counter-based randomness: a shard draws exactly its part of what one device draws."""

from __future__ import annotations

import math

import pytest
import torch

from isograd.core import rng


def test_initial_values_of_a_box_are_that_box_of_the_whole() -> None:
    shape, k = (37, 5, 3), rng.key(3, "w")
    whole = torch.empty(shape)
    rng.init_(whole, k, 0.02, shape, [(0, 37), (0, 5), (0, 3)])
    for box in ([(0, 10), (0, 5), (0, 3)], [(10, 37), (2, 4), (1, 3)], [(5, 6), (0, 5), (0, 1)]):
        part = torch.empty([stop - start for start, stop in box])
        rng.init_(part, k, 0.02, shape, box)
        assert torch.equal(part, whole[tuple(slice(*b) for b in box)])


def test_chunks_of_rows_do_not_show(monkeypatch) -> None:
    k, shape = rng.key(1), (50, 7)
    whole = torch.empty(shape, dtype=torch.float64)
    rng.init_(whole, k, 1.0, shape, [(0, 50), (0, 7)])
    monkeypatch.setattr(rng, "_CHUNK", 20)
    again = torch.empty(shape, dtype=torch.float64)
    rng.init_(again, k, 1.0, shape, [(0, 50), (0, 7)])
    assert torch.equal(whole, again)


def test_initial_values_are_normal_with_the_asked_deviation_cut_at_two_of_them() -> None:
    x = rng.trunc_normal(rng.key(0), torch.arange(400_000), 0.02)
    assert abs(float(x.mean())) < 5 * 0.02 / math.sqrt(400_000)
    assert float(x.std()) == pytest.approx(0.02, rel=5e-3)
    z = float(x.abs().max()) / (0.02 / 0.8739)
    assert 1.95 < z < 1.98
    inside = float((x.abs() < 0.02 / 0.8739).double().mean())  # within one deviation of the uncut distribution
    assert inside == pytest.approx(0.6827 / (1 - 2 * 0.02425), abs=4e-3)


def test_streams_of_different_keys_and_neighbouring_indices_are_unrelated() -> None:
    index = torch.arange(100_000)
    streams = [rng.uniform(rng.key(s, w), index) - 0.5 for s, w in ((0, "a"), (0, "b"), (1, "a"))]
    streams.append(streams[0].roll(1))
    for i, a in enumerate(streams):
        for b in streams[:i]:
            assert abs(float((a * b).mean() * 12)) < 5 / math.sqrt(100_000)


def test_a_key_depends_on_every_word_and_not_on_the_process() -> None:
    assert rng.key(0, "a", 1) != rng.key(0, "a", 2)
    assert rng.key(0, "a").fold("b") != rng.key(0, "ab")
    assert rng.key(7, "x").seed == 2500374159468678587


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share_and_scale_and_the_same_mask_in_backward(p: float) -> None:
    rows = torch.arange(300) * (1 << 32)
    x = torch.ones(300, 200, dtype=torch.float64, requires_grad=True)
    y = rng.dropout(x, p, rng.key(2), rows)
    y.sum().backward()
    kept = float((y.detach() != 0).double().mean())
    assert kept == pytest.approx(1 - p, abs=5 * math.sqrt(p * (1 - p) / 60_000))
    assert set(y.detach().unique().tolist()) == {0.0, 1.0 / (1.0 - p)}
    assert torch.equal(x.grad, y.detach())


def test_dropout_of_a_part_is_that_part_of_the_whole() -> None:
    rows, k = torch.arange(20) * 7 + 3, rng.key(2)
    x = torch.randn(20, 16)
    whole = rng.dropout(x, 0.3, k, rows)
    assert torch.equal(rng.dropout(x[5:9], 0.3, k, rows[5:9]), whole[5:9])
    assert torch.equal(rng.dropout(x[:, 4:10], 0.3, k, rows, first_col=4), whole[:, 4:10])
