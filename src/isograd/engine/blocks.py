"""Blocks of a model: what ZeRO 3 gathers together, and where a parameter's gradient is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists and sequences of modules that have parameters."""
    members = [m for m in model.children() if any(True for _ in m.parameters())]
    if isinstance(model, CONTAINERS) and len(members) > 1:
        return members
    return [block for child in model.children() for block in repeated_blocks(child)]


def homes(blocks: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """The block of each parameter (by id) that only one block holds: it has its gradient when that one is done."""
    pairs = [(id(p), block) for block in dict.fromkeys(blocks) for p in dict.fromkeys(block.parameters())]
    holders = Counter(key for key, _ in pairs)
    return {key: block for key, block in pairs if holders[key] == 1}
