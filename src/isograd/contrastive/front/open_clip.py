"""OpenCLIP's ClipLoss, right in all four modes.

    from isograd.contrastive.front.open_clip import ClipLoss        # instead of open_clip.loss.ClipLoss

Right means: encoders and logit_scale get the gradient of the loss over all ranks' rows, once, whether gradients are

    averaged over the ranks, as torch's DDP does          loss.backward()
    or summed and divided by the rows, as isograd does    engine.backward(loss, weight=len(image_features))

In OpenCLIP that holds for gather_with_grad=True only; with False, its default, encoders get 1/W of it under DDP (or,
with local_loss, lack what other ranks' rows add), while logit_scale is right: docs/contrastive.md has the numbers.

Here gather_with_grad is accepted without effect: one reduce-scatter always returns the gradients to their owners.
local_loss decides what is returned: the mean over this rank's rows (True), or over the rows of all ranks (False). When
ranks have different numbers of rows, the first is right under the engine only, the second under both. Memory: tiles,
never [rows, all rows].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import ops
from isograd.contrastive.columns import Columns
from isograd.contrastive.front.world import counted, everyone
from isograd.contrastive.tiles import pair_losses
from isograd.errors import ContrastiveError


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
        del gather_with_grad, cache_labels
        self.local_loss = local_loss
        self.group = everyone()
        if use_horovod or (world_size, rank) != (self.group.size, self.group.index):
            raise ContrastiveError(
                "IG969",
                "ClipLoss was given a rank and a world size that are not those of the running world",
                seen=f"rank {rank} of {world_size}{', horovod' if use_horovod else ''}",
                expected=f"rank {self.group.index} of {self.group.size}, torch.distributed",
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
        rows = counted([image_features, text_features], self.group)
        losses = torch.zeros((), dtype=torch.float64, device=image_features.device)
        with torch.autocast(image_features.device.type, enabled=False):
            images, texts = _wide(image_features), _wide(text_features)
            for mine, columns in ((images, texts), (texts, images)):
                where = Columns(self.group, rows.counts[0], ring=False)
                losses = losses + pair_losses(mine * logit_scale, columns, where).sum()
        if logit_bias is not None:
            losses = (
                losses + 0 * logit_bias.sum()
            )  # a softmax is unaffected by a common bias; the bias still gets a gradient, of zero
        if self.local_loss:
            loss = losses / 2 / max(1, len(images))
        else:  # every rank returns the loss of all rows; the adjoint sums the ranks' gradients
            loss = ops.copy_in(ops.all_reduce(losses, self.group), self.group) / 2 / max(1, sum(rows.counts[0]))
        loss = loss.to(images.dtype)
        return {"contrastive_loss": loss} if output_dict else loss


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
