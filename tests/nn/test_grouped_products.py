"""Experts on sorted slots equal a loop over experts, each computed by itself: outputs and every gradient by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.core import rng
from isograd.core.mesh import Mesh
from isograd.nn import ExpertOptions
from isograd.nn.experts import Experts
from isograd.nn.routing import Ends, count

SLOTS = 21
ENDS = {"all": [4, 4, 15, 21], "one expert has all": [0, 21, 21, 21], "a rest": [3, 9, 9, 13], "none": [0, 0, 0, 0]}


Compared = dict[str, tuple[Tensor, Tensor]]


def compared(ends: list[int], dtype: torch.dtype, device: str = "cpu", hidden: int = 7) -> Compared:
    """{what: (of the layer, of the loop in fp64)}. What lies behind the last end is NaN, and may reach nothing."""
    options = ExpertOptions(number=4, per_token=2, width=hidden + 1 if hidden % 8 else 2 * hidden)
    layer = Experts(
        hidden, options, Mesh.unbound("1"), key=rng.key(5, "experts"), activation=F.silu, gated=True, std=0.5,
        out_std=0.5, dtype=dtype,
    ).to(device)  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(SLOTS, hidden, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    x[ends[-1] :] = torch.nan
    slots = x.clone().to(device).requires_grad_()
    y = layer(slots, Ends(torch.tensor(ends).to(device), rest=ends[-1] < SLOTS))
    y.backward(dy.to(device))
    assert slots.grad is not None
    found = {"y": y.detach(), "x": slots.grad, **{n: p.grad for n, p in layer.named_parameters() if p.grad is not None}}
    weights = {name: p.detach().cpu().double().clone().requires_grad_() for name, p in layer.named_parameters()}
    alone = x.double().clone().requires_grad_()
    parts, start = [], 0
    for expert, end in enumerate(ends):
        part = alone[start:end]
        inner = F.silu(part @ weights["gate"][expert].t()) * (part @ weights["up"][expert].t())
        parts.append(inner @ weights["down"][expert].t())
        start = end
    whole = F.pad(torch.cat(parts), (0, 0, 0, SLOTS - start))
    whole.backward(dy.double())
    true = {"y": whole.detach(), "x": alone.grad, **{n: w.grad for n, w in weights.items()}}
    assert found.keys() == true.keys()
    return {name: (found[name].cpu().double(), value) for name, value in true.items() if value is not None}


def error(found: Tensor, true: Tensor) -> float:
    """Of the norm of what is true; what is zero is zero to the bit."""
    return float((found - true).norm() / true.norm()) if true.any() else float(found.abs().max())


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_experts_on_sorted_slots_are_a_loop_over_experts(ends: list[int]) -> None:
    for name, (found, true) in compared(ends, torch.float64).items():
        assert error(found, true) < 1e-14, name


def test_counts_are_those_of_bincount() -> None:
    numbers = torch.randint(9, (40, 2), generator=torch.Generator().manual_seed(1))
    assert torch.equal(count(numbers, 11), numbers.flatten().bincount(minlength=11))
    assert torch.equal(count(numbers[:0], 3), torch.zeros(3, dtype=torch.int64))
