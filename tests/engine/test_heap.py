"""On a CPU, steps reuse the memory of the steps before; a program's own settings of glibc are kept."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from itertools import pairwise

import pytest

from isograd.engine import heap

PROGRAM = """
import resource, sys, torch
from torch import nn
import isograd as ig

model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))
make = lambda ps: torch.optim.SGD(ps, lr=0.1)
if sys.argv[1] == "engine":
    engine = ig.Engine(model, ig.Mesh("1"), make)
else:
    optimizer = make(model.parameters())
x, counts = torch.randn(2048, 256), []
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    loss = model(x).square().mean()
    if sys.argv[1] == "engine":
        engine.backward(loss, weight=len(x))
        engine.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(counts[4:]))
"""
WORKING = 2048 * 2048 * 4 // 4096  # pages of one of the hidden tensors


def faults(how: str, **variables: str) -> int:
    """Pages that a later step takes from the system."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_a_step_takes_no_memory_from_the_system_that_the_step_before_has_freed() -> None:
    assert faults("engine") < WORKING // 10
    assert faults("engine", MALLOC_MMAP_THRESHOLD_="65536") > WORKING


HOLES = """
import ctypes, torch
from isograd.engine import heap

heap.keep(torch.device("cpu"))
size, kept, seen = 1 << 22, [], set()
for _ in range(48):  # as blocks of ZeRO 3: one comes before the one before it goes, and small things stay
    storage = torch.UntypedStorage(size + (heap.slack(size) if {slack} else 0))
    seen.add(storage.data_ptr() >> 22)
    kept += [torch.empty(4) for _ in range(8)]
    before = storage
print(len(seen))
"""


def places(slack: bool) -> int:
    """Of 48 tensors in turn, in how many pieces of memory they lay."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", HOLES.format(slack=slack)]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_slack_grows_by_little_and_only_for_large_memory() -> None:
    several = [heap.slack(1 << 20) for _ in range(200)]
    assert max(several) == 128 * 63
    assert min(several) == 0
    assert all(a - b in (128, -128 * 63) for a, b in pairwise(several))
    assert [heap.slack((1 << 20) - 1) for _ in range(3)] == [0, 0, 0]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_memory_with_slack_fits_where_the_memory_before_it_lay() -> None:
    assert places(slack=True) < 12
