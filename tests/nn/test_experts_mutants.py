"""Experts without tokens, and recomputed forwards, broken on purpose: each defect fails the assertion that is there.

tests/parity/sparse_mutants.py has the mutants of debts, scales, counts and scores; tests/engine/test_experts_mutants.py
those of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isograd.core.mesh import Mesh
from isograd.errors import IsogradError
from isograd.nn import experts, naive, routing
from isograd.nn.routing import Remembered, Route
from tests.nn.test_experts import PLAIN, made, my_part, whole_input

Planted = Callable[[], AbstractContextManager[Any]]


def weight_gradient(change: Callable[[Tensor, tuple[int, ...]], Tensor | None]) -> Any:
    """What leaves the backward of grouped_linear for the experts' weights; `change` is given where segments end."""
    backward = experts._Grouped.backward

    def changed(ctx: Any, dy: Tensor) -> Any:
        dx, dweight, _ = backward(ctx, dy)
        return dx, change(dweight, ctx.ends), None

    return patch.object(experts._Grouped, "backward", staticmethod(changed))


def unwritten(gradient: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Experts without slots keep what the memory held."""
    starts = (0, *ends[:-1])
    idle = [expert for expert, (start, end) in enumerate(zip(starts, ends, strict=True)) if start == end]
    gradient[idle] = 7.0
    return gradient


NONE: dict[str, Planted] = {
    "a rank without slots has no gradient": lambda: weight_gradient(lambda g, ends: g if ends[-1] else None),
    "an expert without slots keeps what memory held": lambda: weight_gradient(unwritten),
}


def idle_experts_are_wrong() -> list[str]:
    """Of a layer whose experts 2 and 3 nobody chooses, and of one without a token."""
    wrong = []
    for rows in (2, 0):
        layer = made(replace(PLAIN, choice_bias=True), Mesh.unbound("1"))
        assert layer.choice_bias is not None
        layer.choice_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
        x, stream = my_part(layer.mesh, whole_input(rows)[0])
        layer(x, stream)[0].sum().backward()
        for name in ("up", "gate", "down"):
            gradient = layer.experts.get_parameter(name).grad
            if gradient is None:
                wrong.append(f"{name} has no gradient with {rows} sequences")
            elif gradient[2 if rows else 0 :].any():
                wrong.append(f"{name} of idle experts is not zero with {rows} sequences")
    return wrong


@pytest.mark.parametrize("name", NONE)
def test_a_gradient_of_idle_experts_that_is_not_zeros_is_seen(name: str) -> None:
    with NONE[name]():
        assert idle_experts_are_wrong(), name
    assert not idle_experts_are_wrong()


# -- recompute ---------------------------------------------------------------------------------------------------------


def ties_fall_otherwise() -> Any:
    """As torch.topk may: of equal scores, each further choice takes the expert of the higher number first."""
    calls = 0

    def first(ranked: Tensor, count: int) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            return ranked.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        turned = ranked.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :count]
        return ranked.shape[-1] - 1 - turned

    return patch.object(routing, "_first", first)


class Forgetful(Remembered):
    """A memory that keeps no route."""

    @property
    def route(self) -> None:  # type: ignore[override]
        return None

    @route.setter
    def route(self, value: Route | None) -> None:
        pass


def recomputed_is_wrong(memory: Callable[[], Remembered]) -> list[str]:
    """Of a layer whose scores are all equal, run under a checkpoint, beside the definition."""
    layer = made(PLAIN, Mesh.unbound("1"))
    with torch.no_grad():
        layer.router.weight.zero_()
    whole, dy = whole_input(2)
    x, stream = my_part(layer.mesh, whole)
    stream = replace(stream, remembered=memory())
    y, _ = checkpoint(layer, x.requires_grad_(), stream, use_reentrant=False)
    try:
        (y * dy.flatten(0, 1)).sum().backward()
    except (IsogradError, torch.utils.checkpoint.CheckpointError) as error:
        return [str(error)]
    plain = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    output, _, chosen = naive.moe(whole, plain, PLAIN, F.silu)
    (output * dy).sum().backward()
    wrong = [
        f"the gradient of {name}"
        for name, p in layer.named_parameters()
        if p.grad is None or not torch.allclose(p.grad, plain[name].grad, rtol=0, atol=1e-12)  # type: ignore[arg-type]
    ]
    if not torch.equal(layer.load.local, chosen.sum((0, 1)).long()):
        wrong.append("the load")
    return wrong


def test_a_route_that_is_made_again_in_backward_is_seen() -> None:
    """With the route kept, a choice that would fall otherwise the second time changes nothing: it is made once."""
    with ties_fall_otherwise():
        assert any("the gradient of" in line for line in recomputed_is_wrong(Forgetful))
    with ties_fall_otherwise():
        assert not recomputed_is_wrong(Remembered)
