"""FAILURES C, OpenCLIP: DistillClipLoss, the public methods that losses which subclass ClipLoss use, and bf16 input.

All gradients are compared with one graph of all rows on one device, fp64; the definitions are compared with OpenCLIP's
own classes where open_clip is installed, and its signatures with those below where it is not.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import isograd as ig
from isograd.core.mesh import Mesh
from isograd.errors import ContrastiveError
from isograd.integrations.contrastive.open_clip import ClipLoss, DistillClipLoss
from tests.losses.contrastive.test_front_ends import EVEN, MODES, UNEVEN, Clip, assert_right, gradients, joined, rows
from tests.losses.contrastive.toys import sgd

SIGNATURES = {  # of open_clip 3.3
    "__init__": "local_loss gather_with_grad cache_labels rank world_size use_horovod",
    "get_logits": "image_features text_features logit_scale logit_bias",
    "get_ground_truth": "device num_logits",
    "forward": "image_features text_features logit_scale logit_bias output_dict",
}
DISTILL = "image_features text_features logit_scale dist_image_features dist_text_features dist_logit_scale output_dict"


class Taught(Clip):
    """Also returns what a frozen teacher says of the same rows, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Clip().requires_grad_(False)
        with torch.no_grad():
            self.teacher.image.weight.mul_(torch.linspace(0.5, 1.5, self.teacher.image.weight.shape[1]))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return *super().forward(x, y), *(t.detach() for t in self.teacher(x, y))


class FromLogits(ClipLoss):
    """A user's subclass of ClipLoss."""

    def forward(self, images: Tensor, texts: Tensor, scale: Tensor, *teacher: Tensor) -> Tensor:  # type: ignore[override]
        per_image, per_text = self.get_logits(images, texts, scale, scale * 0.1)
        labels = self.get_ground_truth(images.device, len(per_image))
        return F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels, label_smoothing=0.1)


def distilled(loss: ClipLoss, *outputs: Tensor) -> Tensor:
    contrastive, distill = loss(*outputs)
    return contrastive + 0.7 * distill


def from_logits(loss: ClipLoss, *outputs: Tensor) -> Tensor:
    return loss(*outputs)  # type: ignore[no-any-return]


CASES = {"distilled": (DistillClipLoss, distilled), "from logits": (FromLogits, from_logits)}


def plain(images: Tensor, texts: Tensor, scale: Tensor, *teacher: Tensor) -> dict[str, Tensor]:
    """The definitions, of all rows."""
    logits = scale * images @ texts.T
    labels = torch.arange(len(logits))
    taught = teacher[2] * teacher[0] @ teacher[1].T
    both = (logits, taught), (logits.T, taught.T)
    contrastive = sum(F.cross_entropy(s, labels) for s, _ in both) / 2
    distill = sum(-(t.softmax(1) * s.log_softmax(1)).sum(1).mean() for s, t in both) / 2
    biased = logits + scale * 0.1
    smoothed = F.cross_entropy(biased, labels) + F.cross_entropy(biased.T, labels, label_smoothing=0.1)
    return {"distilled": contrastive + 0.7 * distill, "from logits": smoothed, "pair": (contrastive, distill)}


def runs() -> dict[str, tuple[dict[str, Tensor], float]]:
    mesh, found = Mesh("dp2"), {}
    for local, home in MODES:
        for case, (kind, compute) in CASES.items():
            for name, counts in (("even", EVEN), ("uneven", UNEVEN)):
                mine = [rows(mesh.rank, counts, column) for column in (0, 1)]
                loss = kind(local, home, rank=mesh.rank, world_size=2)
                averaged = DistributedDataParallel(Taught())
                value = compute(loss, *averaged(*mine))
                value.backward()
                found[f"DDP local={local} grad={home}/{case}/{name}"] = gradients(averaged), float(value.detach())
                model = Taught()
                engine = ig.Engine(model, mesh, sgd)
                engine.backward(compute(loss, *model(*mine)), weight=len(mine[0]))
                whole = dict(engine.grads().items())
                found[f"engine local={local} grad={home}/{case}/{name}"] = whole, engine.step().loss
    return found


