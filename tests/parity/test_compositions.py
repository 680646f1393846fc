"""Options, layouts and calls that meet at random train as one device does (compositions.py)."""

from __future__ import annotations

import pytest

from .compositions import wrong

FEW, MORE = range(8), range(8, 150)


@pytest.mark.medium
@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE)])
def test_a_random_composition_trains_as_one_device_does(seed: int) -> None:
    assert not wrong(seed)
