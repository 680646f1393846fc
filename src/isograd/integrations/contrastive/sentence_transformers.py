"""A loss for sentence-transformers' Trainer: cached InfoNCE with the gradient of the rows of all ranks.

The options are those of sentence-transformers 6.2, in its order. With the default similarity, direction and no hardness
the loss is computed in tiles; otherwise in [mini_batch_size, all columns] at a time (ranking.py). An option that cannot
be followed is refused (IG970). MatryoshkaLoss(model, CachedInfoNCE(model), dims) works: it wraps `calculate_loss`.

The value is scaled for what reduces the gradients. torch's DDP averages over W ranks, so the value is W * (sum of my
rows' losses) / (number of all rows): the mean of my rows when all ranks have equally many. With `engine=` it is the
mean of my rows, for engine.backward(loss, weight=rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.comm import raw
from isograd.comm.fingerprint import fingerprint
from isograd.comm.group import Group
from isograd.core.rng import random_state, set_random_state
from isograd.engine import Engine
from isograd.errors import ContrastiveError
from isograd.integrations.contrastive.ranking import Scoring, option
from isograd.integrations.contrastive.world import count_pairs, world_group
from isograd.losses.contrastive.chunks import cut, one_kernel, rows_of, upcast
from isograd.losses.contrastive.tiles import pair_losses


class ChunkReplay:
    """The vectors of a chunk: made once without a graph, and again with one by `backward`."""

    def __init__(self, encode: Callable[[], Tensor], device: torch.device) -> None:
        self.encode, self.device, self.state = encode, device, random_state(device)
        with torch.no_grad(), one_kernel():
            self.made = encode().detach()
        self.print = int(fingerprint(self.made))

    def backward(self, gradient: Tensor, engine: Engine | None) -> None:
        """Encode again from the same random state, check the bits, and go backward from the vectors' gradient."""
        after = random_state(self.device)
        set_random_state(self.state, self.device)
        torch.clear_autocast_cache()
        with torch.enable_grad(), one_kernel():
            again = self.encode()
        set_random_state(after, self.device)
        if int(fingerprint(again)) != self.print:
            raise ContrastiveError("IG965", seen="other bits")
        gradient = gradient.to(again.dtype)
        if again.requires_grad and engine is not None:
            engine.step_state.run_backward([again], [gradient], last=False)
        elif again.requires_grad:
            again.backward(gradient)


