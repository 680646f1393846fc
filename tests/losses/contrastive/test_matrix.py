"""Every parameter's gradient, the temperature's too, is that of the plain full-batch loss on one device: fp64, 1e-12.

Layouts of 1, 2 and 4 ranks, chunks of 1, 3 and all rows, towers tied and not, hard negatives, dropout, uneven and empty
ranks, losses and masks: every pair of any two of these values occurs in some case, of each number of ranks.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.core.layout import Layout
from isograd.losses.contrastive import FullBatchLoss, InfoNCE, SigLIP
from tests.losses.contrastive.toys import Found, assert_same, cached, one_device
from tests.sizes import few

LAYOUTS = {
    1: ["dp1", "dp1 zero3"],
    2: ["dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "cp2 ulysses", "cp2 ring zero3", "tp2", "tp2 sp zero1"],
    4: [
        "dp4", "dp4 zero1", "dp4 zero2", "dp4 zero3", "dp2 cp2 ulysses zero1", "dp2 cp2 ring zero3", "dp2 tp2 zero3",
        "dp2 tp2 sp zero2", "cp2 ulysses tp2 sp zero2",
    ],
}  # fmt: skip


class Cosines(torch.nn.Module):
    """A user's own function of all representations, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, queries: Tensor, documents: Tensor, *negatives: Tensor) -> Tensor:
        near = torch.tanh(queries @ torch.cat((documents, *negatives)).T * self.gain)
        return (near * torch.arange(near.shape[1], dtype=near.dtype, device=near.device).cos()).square().mean()


LOSSES = {
    "one way": (lambda mesh: InfoNCE(mesh, 7.0, learn_scale=True, tile=2), ""),
    "both ways, ids": (lambda mesh: InfoNCE(mesh, 7.0, learn_scale=True, both=True, tile=5), "ids"),
    "both ways, ring, guide": (
        lambda mesh: InfoNCE(mesh, 7.0, learn_scale=True, both=True, ring=True, margin=0.1),
        "ids guides",
    ),
    "relative margin": (
        lambda mesh: InfoNCE(mesh, 9.0, learn_scale=True, margin=0.2, relative_margin=True, tile=3),
        "guides",
    ),
    "sigmoid, ring": (lambda mesh: SigLIP(mesh, 5.0, -2.0, tile=3), "ids"),
    "sigmoid": (lambda mesh: SigLIP(mesh, 5.0, -2.0, ring=False), ""),
    "own function": (lambda mesh: FullBatchLoss(mesh, Cosines()), ""),
}
AXES: dict[str, list[Any]] = {
    "loss": list(LOSSES),
    "chunk": [1, 3, 99],
    "keep_mb": [0.0, 0.03, 99.0],  # graphs of none, of some and of all chunks; at ZeRO 3 of none
    "tied": [True, False],
    "negatives": [0, 2],
    "dropout": [0.0, 0.2],
    "rows": ["uneven", "empty"],
}


@lru_cache
def cases(ranks: int) -> list[dict[str, Any]]:
    """Few cases in which every pair of values of two axes meets."""
    axes = {"layout": LAYOUTS[ranks], **AXES}
    pairs = [((a, x), (b, y)) for a, b in combinations(axes, 2) for x, y in product(axes[a], axes[b])]
    missing, chosen = dict.fromkeys(pairs), []
    every = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    while missing:
        first = next(iter(missing))
        fits = (c for c in every if all(c[axis] == value for axis, value in first))
        best = max(fits, key=lambda c: sum(pair in missing for pair in combinations(c.items(), 2)))
        for pair in combinations(best.items(), 2):
            missing.pop(pair, None)
        chosen.append(best)
    return chosen


def arguments(case: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    make, masks = LOSSES[case["loss"]]
    decoder = any(axis in case["layout"] for axis in ("cp", "tp"))
    return make, {"masks": masks, "decoder": decoder} | {k: case[k] for k in ("tied", "negatives", "dropout", "rows")}


def run(chosen: list[dict[str, Any]]) -> list[Found]:
    found = []
    for case in chosen:
        make, more = arguments(case)
        keep_mb = 0.0 if "zero3" in case["layout"] else case["keep_mb"]
        found.append(cached(case["layout"], make, chunk=case["chunk"], keep_mb=keep_mb, **more))
    return found


@lru_cache
def expected(parts: int, **more: Any) -> Found:
    loss = more.pop("loss")
    return one_device(LOSSES[loss][0], parts, **more)


SLOW = ["dp4", "dp4 zero1", "dp4 zero3", "dp2 cp2 ring zero3", "dp2 tp2 sp zero2", "cp2 ulysses tp2 sp zero2"]


@pytest.mark.medium
@pytest.mark.parametrize("layout", few([text for ranks in LAYOUTS.values() for text in ranks], slow=SLOW))
def test_the_gradient_is_that_of_the_full_batch_on_one_device(worlds, layout: str) -> None:
    sizes = Layout.parse(layout)
    chosen = [case for case in cases(sizes.world_size) if case["layout"] == layout]
    for every in worlds(sizes.world_size).run(run, chosen):
        for case, found in zip(chosen, every, strict=True):
            _, more = arguments(case)
            assert_same(found, expected(sizes.dp, loss=case["loss"], **more), str(case))


def test_every_pair_of_values_occurs() -> None:
    for ranks, layouts in LAYOUTS.items():
        met = {pair for case in cases(ranks) for pair in combinations(case.items(), 2)}
        axes = {"layout": layouts, **AXES}
        assert all(((a, x), (b, y)) in met for a, b in combinations(axes, 2) for x, y in product(axes[a], axes[b]))
