"""The loss of large vocabularies in fp32. On CPUs, torch's own softmax and log_softmax are ten times further off."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from isograd.core.mesh import Mesh
from isograd.nn.loss import cross_entropy_of_logits

ROWS, VOCAB = 16, 151_936


def test_the_loss_over_a_large_vocabulary_is_that_of_fp64_to_a_few_roundings() -> None:
    logits = 4 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(ROWS)
    mine, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = cross_entropy_of_logits(mine, labels, Mesh.unbound("1").group("tp"), 0, VOCAB)
    true = F.cross_entropy(theirs, labels, reduction="sum")
    loss.backward()
    true.backward()
    assert abs(loss.item() - true.item()) / ROWS < 3e-6
    assert mine.grad is not None and theirs.grad is not None
    off = (mine.grad.double() - theirs.grad).abs() / theirs.grad.abs()
    assert off.max() < 5e-6
    assert abs(F.cross_entropy(logits, labels).item() - true.item() / ROWS) > 3e-6, "torch is as exact now"
