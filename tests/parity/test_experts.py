"""A transformer with experts trains as one device does by the dense definition: gradients by name, terms, bias; fp64.

Any two of (layout, ZeRO stage, kind of experts, scope of the balance loss, micro-batches, recompute) meet in some case,
and so do any two of (each axis, shared expert, dense first layer, one or two experts per token), but for pp and ZeRO 3,
which is refused. In `make test` any two of (each axis, ZeRO stage, kind, ...) do.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import pytest
import torch

from isograd.core.layout import Layout
from tests.sizes import few, pairwise, sized

from . import sparse

LAYOUTS = (
    "1", "dp2 ep2", "tp2", "tp2 sp ep2", "cp2 ulysses ep2", "cp2 ring", "pp2", "dp2 tp2 sp ep4", "dp2 cp2 ring ep2",
    "dp2 tp2 ep2", "pp2 vpp2 dp2 ep2",
)  # fmt: skip
KINDS = ("two", "one, shared", "sigmoid, dense first", "tight")
CASES = pairwise(
    [
        case
        for case in itertools.product(
            LAYOUTS, (0, 1, 2, 3), KINDS, ("sequence", "batch", "lagged"), (1, 4), (False, True)
        )
        if not (case[0].startswith("pp") and case[1] == 3) and not (case[0] == "1" and case[1])
    ]
)


def settings(case: tuple[Any, ...]) -> tuple[Hashable, ...]:
    """The values of a case of which any two meet in `make test`."""
    layout, *rest = case
    sizes = Layout.parse(layout)
    cut = sizes.cp_method if sizes.cp > 1 else ""
    return (sizes.dp, (sizes.tp, sizes.sp), cut, (sizes.pp, sizes.vpp), sizes.ep, *rest)


WITHOUT = ("pp2 vpp2", 1, "tight", "batch", 4, False)  # every second layer has experts: no stage of the first rank has
LARGE = (
    ("dp2 cp2 ring tp2 sp ep4", 1, "two", "sequence", 1, False),
    ("dp4 tp2 ep8", 3, "one, shared", "batch", 1, True),
    ("dp2 pp2 tp2 sp ep2", 2, "sigmoid, dense first", "lagged", 4, False),
    ("dp2 tp4 ep2", 1, "tight", "sequence", 1, True),
    ("dp4 cp2 ulysses ep4", 0, "sigmoid, dense first", "batch", 1, False),
    ("pp2 vpp2 zb dp2 cp2 ring ep4", 0, "one, shared", "sequence", 4, True),
    ("cp2 ulysses tp2 pp2 vpp2 ep4", 2, "tight", "batch", 4, True),
    ("cp2 ring tp2 pp2 ep2", 1, "two", "lagged", 4, False),
    ("cp2 ulysses tp2 sp pp2 ep4", 0, "sigmoid, dense first", "batch", 1, True),
    ("dp2 tp2 sp pp2 vpp2 ep2", 1, "one, shared", "sequence", 4, False),
)  # of eight ranks


@pytest.mark.parametrize(
    ("layout", "zero", "kind", "scope", "accumulation", "recompute"),
    [
        *sized(CASES, settings, lambda case: False),
        WITHOUT,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE),
    ],
)
def test_experts_train_as_on_one_device(
    threads, layout: str, zero: int, kind: str, scope: str, accumulation: int, recompute: bool
) -> None:
    case = sparse.Case(layout, zero, kind, scope, accumulation, recompute)
    assert not case.wrong(threads(Layout.parse(layout).world_size).run(case.run))


IDLE = (
    ("dp2", 0, "one, dense first", "sequence", 1), ("dp2 ep2", 3, "sigmoid, dense first", "batch", 4),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("dp2", 2, "sigmoid, dense first", "lagged", 4),
        ("dp2 ep2", 1, "one, dense first", "batch", 1),
        ("dp4 ep2", 3, "one, dense first", "lagged", 1),
        ("dp2 tp2 sp ep4", 2, "sigmoid, dense first", "sequence", 1),
        ("dp2 tp2 ep2", 3, "one, dense first", "sequence", 4),
        ("dp2 cp2 ulysses ep2", 0, "one, dense first", "batch", 4),
        ("dp2 cp2 ring ep4", 1, "sigmoid, dense first", "lagged", 1),
        ("dp2 pp2 ep2", 2, "one, dense first", "batch", 4),
        ("pp2 vpp2 dp2 ep2", 0, "sigmoid, dense first", "sequence", 1),
    )),
)  # fmt: skip


@pytest.mark.parametrize(("layout", "zero", "kind", "scope", "accumulation"), IDLE)
def test_an_expert_that_nobody_chooses_and_a_rank_without_tokens_change_no_gradient(
    threads, layout: str, zero: int, kind: str, scope: str, accumulation: int
) -> None:
    """Also plain dp, where all experts are on each rank, and one expert per token with a dense first layer."""
    case = sparse.Case(layout, zero, kind, scope, accumulation, recompute=accumulation == 4, idle=True)
    results = threads(Layout.parse(layout).world_size).run(case.run)
    assert not case.wrong(results)
    loads = [load for found in results for load in found.loads.values()]
    assert loads
    assert not any(load[-1] for load in loads), "somebody chose the expert that nobody is to choose"


@pytest.mark.parametrize("layout", few(["dp2 tp2 sp ep2", "dp4 ep2"], slow=["dp4 ep2"]))
def test_experts_have_the_same_bits_at_every_zero_stage(threads, layout: str) -> None:
    runs = [threads(4).run(sparse.train, f"{layout} zero{n}", "one, shared", "sequence", 2, False) for n in range(4)]
    for results in runs:
        for found, first in zip(results, runs[0], strict=True):
            for ours, theirs in zip([*found.before, found.parameters], [*first.before, first.parameters], strict=True):
                assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
            assert (found.losses, found.norms, found.terms) == (first.losses, first.norms, first.terms)
