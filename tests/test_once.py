"""A gradient of a gradient is right or refused: torch alone would leave a part of it out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.models import Transformer, TransformerConfig

CONFIG = TransformerConfig(vocab=16, hidden=8, layers=2, heads=2, mlp=16)
TOKENS = torch.arange(24).view(3, 8) % 16


def model() -> Transformer:
    return Transformer(CONFIG, Mesh("1"), dtype=torch.float64)


def test_through_the_loss_of_a_transformer_it_is_refused() -> None:
    own = model()
    loss, _ = own(TOKENS, TOKENS)
    with pytest.raises(ModelError, match=r"IG409.*(.*\n)*.*CrossEntropy"):
        torch.autograd.grad(loss, list(own.parameters()), create_graph=True)
    loss, _ = own(TOKENS, TOKENS)
    loss.backward()  # and once it is as ever
    assert all(p.grad is not None for p in own.parameters())


def test_what_the_message_advises_is_right() -> None:
    """A product of the Hessian with a vector is the difference of gradients along it."""
    own = model()
    parameters = list(own.parameters())

    def slopes(create_graph: bool = False) -> tuple[torch.Tensor, ...]:
        loss = F.cross_entropy(own(TOKENS).flatten(0, 1), TOKENS.flatten())
        return torch.autograd.grad(loss, parameters, create_graph=create_graph)

    generator = torch.Generator().manual_seed(0)
    along = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    with sdpa_kernel(SDPBackend.MATH):
        total = torch.stack([(g * v).sum() for g, v in zip(slopes(True), along, strict=True)]).sum()
        found = torch.autograd.grad(total, parameters)
    step, ends = 1e-6, []
    for sign in (1, -2):  # to both sides
        torch._foreach_add_([p.data for p in parameters], along, alpha=sign * step)
        ends.append(slopes())
    for one, up, down in zip(found, *ends, strict=True):
        truth = (up - down) / (2 * step)
        assert float(truth.norm()) > 0
        assert float((one - truth).norm()) <= 1e-6 * float(truth.norm())
