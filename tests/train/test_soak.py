"""A few of the random kills of tests/train/soak.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.train import soak


@pytest.mark.slow
@pytest.mark.parametrize("layout", soak.LAYOUTS)
def test_a_run_that_is_killed_at_random_moments_ends_with_the_losses_of_the_undisturbed_run(
    worlds, text: Path, tmp_path: Path, layout: str
) -> None:
    _, equal = soak.course(worlds(2), tmp_path, text, layout, 5, random.Random(layout))
    assert equal
