"""A gradient of a gradient is right or refused: torch alone would leave a part of it out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from isograd.errors import ModelError
from isograd.mesh import Mesh
from isograd.models import Transformer, TransformerConfig
from isograd.nn import passes

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


def test_what_the_message_advises_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for torchs in (False, True):  # norms, positions and gates by our functions, and by torch's chains
        if torchs:
            monkeypatch.setattr(passes, "_leave_to_torch", lambda x: True)
        own = model()
        parameters = list(own.parameters())
        generator = torch.Generator().manual_seed(0)
        with sdpa_kernel(SDPBackend.MATH):
            loss = F.cross_entropy(own(TOKENS).flatten(0, 1), TOKENS.flatten())
            slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        along = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
        total = torch.stack([(g * v).sum() for g, v in zip(slopes, along, strict=True)]).sum()
        ends.append(torch.autograd.grad(total, parameters))
    for one, truth in zip(*ends, strict=True):
        assert float(truth.norm()) > 0
        assert float((one - truth).norm()) <= 1e-12 * max(1.0, float(truth.norm()))