class CachedInfoNCE(nn.Module):
    """Takes the place of CachedMultipleNegativesRankingLoss; see the head of this file."""

    uses_gradient_cache = True  # sentence-transformers asks: its backward runs the model

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] | None = None,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        show_progress_bar: bool = False,
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        engine: Engine | None = None,
    ) -> None:
        """similarity_fct: of two batches of vectors; by default the cosine. mini_batch_num_tokens: chunks of up to so
        many tokens that are not padding, instead of `mini_batch_size` rows. show_progress_bar needs tqdm."""
        super().__init__()
        self.model, self.scale, self.similarity_fct = model, scale, similarity_fct
        self.mini_batch_size, self.mini_batch_num_tokens = mini_batch_size, mini_batch_num_tokens
        self.gather_across_devices, self.engine = gather_across_devices, engine
        self.directions, self.partition_mode = tuple(directions), partition_mode
        self.hardness_mode, self.hardness_strength = hardness_mode, hardness_strength
        self.show_progress_bar = show_progress_bar
        if mini_batch_size < 1:
            raise option("mini_batch_size", mini_batch_size, "1 or more")
        if mini_batch_num_tokens is not None and mini_batch_num_tokens < 1:
            raise option("mini_batch_num_tokens", mini_batch_num_tokens, "1 or more, or None")
        if isinstance(similarity_fct, nn.Module) and any(p.requires_grad for p in similarity_fct.parameters()):
            raise option(
                "similarity_fct",
                f"{type(similarity_fct).__name__}, a module with trainable parameters",
                "a function without parameters: no rank would reduce their gradients",
                "isograd.losses.contrastive.FullBatchLoss(mesh, module) under an engine",
            )
        self._scoring()  # refuses what it cannot follow

    def get_config_dict(self) -> dict[str, Any]:
        """The options that sentence-transformers writes into the model card."""
        score = self.similarity_fct
        return {
            "scale": self.scale,
            "similarity_fct": "cos_sim" if score is None else getattr(score, "__name__", type(score).__name__),
            "mini_batch_size": self.mini_batch_size,
            "mini_batch_num_tokens": self.mini_batch_num_tokens,
            "gather_across_devices": self.gather_across_devices,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
            "hardness_mode": self.hardness_mode,
            "hardness_strength": self.hardness_strength,
        }

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Columns: anchors, positives, negatives, ... `labels` are ignored: row i's positive is positive i."""
        learns = torch.is_grad_enabled()
        towers = [self._represent(features) for features in sentence_features]
        vectors = [[upcast(replay.made).detach().requires_grad_(learns) for replay in tower] for tower in towers]
        loss = self.calculate_loss(vectors, labels, with_backward=learns)
        if not learns:
            return loss
        returned = loss.detach().requires_grad_()
        returned.register_hook(lambda seed: self._replay(towers, vectors, seed))
        return returned

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of each column's chunks of vectors; with_backward: also their `.grad`. MatryoshkaLoss wraps it."""
        del labels
        with torch.autocast(reps[0][0].device.type, enabled=False):
            loss = self._loss([torch.cat([upcast(t) for t in column]) for column in reps])
            if with_backward:  # to the vectors, not to the model; other ranks' losses reach mine with their weights
                (loss if self.engine is None else loss * _rows(reps)).backward()
        return loss.detach() if with_backward else loss

    def _scoring(self) -> Scoring:
        return Scoring(
            self.scale,
            self.similarity_fct,
            self.directions,
            self.partition_mode,
            self.hardness_mode,
            self.hardness_strength,
        )

    def _represent(self, features: dict[str, Tensor]) -> list[ChunkReplay]:
        features = dict(features)
        for key in ("cu_seq_lens_q", "offsets"):
            if key in features:
                raise option(
                    "model",
                    f"features with {key!r}: the rows of a batch are joined in one sequence",
                    "one row per text, padded, with an attention_mask",
                    "switch the model's input flattening off; for a StaticEmbedding use MultipleNegativesRankingLoss",
                )
        sizes = self._sizes(features)
        parts = [_trimmed(cut(features, sum(sizes[:number]), rows)) for number, rows in enumerate(sizes)]
        device = next(v.device for v in features.values() if isinstance(v, Tensor))
        return [ChunkReplay(lambda part=part: self._encode(part), device) for part in self._with_progress(parts)]  # type: ignore[misc]

    def _sizes(self, features: dict[str, Any]) -> list[int]:
        """The number of rows of each chunk."""
        rows = rows_of(features)
        if self.mini_batch_num_tokens is None:
            return [min(self.mini_batch_size, rows - first) for first in range(0, rows, self.mini_batch_size)]
        if "attention_mask" not in features:
            raise option("mini_batch_num_tokens", "features without an attention_mask", "None", "use mini_batch_size")
        sizes, tokens = [0], 0
        for length in features["attention_mask"].sum(1).tolist():
            if sizes[-1] and tokens + length > self.mini_batch_num_tokens:
                sizes, tokens = [*sizes, 0], 0
            sizes[-1], tokens = sizes[-1] + 1, tokens + length
        return sizes

    def _with_progress(self, parts: list[Any]) -> Iterable[Any]:
        """The chunks, with a progress bar if it was asked for."""
        if not self.show_progress_bar:
            return parts
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError:
            raise option("show_progress_bar", "True, and tqdm is not installed", "tqdm", "pip install tqdm") from None
        return tqdm(parts, desc="Embed mini-batches")  # type: ignore[no-any-return]

    def _encode(self, part: dict[str, Tensor]) -> Tensor:
        return self.model(dict(part))["sentence_embedding"]  # type: ignore[no-any-return]  # a module may write into it

    def _loss(self, vectors: list[Tensor]) -> Tensor:
        group = self._group()
        across, scoring = count_pairs(vectors, group), self._scoring()
        if scoring.plain:
            vectors = [F.normalize(t, dim=1) for t in vectors]
            where = across.columns(range(1, len(vectors)), ring=False)
            losses = pair_losses(vectors[0] * self.scale, torch.cat(vectors[1:]), where)
        else:
            losses = scoring.losses(vectors, across, self.mini_batch_size)
        if self.engine is not None:
            return losses.sum() / max(1, len(losses))
        return losses.sum() * group.size / max(1, sum(across.counts[0]))

    def _group(self) -> Group:
        """The ranks whose rows are in the loss."""
        every = world_group()
        return every if self.gather_across_devices else Group("alone", (every.index,), 0)

    def _replay(self, towers: list[list[ChunkReplay]], vectors: list[list[Tensor]], seed: Tensor) -> None:
        """Encode every chunk again and go backward. The vectors' gradients already contain each rank's own weight."""
        factor = seed.double() if self.engine is None else seed.double() / max(1, _rows(vectors))
        factors = raw.gather(factor, self._group())
        if not torch.allclose(factors, factors[:1], rtol=1e-6, atol=0.0):
            raise option(
                "gather_across_devices",
                f"losses that ranks multiply by different numbers: {factors.tolist()}",
                "the same factor on all ranks, besides the rows under an engine",
                "engine.backward(loss, weight=rows)",
            )
        for tower, leaves in zip(towers, vectors, strict=True):
            for replay, leaf in zip(tower, leaves, strict=True):
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * factor.to(leaf.dtype)
                last = tower is towers[-1] and replay is tower[-1]
                with nullcontext() if last else getattr(self.model, "no_sync", nullcontext)():
                    replay.backward(gradient, self.engine)


def _rows(vectors: list[list[Tensor]]) -> int:
    """This rank's number of queries."""
    return sum(len(chunk) for chunk in vectors[0])


def _trimmed(part: dict[str, Any]) -> dict[str, Any]:
    """The part without the last columns that are padding in every row of the chunk."""
    mask = part.get("attention_mask")
    if mask is None or not bool(mask.any()):
        return part
    width, used = mask.shape[1], int(mask.any(0).nonzero().max()) + 1
    return {
        k: v[:, :used] if isinstance(v, Tensor) and v.dim() > 1 and v.shape[1] == width else v for k, v in part.items()
    }
