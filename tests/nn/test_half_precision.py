"""In bf16 every sum over tokens is in fp32: gradients are those of fp64 on the same weights, but for rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isograd as ig
from isograd.models import Transformer, TransformerConfig
from isograd.nn import ExpertOptions, use_fp32_sums
from isograd.nn.embedding import lookup

BOUND = 0.05  # 0.003 to 0.03 are found: activations are rounded, too. Sums in bf16 are off by 0.16 to 0.8
COMMON: dict[str, Any] = {"vocab": 17, "hidden": 16, "layers": 2, "heads": 2, "mlp": 12, "init_std": 0.3}
MODELS = {
    "llama, qk_norm": TransformerConfig(**COMMON, qk_norm=True),
    "gpt2": TransformerConfig(
        **COMMON, norm="layer", activation="gelu_tanh", gated=False, positions="learned", max_positions=1024,
        qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
    "tied": TransformerConfig(**COMMON, tied=True),
    "experts": TransformerConfig(**COMMON, experts=ExpertOptions(number=4, per_token=2, width=8, balance="none")),
}  # fmt: skip
LAYOUTS = {"1": 1, "dp2": 2, "dp2 zero3": 2, "tp2": 2, "cp2 ring": 2, "pp2": 2}


def gradients(name: str, layout: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of one step on skewed tokens: nine of ten are the same one."""
    mesh = ig.Mesh(layout)
    model = Transformer(MODELS[name], mesh, seed=1, dtype=torch.bfloat16).to(dtype)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.0))
    source = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(17, (4, 1024), generator=source) for _ in range(2))
    tokens[torch.rand(4, 1024, generator=source) < 0.9] = 3
    ranks, mine = mesh.size("dp"), mesh.index("dp")
    rows = slice(mine * 4 // ranks, (mine + 1) * 4 // ranks)
    engine.accumulate((tokens[rows], labels[rows]), 2 // ranks)
    return {key: value.double().clone() for key, value in engine.grads().items()}


@pytest.mark.medium
@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_is_that_of_fp64_with_an_error_of_bf16(worlds, name: str) -> None:
    (truth,) = worlds(1).run(gradients, name, "1", torch.float64)
    for layout, ranks in LAYOUTS.items():
        found: dict[str, Tensor] = {}
        for rank in worlds(ranks).run(gradients, name, layout, torch.bfloat16):
            found |= rank
        for key, value in found.items():
            if key.endswith("k.bias"):  # 0 by definition: softmax does not see it
                continue
            if value.shape == truth[key].shape:  # a part of a cut parameter is held to the truth by the parity grid
                error = float((value - truth[key]).norm() / truth[key].norm())
                assert error < BOUND, f"{layout}: {key}: {error:.1e}"


@pytest.mark.parametrize("padding", [None, 3])
def test_a_lookup_is_torchs_but_for_the_sum(padding: int | None) -> None:
    weight = torch.randn(5, 4).bfloat16().requires_grad_()
    tokens = torch.tensor([[3, 1, 3], [0, 4, 3]])
    exact = weight.detach().double().requires_grad_()
    found, truth = lookup(tokens, weight, padding), F.embedding(tokens, exact, padding)
    assert torch.equal(found.double(), truth)
    seed = torch.randn(found.shape).bfloat16()
    found.backward(seed)
    truth.backward(seed.double())
    assert weight.grad is not None and exact.grad is not None
    torch.testing.assert_close(weight.grad, exact.grad.bfloat16(), rtol=0, atol=0)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_the_line_that_the_warning_names_mends_a_model_of_others(kind: type[nn.Embedding]) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(kind(5, 4), nn.LayerNorm(4), nn.Linear(4, 4)).bfloat16()

    def engine(model: nn.Module) -> ig.Engine:
        return ig.Engine(model, ig.Mesh("1"), lambda ps: torch.optim.SGD(ps, lr=0.1))

    tokens = torch.full((4096,), 2)
    errors = []
    for mended in (False, True):
        model = made()
        exact = made().double()
        if mended:
            assert use_fp32_sums(model) == ["0", "1"]
            assert use_fp32_sums(model) == []
            step = engine(model)
        else:
            with pytest.warns(UserWarning, match=r"0, 1 .*use_fp32_sums\(model\)"):
                step = engine(model)
        step.backward(model(tokens).float().square().mean(), weight=1)
        exact(tokens).square().mean().backward()
        found = dict(step.grads().items())
        for name in ("0.weight", "1.weight", "1.bias"):
            truth = exact.get_parameter(name).grad
            assert truth is not None
            errors.append(float((found[name].double() - truth).norm() / truth.norm()))
    assert min(errors[:3]) > 0.3
    assert max(errors[3:]) < BOUND
