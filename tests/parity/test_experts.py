"""A transformer with experts trains as one device does by the dense definition: gradients by name, terms, bias; fp64.

Any two of (layout, ZeRO stage, kind of experts, scope of the balance loss, micro-batches, recompute) meet in some case.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from isograd.layout import Layout
from tests.sizes import pairwise

from . import sparse

LAYOUTS = (
    "1", "dp2 ep2", "tp2", "tp2 sp ep2", "cp2 ulysses ep2", "cp2 ring", "pp2", "dp2 tp2 sp ep4", "dp2 cp2 ring ep2",
    "dp2 tp2 ep2", "pp2 vpp2 dp2 ep2",
)  # fmt: skip
CASES = pairwise(
    [
        case
        for case in itertools.product(
            LAYOUTS, (0, 1, 2, 3), sparse.KINDS, ("sequence", "batch", "lagged"), (1, 4), (False, True)
        )
        if not (case[0].startswith("pp") and case[1] == 3) and not (case[0] == "1" and case[1])
    ]
)


@pytest.mark.parametrize(("layout", "zero", "kind", "scope", "accumulation", "recompute"), CASES)
def test_experts_train_as_on_one_device(
    worlds, layout: str, zero: int, kind: str, scope: str, accumulation: int, recompute: bool
) -> None:
    parsed = Layout.parse(f"{layout} zero{zero}" if zero else layout)
    truth = sparse.one_device(kind, scope, accumulation * parsed.dp)
    results = worlds(parsed.world_size).run(sparse.train, str(parsed), kind, scope, accumulation, recompute)
    everything = {name for found in results for name in found.parameters}
    assert everything == truth.parameters.keys()
    for found in results:
        assert not sparse.differences(found, truth)
        assert all(any(torch.equal(bias, other) for other in truth.biases) for bias in found.biases)
    assert sum(len(found.biases) for found in results) >= len(truth.biases)
