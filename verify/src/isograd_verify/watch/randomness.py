"""The state of the random generators of a process, as tensors."""

from __future__ import annotations

import random
import sys

import torch
from torch import Tensor


def generators() -> dict[str, Tensor]:
    """The state of the random generators: torch's, for masks of dropout, Python's and numpy's, for data."""
    states = {"generator/cpu": torch.get_rng_state(), "generator/python": torch.tensor(random.getstate()[1])}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["generator/cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        _, words, place, *_ = numpy.random.get_state()
        states["generator/numpy"] = torch.tensor([*map(int, words), place])
    return states


def set_generators(states: dict[str, Tensor]) -> None:
    """The random generators go on from states that `generators` told."""
    torch.set_rng_state(states["generator/cpu"])
    random.setstate((3, tuple(states["generator/python"].tolist()), None))
    if "generator/cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["generator/cuda"])
    if "generator/numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        *words, place = states["generator/numpy"].tolist()
        numpy.random.set_state(("MT19937", words, place))