@pytest.mark.medium
def test_distillation_and_a_subclass_of_clip_loss_have_the_gradient_of_one_device(worlds) -> None:
    true = {}
    for name, counts in (("even", EVEN), ("uneven", UNEVEN)):
        for case in CASES:
            model = Taught()
            loss = plain(*model(joined(rows, counts, 0), joined(rows, counts, 1)))[case]
            loss.backward()
            true[f"{case}/{name}"] = gradients(model), float(loss.detach())
    for found in worlds(2).run(runs):
        assert len(found) == 32
        for label, (mine, value) in found.items():
            mode, _, which = label.partition("/")
            if mode.startswith("DDP local=True") and which.endswith("/uneven"):
                continue  # a mean of the ranks' means, as the page says: DDP cannot know the rows
            assert_right(mine, true[which][0], label)
            if "local=False" in mode or mode.startswith("engine"):
                assert abs(value - true[which][1]) < 1e-12, label


def unequal_pairs() -> str:
    rank = Mesh("dp2").rank
    images, texts = torch.randn(3, 4), torch.randn(3 - rank, 4)
    with pytest.raises(ContrastiveError) as error:
        ClipLoss(rank=rank, world_size=2)(images, texts, torch.tensor(1.0))
    return str(error.value)


def test_images_and_texts_of_different_numbers_on_one_rank_are_refused_on_both(worlds) -> None:
    for said in worlds(2).run(unequal_pairs):
        assert said.startswith("IG960") and "[3, 2] rows on rank 1" in said


def test_bf16_features_have_an_fp32_loss_close_to_that_of_fp64() -> None:
    model = Taught()
    outputs = [t.detach() for t in model(rows(0, (64,), 0), rows(0, (64,), 1))]
    true = [float(loss) for loss in DistillClipLoss()(*outputs)]
    low = [t.bfloat16().requires_grad_() for t in outputs]
    for kind, expected in ((ClipLoss, true[:1]), (DistillClipLoss, true)):
        losses = kind()(*(low if kind is DistillClipLoss else low[:3]))
        losses = losses if isinstance(losses, tuple) else (losses,)
        for loss, value in zip(losses, expected, strict=True):
            assert loss.dtype == torch.float32
            assert abs(float(loss.detach()) - value) < 5e-3 * abs(value), "the features are rounded, the sums are not"
    assert all(t.dtype == torch.float32 for t in ClipLoss().get_logits(*low[:3]))
    sum(losses).backward()
    assert all(t.grad is not None and t.grad.dtype == torch.bfloat16 for t in low[:3])


def test_methods_have_the_arguments_of_openclip_and_the_definitions_are_its_own() -> None:
    def arguments(function: Any) -> str:
        return " ".join(name for name in inspect.signature(function).parameters if name != "self")

    for name, expected in SIGNATURES.items():
        assert arguments(getattr(ClipLoss, name)) == expected, name
    assert arguments(DistillClipLoss.forward) == DISTILL
    theirs = pytest.importorskip("open_clip.loss", reason="the signatures above are those of open_clip 3.3")
    for name, expected in SIGNATURES.items():
        assert arguments(getattr(theirs.ClipLoss, name)) == expected, name
    assert arguments(theirs.DistillClipLoss.forward) == DISTILL
    outputs = [t.detach() for t in Taught()(rows(0, EVEN, 0), rows(0, EVEN, 1))]
    for ours, real, definition in zip(
        DistillClipLoss()(*outputs), theirs.DistillClipLoss()(*outputs), plain(*outputs)["pair"], strict=True
    ):
        assert torch.allclose(ours, real, rtol=1e-13) and torch.allclose(definition, real, rtol=1e-13)
    for a, b in zip(ClipLoss().get_logits(*outputs[:3]), theirs.ClipLoss().get_logits(*outputs[:3]), strict=True):
        assert torch.allclose(a, b, rtol=1e-13)
    bf16 = theirs.ClipLoss()(*(t.bfloat16() for t in outputs[:3]))
    assert bf16.dtype == torch.bfloat16, "the loss of ours is fp32"
