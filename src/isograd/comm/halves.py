"""A message whose receiver does not know its dtype: fp32, or the half precision in which the same numbers were made.

A sender alone knows whether its numbers are exactly those of half precision. It sends them in half the bytes where they
are, and nobody asks: gloo puts a message into the beginning of the memory that waits for it, and leaves the rest alone.

    mark(memory, torch.bfloat16)        # before it waits for a message: the end of fp32 memory
    ...                                 # the message arrives
    found = arrived(memory)             # the mark is still there: half precision, in the first half of the memory

The mark is a signalling NaN. No operation of arithmetic returns one, so no sum of gradients ends with it; a copy of
somebody's input might, and `unmark` makes it another NaN before it is sent.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

# Elements that travel so, where the upper half of an element is the last thing in its memory.
HALVES = (torch.bfloat16, torch.float16) if sys.byteorder == "little" else ()
_MARK = 0x7FB1  # the upper half of an fp32 element: all bits of the exponent, not the first bit of the fraction
_HALF = "_isograd_half"  # of marked memory: the dtype that may come instead of fp32


def mark(memory: Tensor, half: torch.dtype) -> None:
    """Mark the end of fp32 memory that waits for a message, which may be of the dtype `half`."""
    if memory.numel():
        memory.view(-1).view(torch.int16)[-1] = _MARK
        setattr(memory, _HALF, half)


def unmark(message: Tensor) -> None:
    """Before a message is sent to marked memory: its end is no mark."""
    if message.numel() and message.dtype == torch.float32 and _is_marked(message):
        message.view(-1)[-1] = math.nan


def arrived(memory: Tensor) -> Tensor:
    """What a message has left in memory, in the dtype in which it was sent, if the memory was marked."""
    half = getattr(memory, _HALF, None)
    if half is None or not _is_marked(memory):
        return memory
    return memory.view(-1).view(half)[: memory.numel()].view(memory.shape)


def _is_marked(memory: Tensor) -> bool:
    return int(memory.view(-1).view(torch.int16)[-1]) == _MARK
