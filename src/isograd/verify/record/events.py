"""Words that those who record and those who judge have in common: how a contribution is numbered, and how a collective
without a backward reaches the loss."""

from __future__ import annotations

Key = tuple[int, int]  # (rank, micro-batch), where the second number is `key(micro, use)`
USES = 10_000  # more backwards than a recording holds (capture.MOST_MICROS)


def key(micro: int, use: int = 0) -> int:
    """The number of a contribution: a parameter that gets a gradient twice in one backward (a module that is used
    twice under checkpointing) has two, the second with `use` 1."""
    return micro + use * USES


def micro_of(number: int) -> int:
    """The micro-batch of a contribution's number."""
    return number % USES


def use_of(number: int) -> int:
    """Which of its arrivals in one backward a contribution is, from 0."""
    return number // USES


CUT, KEPT, OTHERS = "cut", "kept", "others"  # flows.py tells what each means; the first of several counts
