"""One percent on one kind of parameter drowns in each tensor's rounding in half precision, and shows in sixteen."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.core.mesh import Mesh
from isograd.prove.case import Case
from isograd.prove.prove import verify
from isograd_verify.compare.classes import Fitted, fitted, shifts
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, PASS

pytestmark = pytest.mark.usefixtures("lent")
EPS = torch.finfo(torch.bfloat16).eps


def factors(seed: int, scatter: float, **by_kind: float) -> Fitted:
    """Sixteen tensors of each kind, whose factors scatter around that of their kind."""
    generator = torch.Generator().manual_seed(seed)
    noise = iter((1 + scatter * torch.randn(16 * len(by_kind), generator=generator)).tolist())
    return {f"layers.{i}.{name}": (by * next(noise), 0.02) for name, by in by_kind.items() for i in range(16)}


def test_a_kind_is_told_beside_the_others_whatever_factor_all_share() -> None:
    found = shifts(factors(0, 2e-3, a=1.021, b=1.01, c=1.01), EPS)
    assert {one.kind: one.verdict for one in found} == {"layers.*.a": BUG, "layers.*.b": PASS, "layers.*.c": PASS}
    assert found[0].factor == pytest.approx(1.011, abs=2e-3)


def test_of_two_kinds_the_one_that_is_not_the_references_is_told() -> None:
    found = shifts(factors(0, 1e-3, a=1.0, b=1.02), EPS)
    assert {one.kind: one.verdict for one in found} == {"layers.*.a": PASS, "layers.*.b": BUG}


def test_a_shift_within_the_scatter_of_the_tensors_passes() -> None:
    assert {one.verdict for one in shifts(factors(0, 2e-2, a=1.01, b=1.0), EPS)} == {PASS}


def test_a_shift_within_what_one_device_itself_shows_passes() -> None:
    found = factors(0, 1e-4, a=1.01, b=1.0)
    members = [factors(seed, 1e-4, a=by, b=1.0) for seed, by in enumerate((1.01, 0.99) * 5)]
    runs = tuple({name: factor for name, (factor, _) in member.items()} for member in members)
    assert {one.verdict for one in shifts(found, EPS, runs)} == {PASS}
    calm = tuple(dict.fromkeys(found, 1.0) for _ in range(10))
    assert shifts(found, EPS, calm)[0].verdict == BUG


def test_fifteen_tensors_and_tensors_that_are_noise_are_not_judged() -> None:
    found = factors(0, 1e-4, a=1.1, b=1.0)
    assert shifts({n: one for n, one in found.items() if n != "layers.3.a"}, EPS) == [
        one for one in shifts({n: one for n, one in found.items() if n != "layers.3.a"}, EPS) if one.kind.endswith("b")
    ]
    assert shifts({name: (factor, 0.9) for name, (factor, _) in found.items()}, EPS) == []


def test_the_factor_of_a_tensor_is_fitted_over_all_its_parts() -> None:
    whole = torch.arange(1.0, 13.0)
    parts = whole.tensor_split(3)
    factor, left = fitted([1.5 * part for part in parts], parts)
    assert (factor, left) == (pytest.approx(1.5), pytest.approx(0, abs=1e-7))
    assert fitted([torch.zeros(3)], [torch.zeros(3)]) == (1.0, 1.0)


class Deep(nn.Module):
    """Sixteen layers, so that each kind of parameter has as many tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 12)
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(16))
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(16))
        self.head = nn.Linear(12, 23)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        logits: Tensor = self.head(x)
        return logits


def deep(planted: str, mesh: Mesh) -> Case:
    """`planted`: the kind of parameter whose gradients are one percent too large under a layout."""
    torch.manual_seed(3)
    model = Deep()
    for name, parameter in model.named_parameters():
        if planted and mesh.size("dp") > 1 and re.fullmatch(planted, name):
            parameter.register_hook(lambda gradient: gradient * 1.01)
    tokens = torch.arange(12 * 8).reshape(12, 8) * 7 % 23
    return Case(model, {"x": tokens, "y": (tokens * 5 + 1) % 23}, deep_loss, steps=1)


def deep_loss(model: nn.Module, part: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(part["x"]).flatten(0, 1), part["y"].flatten()), part["y"].numel()


@pytest.mark.slow
def test_one_percent_on_one_kind_of_parameter_of_sixteen_layers_is_found_in_bf16() -> None:
    right = verify(partial(deep, ""), "dp2", dtype=torch.bfloat16)
    assert right.verdict == PASS, str(right)
    wrong = verify(partial(deep, r"layers\.\d+\.weight"), "dp2", dtype=torch.bfloat16)
    assert not wrong.findings(INCONCLUSIVE), str(wrong)
    (found,) = wrong.findings(BUG)
    assert set(found.tensors) == {f"layers.{i}.weight" for i in range(16)}
    assert dict(found.coefficients)["here"] == pytest.approx(1.01, abs=3e-3)
    assert "the 16 tensors layers.*.weight together are 1.0" in found.sentence
