"""On a CPU, memory that one step frees stays with the process for the next one.

glibc gives the end of its heap back to the system as soon as some of it is free, and has a tensor of more than its
threshold mapped by itself. Each step then takes every page from the system again, which clears it first: 5,000 to
15,000 pages in a step of 512 tokens of a model of 20 million parameters. Here the heap is kept, and tensors of up to
32 MiB, which is as far as glibc goes, lie in it. The most memory that the process ever has stays the same.

A program that has set glibc's own variables, such as MALLOC_TRIM_THRESHOLD_, is left as it is.
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers of what mallopt sets
NEVER = -1
LARGEST = 32 * 2**20


def keep(device: torch.device) -> bool:
    """For the whole process, if a step's tensors lie on `device`; whether it was done."""
    chosen = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if device.type != "cpu" or chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST) and mallopt(TRIM_THRESHOLD, NEVER))
