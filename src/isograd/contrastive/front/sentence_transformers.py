"""A loss for sentence-transformers' Trainer: cached InfoNCE with the gradient of the rows of all ranks.

    from isograd.contrastive.front.sentence_transformers import CachedInfoNCE
    loss = CachedInfoNCE(model, scale=20.0, mini_batch_size=64, gather_across_devices=True)
    SentenceTransformerTrainer(model=model, loss=loss, ...).train()

Called with (features of each column, labels), it returns a loss whose backward replays the model chunk by chunk, as
CachedMultipleNegativesRankingLoss of sentence-transformers 6.2 does, which is right when all ranks have equally many
rows. This class adds: ranks with different numbers of rows are weighted by them; the replay is checked; the loss is
computed in tiles; and an isograd engine can take the place of DDP.

The value is scaled for what reduces the gradients. torch's DDP averages over W ranks, so the value is W * (sum of my
rows' losses) / (number of all rows): the mean of my rows when all ranks have equally many. With `engine=` it is the
mean of my rows, for engine.backward(loss, weight=rows).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.comm.raw import Group
from isograd.contrastive.chunks import cut
from isograd.contrastive.front.grad_cache import Replay
from isograd.contrastive.front.world import counted, everyone
from isograd.contrastive.tiles import pair_losses
from isograd.engine import Engine


class CachedInfoNCE(nn.Module):
    """Takes the place of CachedMultipleNegativesRankingLoss; see the head of this file."""

    uses_gradient_cache = True  # sentence-transformers asks: its backward runs the model

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        mini_batch_size: int = 32,
        gather_across_devices: bool = False,
        *,
        engine: Engine | None = None,
    ) -> None:
        super().__init__()
        self.model, self.scale, self.mini_batch_size = model, scale, mini_batch_size
        self.gather_across_devices, self.engine = gather_across_devices, engine

    def get_config_dict(self) -> dict[str, Any]:
        """The options that sentence-transformers writes into the model card."""
        return {
            "scale": self.scale,
            "mini_batch_size": self.mini_batch_size,
            "gather_across_devices": self.gather_across_devices,
        }

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Columns: anchors, positives, negatives, ... `labels` are ignored: row i's positive is positive i."""
        del labels
        towers = [self._represent(features) for features in sentence_features]
        leaves = [torch.cat([r.made[0] for r in tower]).requires_grad_(torch.is_grad_enabled()) for tower in towers]
        with torch.autocast(leaves[0].device.type, enabled=False):
            loss = self._loss(leaves)
        if not torch.is_grad_enabled():
            return loss
        returned = loss.detach().requires_grad_()
        returned.register_hook(lambda seed: self._replay(towers, torch.autograd.grad(loss, leaves, seed)))
        return returned

    def _represent(self, features: dict[str, Tensor]) -> list[Replay]:
        rows, step = len(features["input_ids"]), self.mini_batch_size
        device = features["input_ids"].device
        parts = [_trimmed(cut(dict(features), first, step)) for first in range(0, rows, step)]
        return [Replay(lambda part=part: self._encode(part), device) for part in parts]  # type: ignore[misc]

    def _encode(self, part: dict[str, Tensor]) -> Tensor:
        return self.model(dict(part))["sentence_embedding"]  # type: ignore[no-any-return]  # a module may write into it

    def _loss(self, leaves: list[Tensor]) -> Tensor:
        everyone_here = everyone()
        group = everyone_here if self.gather_across_devices else Group("alone", (everyone_here.index,), 0)
        vectors = [F.normalize(t if t.dtype == torch.float64 else t.float(), dim=1) for t in leaves]
        across = counted(vectors, group)
        queries, columns = vectors[0] * self.scale, torch.cat(vectors[1:])
        where = across.columns(range(1, len(vectors)), ring=False)
        total = pair_losses(queries, columns, where).sum()
        if self.engine is not None:
            return total / max(1, len(queries))
        return total * group.size / max(1, sum(across.counts[0]))

    def _replay(self, towers: list[list[Replay]], gradients: tuple[Tensor, ...]) -> None:
        """Encode every chunk again and go backward. `gradients` already contain each rank's own weight."""
        for tower, gradient in zip(towers, gradients, strict=True):
            for replay, part in zip(tower, gradient.split([len(r.made[0]) for r in tower]), strict=True):
                last = tower is towers[-1] and replay is tower[-1]
                waits = not last and hasattr(self.model, "no_sync")
                with self.model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                    replay.backward([part], self.engine)


def _trimmed(part: dict[str, Any]) -> dict[str, Any]:
    """The part without the last columns that are padding in every row of the chunk."""
    mask = part.get("attention_mask")
    if mask is None or not bool(mask.any()):
        return part
    width, used = mask.shape[1], int(mask.any(0).nonzero().max()) + 1
    return {
        k: v[:, :used] if isinstance(v, Tensor) and v.dim() > 1 and v.shape[1] == width else v for k, v in part.items()
    }
