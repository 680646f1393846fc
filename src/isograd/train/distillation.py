"""A decoder that learns from a teacher: beside the loss of the labels, how far its distribution is from the teacher's.

The teacher is a model of isograd's decoder without gradient, on the same mesh; under pp each rank of the last stage has
the whole of it. It sees the same rows as the model, and only places with a label count. The logits of a micro-batch
exist whole, of both models, on every rank of a tp group.

One device: (1 - weight) * cross entropy + weight * losses.distil(...), the mean over all labels.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd import losses
from isograd.core.mesh import Mesh
from isograd.data import files
from isograd.errors import ConfigError, DataError, headline
from isograd.hf.configs import load_config
from isograd.hf.families import load_hf
from isograd.models import Transformer, TransformerConfig
from isograd.sequence import token_layout_for
from isograd.train.sections import Distil
from isograd.train.task import of_first_rank


class DistilTransformer(Transformer):
    """The Transformer, whose loss has a teacher."""

    def __init__(self, config: TransformerConfig, mesh: Mesh, options: Distil, **more: Any) -> None:
        super().__init__(config, mesh, **more)
        self.options = options
        self.taught_by: list[Transformer] = []  # a list, so that its parameters are none of the model's
        if self.head is not None:
            described, on = teacher_config(options, config.vocab), mesh if mesh.layout.pp == 1 else Mesh.unbound("dp1")
            made = Transformer(described, on, dtype=more["dtype"], device=mesh.device)
            self.taught_by.append(frozen(made, options.teacher))

    def _loss(self, x: Tensor, labels: Tensor, tokens: Tensor, documents: Tensor | None) -> Any:
        assert self.head is not None
        options, places = self.options, token_layout_for(tokens.shape[1], len(tokens), self.mesh)
        loss, count = super()._loss(x, labels, tokens, documents)
        with torch.no_grad():
            whole = self.taught_by[0](tokens, documents=documents)
        taught = places.shard(whole, self.mesh.index("cp")).flatten(0, 1)
        there = labels != self.ignore_index
        apart = losses.distil(self.head.logits(x)[there], taught[there], options.kind, temperature=options.temperature)
        mean = apart.sum() / count.clamp(min=1)
        return (1 - options.weight) * loss + options.weight * mean, count


def teacher_config(options: Distil, vocab: int) -> TransformerConfig:
    """What the teacher is; refused unless it has a model's vocabulary."""
    described = load_config(options.teacher)
    if described.vocab != vocab:
        raise ConfigError(
            "IG635", "the teacher has another vocabulary than the model",
            seen=f"{described.vocab} ids in {options.teacher}",
            expected=f"{vocab}, as in the model", fix="a teacher with the model's tokenizer (distil.teacher)",
        )  # fmt: skip
    return described


def frozen(model: Transformer, folder: str | None) -> Transformer:
    """A model that another one is compared with, with the weights of a folder, if it has one."""
    if folder is not None:
        load_hf(model, folder)
    return model.requires_grad_(False).eval()


def identity(options: Distil, mesh: Mesh) -> str:
    """A hash of the teacher's files, which the first rank reads for all."""
    folder = Path(options.teacher)

    def hashed() -> str:
        every = [*files.hashes_of_weights(folder), files.sha256(folder / "config.json")]
        return sha256("".join(every).encode()).hexdigest()

    return of_first_rank(hashed, mesh, lambda error: DataError("IG904", seen=headline(error), path=folder))
