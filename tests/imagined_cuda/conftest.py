"""The imagined device replaces what a CPU build of torch lacks, by the rules of Linux's dynamic linker."""

from __future__ import annotations

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _here() -> None:
    if sys.platform != "linux" or torch.version.cuda is not None:
        pytest.skip("the imagined CUDA device needs Linux and a CPU build of torch")
