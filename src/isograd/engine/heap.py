"""On a CPU, memory that one step frees stays with the process for the next one.

glibc gives the end of its heap back to the system as soon as some of it is free, and has a tensor of more than its
threshold mapped by itself. Each step then takes every page from the system again, which clears it first: 5,000 to
15,000 pages in a step of 512 tokens of a model of 20 million parameters. Here the heap is kept, and tensors of up to
32 MiB, which is as far as glibc goes, lie in it. The most memory that the process ever has stays the same.

A program that has set glibc's own variables, such as MALLOC_TRIM_THRESHOLD_, is left as it is.

`slack` keeps the heap from growing around memory that comes and goes. Torch asks for aligned memory. glibc (before
2.38) looks for 96 bytes more than that, and cuts them off again. If something small and long-lived takes the piece that
was cut off, such as a tensor that autograd saves, the freed memory is that much too short for the next tensor of the
same size, which takes new memory: at ZeRO 3 each block of a forward did (150 or 290 MB for the same 48 blocks, by
chance). With a little more memory than it needs, a little less each time, a tensor fits where the one before lay.
"""

from __future__ import annotations

import ctypes
import os
import sys
from itertools import count

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers of what mallopt sets
NEVER = -1
LARGEST = 32 * 2**20
STEP, STEPS = 128, 64  # bytes; how many tensors in turn fit where another lay
SMALLEST = 1 << 20  # bytes, for which 8 kB more are little

_turn = count()


def keep(device: torch.device) -> bool:
    """For the whole process, if a step's tensors lie on `device`; whether it was done."""
    chosen = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if device.type != "cpu" or chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST) and mallopt(TRIM_THRESHOLD, NEVER))


def slack(size: int) -> int:
    """How many bytes more to ask for, of memory of `size` bytes that is soon freed again."""
    return STEP * (STEPS - 1 - next(_turn) % STEPS) if size >= SMALLEST else 0
