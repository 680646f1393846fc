"""OpenCLIP's ClipLoss and DistillClipLoss, right in all four modes.

Encoders and logit_scale get the gradient of the loss over all ranks' rows, once, whether gradients are averaged over
the ranks, as torch's DDP does, or summed and divided by the rows: engine.backward(loss, weight=len(image_features)).
What OpenCLIP's own give: docs/contrastive.md.

gather_with_grad is accepted without effect: one reduce-scatter always returns the gradients to their owners.
local_loss decides what is returned: the mean over this rank's rows (True), or over the rows of all ranks (False). When
ranks have different numbers of rows, the first is right under the engine only, the second under both.

get_logits and get_ground_truth, for losses that subclass ClipLoss, gather the features with their gradients. What a
subclass computes from these logits with a mean over their rows is right in the same cases. DistillClipLoss is such a
subclass; it holds [rows, all rows], where ClipLoss has tiles. Losses and logits of half-precision features are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.comm import ops, raw
from isograd.errors import ContrastiveError
from isograd.integrations.contrastive.world import count_pairs, world_group
from isograd.losses.contrastive.chunks import upcast
from isograd.losses.contrastive.columns import Columns
from isograd.losses.contrastive.tiles import pair_losses


class ClipLoss(nn.Module):
    """Takes the place of open_clip.loss.ClipLoss; see the head of this file."""

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        """gather_with_grad and cache_labels are accepted for compatibility and have no effect."""
        super().__init__()
        self.local_loss, self.gather_with_grad, self.cache_labels = local_loss, gather_with_grad, cache_labels
        self.rank, self.world_size, self.use_horovod = rank, world_size, use_horovod
        self.group = world_group()
        if use_horovod or (world_size, rank) != (self.group.size, self.group.index):
            seen = f"rank {rank} of {world_size}{', horovod' if use_horovod else ''}"
            raise ContrastiveError(
                "IG969", seen=seen, expected=f"rank {self.group.index} of {self.group.size}, torch.distributed"
            )

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Any:
        """The contrastive loss. The features must be normalised already, as OpenCLIP's models return them."""
        rows = count_pairs([image_features, text_features], self.group)
        losses = torch.zeros((), dtype=torch.float64, device=image_features.device)
        with torch.autocast(image_features.device.type, enabled=False):
            images, texts = upcast(image_features), upcast(text_features)
            for mine, columns in ((images, texts), (texts, images)):
                where = Columns(self.group, rows.counts[0], ring=False)
                losses = losses + pair_losses(mine * logit_scale, columns, where).sum()
        if logit_bias is not None:
            losses = losses + 0 * logit_bias.sum()  # a bias of all logits does not change a softmax: a gradient of zero
        if self.local_loss:
            loss = losses / 2 / max(1, len(images))
        else:  # every rank returns the loss of all rows; the adjoint sums the ranks' gradients
            loss = ops.copy_in(ops.all_reduce(losses, self.group), self.group) / 2 / max(1, sum(rows.counts[0]))
        loss = loss.to(images.dtype)
        return {"contrastive_loss": loss} if output_dict else loss

    def get_logits(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The logits of images and of texts: [my rows, all rows] with local_loss, else [all rows, all rows]."""
        rows = count_pairs([image_features, text_features], self.group).counts[0]
        with torch.autocast(image_features.device.type, enabled=False):
            images, texts = upcast(image_features), upcast(text_features)
            every_image, every_text = (ops.all_gather(t, self.group, 0, rows) for t in (images, texts))
            if self.local_loss:
                logits = logit_scale * images @ every_text.T, logit_scale * texts @ every_image.T
            else:
                per_image = logit_scale * every_image @ every_text.T
                logits = per_image, per_image.T
            return logits if logit_bias is None else (logits[0] + logit_bias, logits[1] + logit_bias)

    def get_ground_truth(self, device: torch.device, num_logits: int) -> Tensor:
        """For each row of the logits, the column of its own pair. With local_loss the ranks gather `num_logits`."""
        labels = torch.arange(num_logits, device=device)
        if not self.local_loss:
            return labels
        counts = raw.gather_list(torch.tensor(num_logits, device=device), self.group)
        return labels + sum(int(count) for count in counts[: self.group.index])


class DistillClipLoss(ClipLoss):
    """Takes the place of open_clip.loss.DistillClipLoss: the contrastive loss, and a teacher's cross-entropy."""

    def forward(  # type: ignore[override]  # as OpenCLIP's
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: Tensor,
        output_dict: bool = False,
    ) -> Any:
        """(contrastive loss, distillation loss), each a mean of both directions; all features are normalised."""
        student = self.get_logits(image_features, text_features, logit_scale)
        teacher = self.get_logits(dist_image_features, dist_text_features, dist_logit_scale)
        labels = self.get_ground_truth(image_features.device, len(student[0]))
        rows = 2 * max(1, len(labels))
        contrastive = sum(F.cross_entropy(logits, labels, reduction="sum") for logits in student) / rows
        distill = sum(self.dist_loss(t, s) * len(labels) for t, s in zip(teacher, student, strict=True)) / rows
        if output_dict:
            return {"contrastive_loss": contrastive, "distill_loss": distill}
        return contrastive, distill

    def dist_loss(self, teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
        """The mean over rows of the cross-entropy of the student's distribution under the teacher's."""
        losses = -(teacher_logits.softmax(1) * student_logits.log_softmax(1)).sum(1)
        return losses.sum() / max(1, len(losses))
