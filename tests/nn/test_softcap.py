"""Capped logits: the loss in chunks and the log probabilities of labels are torch's, with their gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.mesh import Mesh
from isograd.nn import cross_entropy
from isograd.nn.loss import log_probabilities

CAP = 1.5


def test_losses_of_capped_logits_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(n, 6, dtype=torch.float64, generator=generator) for n in (11, 9))
    labels = torch.randint(9, (11,), generator=generator).index_fill(0, torch.tensor([0, 7]), -100)
    seeds, mesh = torch.randn(11, dtype=torch.float64, generator=generator), Mesh.unbound("1")

    def logits(x: Tensor, weight: Tensor) -> Tensor:
        return CAP * (x @ weight.t() / CAP).tanh()

    pairs = [
        (
            lambda x, w: cross_entropy(x, w, labels, mesh, chunk=4, softcap=CAP)[0],
            lambda x, w: F.cross_entropy(logits(x, w), labels),
        ),
        (
            lambda x, w: (log_probabilities(x, w, labels, mesh, chunk=4, softcap=CAP) * seeds).sum(),
            lambda x, w: (-F.cross_entropy(logits(x, w), labels, reduction="none") * seeds).sum(),
        ),
    ]
    for mine, defined in pairs:
        found, expected = [], []
        for function, into in ((mine, found), (defined, expected)):
            leaves = [t.clone().requires_grad_() for t in (x, weight)]
            value = function(*leaves)
            into += [value.detach(), *torch.autograd.grad(value, leaves)]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
