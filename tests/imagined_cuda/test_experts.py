"""Experts on an imagined card: the products that torch computes in one kernel, and those that it does not."""

from __future__ import annotations

import pytest
import torch

from tests.nn.test_grouped_products import ENDS, Compared, compared, error

from . import device, right, run

LIMITS = {torch.float64: 1e-14, torch.bfloat16: 4 * 2.0**-9}  # at most four roundings lie behind each other


def on_a_card(ends: list[int], dtype: torch.dtype, hidden: int) -> tuple[Compared, list[str]]:
    """What was compared, and the places where the host waited before anything was brought back for it."""
    found = compared(ends, dtype, "cuda", hidden)
    waits = [first for kind, _, first, _, _ in device.lib.findings() if kind == "host wait" and "nn/test_" not in first]
    return found, waits


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float64, 7), (torch.bfloat16, 7), (torch.bfloat16, 8)], ids=str)
def test_experts_on_a_card_are_a_loop_over_experts(ends: list[int], dtype: torch.dtype, hidden: int) -> None:
    (result,) = results = run(on_a_card, 1, ends, dtype, hidden)
    ((numbers, waits),) = right(results)
    for name, (found, true) in numbers.items():
        assert error(found, true) < LIMITS[dtype], name
    kernel = dtype == torch.bfloat16 and hidden % 8 == 0
    assert bool(waits) != kernel, waits
    assert ("aten::_grouped_mm" in result.launches) == kernel
