"""Contrastive training broken on purpose, one sum, cut or weight at a time: under each mutant the comparison that the
matrix makes fails on every rank's gradients. What is replaced is a name in the module that uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.comm import ops, raw
from isograd.core.layout import Layout
from isograd.engine.step import StepState
from isograd.losses.contrastive import columns, grad_cache, losses
from isograd.losses.contrastive.columns import Columns
from isograd.losses.contrastive.tiles import FalseNegativeMask
from tests.losses.contrastive.test_matrix import LOSSES
from tests.losses.contrastive.toys import assert_same, cached, one_device

POOL = sys.modules["isograd.losses.contrastive.pool"]
DP, RING, CP, SP = "dp4 zero1", "dp4", "dp2 cp2 ulysses zero1", "dp2 tp2 sp zero2"
ONE_WAY, IDS, GUIDE, OWN = "one way", "both ways, ids", "both ways, ring, guide", "own function"


class Replaced:
    """A module of which some functions are others."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self.__dict__.update(functions)
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def own_part(x: Tensor, group: Any, sizes: Any) -> Tensor:
    """What a reduce-scatter would keep, without anyone else's."""
    return x.split(list(sizes))[group.index].clone()


def twice(x: Tensor, group: Any, sizes: Any) -> Tensor:
    return raw.reduce_scatter(x, group, sizes) * 2


def averaged(x: Tensor, group: Any, sizes: Any) -> Tensor:
    return raw.reduce_scatter(x, group, sizes) / group.size


def own_rows(x: Tensor, group: Any, sizes: Any) -> Tensor:
    """A gather that brings this rank's part and zeros for the others'."""
    parts = [torch.zeros(n, *x.shape[1:], dtype=x.dtype) for n in sizes]
    parts[group.index] = x
    return torch.cat(parts)


def rolled(self: Columns, *args: Any) -> Tensor:
    return Columns._around(self, *args).roll(1, 0)


def weighed(weight: Callable[[float], float]) -> Callable[..., None]:
    before = StepState.backward_loss

    def backward_loss(self: StepState, loss: Tensor, rows: Any, *, last: bool) -> None:
        before(self, loss, weight(float(rows)), last=last)

    return backward_loss


def kept(x: Tensor, group: Any) -> Tensor:
    return x


def summed_both_ways(x: Tensor, group: Any) -> Tensor:
    return ops.copy_in(ops.all_reduce(x, group), group)


class _Wrong(Columns):
    _around = rolled


MUTANTS: dict[str, tuple[str, str, Any, str, Any]] = {
    "gradients of columns do not come home": (DP, ONE_WAY, columns, "raw", Replaced(raw, reduce_scatter=own_part)),
    "gradients of columns come home twice": (DP, ONE_WAY, columns, "raw", Replaced(raw, reduce_scatter=twice)),
    "gradients of columns are averaged": (DP, IDS, columns, "raw", Replaced(raw, reduce_scatter=averaged)),
    "a ring brings gradients to other rows": (RING, GUIDE, losses, "Columns", _Wrong),
    "each rank takes its columns for the first": (DP, IDS, Columns, "first", property(lambda self: 0)),
    "nothing is hidden": (DP, IDS, FalseNegativeMask, "tile", lambda self, rows, columns: torch.tensor(False)),
    "ranks weigh alike": (DP, ONE_WAY, StepState, "backward_loss", weighed(lambda rows: float(rows > 0))),
    "ranks weigh by the square of their rows": (DP, ONE_WAY, StepState, "backward_loss", weighed(lambda rows: rows**2)),
    "a function of all rows lacks other ranks' weights": (
        DP, OWN, losses, "ops", Replaced(ops, all_gather=ops.gather_for_identical_use)),
    "gradients of shared rows are not gathered": (CP, ONE_WAY, grad_cache, "raw", Replaced(raw, all_gather=own_rows)),
    "vectors lack the other ranks' tokens": (CP, ONE_WAY, POOL, "ops", Replaced(ops, all_reduce=kept)),
    "gradients of vectors are summed over ranks": (
        CP, ONE_WAY, POOL, "ops", Replaced(ops, all_reduce=summed_both_ways)),
    "gathered tokens get every rank's gradient": (
        SP, ONE_WAY, POOL, "ops", Replaced(ops, gather_for_identical_use=ops.all_gather)),
}  # fmt: skip


def broken(names: list[str]) -> list[Any]:
    """On a rank: what each mutant makes of its case; the mutant None is the case itself."""
    found = []
    for name in names:
        layout, loss, home, attribute, other = MUTANTS[name]
        make, masks = LOSSES[loss]
        more = {"chunk": 2, "masks": masks, "rows": "uneven", "decoder": "cp" in layout or "tp" in layout}
        right = cached(layout, make, **more)  # type: ignore[arg-type]
        before = vars(home)[attribute]
        setattr(home, attribute, other)
        try:
            wrong = cached(layout, make, **more)  # type: ignore[arg-type]
        finally:
            setattr(home, attribute, before)
        found.append((right, wrong))
    return found


@pytest.mark.parametrize("layout", [DP, RING, CP, SP])
def test_a_mutant_does_not_pass_for_right(worlds, layout: str) -> None:
    names = [name for name, mutant in MUTANTS.items() if mutant[0] == layout]
    for ranks in worlds(Layout.parse(layout).world_size).run(broken, names):
        for name, (right, wrong) in zip(names, ranks, strict=True):
            make, masks = LOSSES[MUTANTS[name][1]]
            decoder = "cp" in layout or "tp" in layout
            true = one_device(make, Layout.parse(layout).dp, masks=masks, rows="uneven", decoder=decoder)
            assert_same(right, true, name)
            with pytest.raises(AssertionError, match="gradient of"):
                assert_same(wrong, true, name, limit=1e-6)
