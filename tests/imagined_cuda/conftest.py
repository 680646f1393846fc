"""The imagined device replaces what a CPU build of torch lacks, by the rules of Linux's dynamic linker."""

from __future__ import annotations

import sys

import pytest
import torch

# What these test is true of real cards, too: benchmarks/gpu_first_hour.py runs them there.
ON_REAL_CARDS = {
    "test_isograd",
    "test_training",
    "test_integrations",
    "test_attention",
    "test_out_of_memory",
}


@pytest.fixture(autouse=True)
def _here(request: pytest.FixtureRequest) -> None:
    if sys.platform != "linux":
        pytest.skip("the imagined CUDA device needs Linux")
    if torch.version.cuda is not None and request.path.stem not in ON_REAL_CARDS:
        pytest.skip("of imagined cards: this torch has real ones")
