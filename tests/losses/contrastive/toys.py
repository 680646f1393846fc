"""Towers, batches and the one-device truth that the tests of contrastive training compare with.

An encoder: embedding, dropout by row and feature, a layer, a norm. Data rank r of W holds rows of its own number; the
one device holds them all, in rank order, and computes naive.py's definitions on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isograd as ig
from isograd.core import rng
from isograd.core.mesh import Mesh
from isograd.losses.contrastive import FullBatchLoss, InfoNCE, SigLIP, naive, pool
from isograd.models import Transformer, TransformerConfig
from isograd.nn import ExpertOptions
from isograd.sequence.attend import token_layout_for

Make = Callable[[Mesh], nn.Module]
DIM, LENGTH, VOCAB = 6, 5, 29
ROWS = {"empty": (5, 0, 7, 2), "uneven": (3, 7, 1, 4)}  # of data ranks
KEY = rng.key(5)


class Encoder(nn.Module):
    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, DIM)
        self.dropout = dropout

    def forward(self, tokens: Tensor, samples: Tensor) -> Tensor:
        """tokens [rows, LENGTH], samples [rows] -> [rows, DIM]; dropout is a function of the sample."""
        x = self.embed(tokens).mean(1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            x = rng.dropout(x, self.dropout, KEY, samples) if self.dropout else x
        return self.out(self.norm(x))  # type: ignore[no-any-return]


class Decoder(Transformer):
    """isograd's own layers: its tokens may be cut over cp, its weights over tp; the mean over a row's tokens."""

    def __init__(self, seed: int, mesh: Mesh, dropout: float = 0.0, experts: ExpertOptions | None = None) -> None:
        config = TransformerConfig(
            vocab=VOCAB, hidden=16, layers=2, heads=4, head_dim=4, mlp=11, dropout=dropout, experts=experts
        )
        super().__init__(config, mesh, seed=seed)

    def forward(self, tokens: Tensor, samples: Tensor) -> Tensor:  # type: ignore[override]
        assert self.embed is not None
        assert self.norm is not None
        places, rank = token_layout_for(LENGTH, len(tokens), self.mesh), self.mesh.index("cp")
        stream = self._stream(places, tokens, KEY, samples, None)
        x = stream.dropout(self.embed(places.shard(tokens, rank).reshape(-1)), self.config.dropout, self.mesh, "embed")
        x = self.norm(self._body(x, stream, self.parts[0])[0])
        weights = places.shard(torch.ones(tokens.shape, device=tokens.device) / LENGTH, rank)
        return pool(x, weights, self.mesh)


class Towers(nn.Module):
    """Queries' and documents' encoders, tied or not, and the loss that is trained with them."""

    def __init__(
        self, loss: nn.Module, mesh: Mesh, tied: bool = True, dropout: float = 0.0, decoder: bool = False
    ) -> None:
        super().__init__()
        self.query: nn.Module = Decoder(1, mesh, dropout) if decoder else Encoder(1, dropout)
        self.document: nn.Module = self.query
        if not tied:
            self.document = Decoder(2, mesh, dropout) if decoder else Encoder(2, dropout)
        self.loss = loss
        self.double()


@dataclass(frozen=True)
class Batch:
    """Of one data rank, or of all: for each tower what its encoder is given."""

    towers: list[tuple[Tensor, Tensor]]
    ids: list[Tensor]
    guides: list[Tensor]

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        towers = [(tokens.to(device), samples.to(device)) for tokens, samples in self.towers]
        return Batch(towers, [one.to(device) for one in self.ids], [one.to(device) for one in self.guides])


def batch(rank: int, negatives: int, rows: str) -> Batch:
    """Queries, documents, and a tower of twice (or `negatives` times) as many hard negatives."""
    n = ROWS[rows][rank]
    generator = torch.Generator().manual_seed(17 + rank)
    towers, ids, guides = [], [], []
    for tower, count in enumerate([n, n] + [n * negatives] * bool(negatives)):
        tokens = torch.randint(VOCAB, (count, LENGTH), generator=generator)
        towers.append((tokens, torch.arange(count) + 1000 * rank + 100 * tower))
        ids.append(torch.randint(6, (count,), generator=generator))
        guides.append(torch.randn(count, 3, generator=generator, dtype=torch.float64))
    return Batch(towers, ids, guides)


def whole(parts: Sequence[Batch]) -> Batch:
    """All ranks' rows; documents and hard negatives as columns in rank order are for the loss alone."""
    towers = [
        tuple(torch.cat(x) for x in zip(*tower, strict=True)) for tower in zip(*(p.towers for p in parts), strict=True)
    ]
    return Batch(
        towers,  # type: ignore[arg-type]
        [torch.cat(x) for x in zip(*(p.ids for p in parts), strict=True)],
        [torch.cat(x) for x in zip(*(p.guides for p in parts), strict=True)],
    )


def truth(loss: nn.Module, towers: Sequence[Tensor], one: Batch, masks: str = "") -> Tensor:
    """The mean loss by the definitions; `masks`: 'ids', 'guides', or both."""
    if isinstance(loss, FullBatchLoss):
        return loss.function(*towers)
    assert isinstance(loss, InfoNCE | SigLIP)
    vectors = [F.normalize(t, dim=1) for t in towers]
    scale = loss.log_scale.exp()

    def hidden(row: int, columns: Sequence[int]) -> Tensor | None:
        found = []
        if "ids" in masks:
            found.append(naive.same_id(one.ids[columns[0]], torch.cat([one.ids[c] for c in columns])))
        if "guides" in masks:
            assert isinstance(loss, InfoNCE)
            near = one.guides[row], torch.cat([one.guides[c] for c in columns])
            found.append(naive.guided(*near, loss.margin, loss.relative_margin))
        return torch.stack(found).any(0) if found else None

    columns = range(1, len(vectors))
    forth = scale * vectors[0] @ torch.cat(vectors[1:]).T
    if isinstance(loss, SigLIP):
        return naive.siglip(forth + loss.bias, hidden(0, columns)).mean()
    losses = naive.info_nce(forth, hidden(0, columns))
    if loss.both:
        losses = (losses + naive.info_nce(scale * vectors[1] @ vectors[0].T, hidden(1, [0]))) / 2
    return losses.mean()


@dataclass
class Found:
    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    messages: int = 0


def one_device(
    make: Make, parts: int, *, masks: str = "", negatives: int = 0, rows: str = "empty", **more: Any
) -> Found:
    """Every row in one graph, one backward, no chunks, no isograd but the definitions."""
    mesh = Mesh.unbound("dp1")
    model = Towers(make(mesh), mesh, **more)  # type: ignore[arg-type]
    one = whole([batch(r, negatives, rows) for r in range(parts)])
    encoders = [model.query, model.document, model.document]
    vectors = [encode(*inputs) for encode, inputs in zip(encoders, one.towers, strict=False)]
    loss = truth(model.loss, vectors, one, masks)
    loss.backward()
    return Found({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, float(loss.detach()))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def cached(
    layout: str,
    make: Make,
    *,
    chunk: int,
    keep_mb: float = 0.0,
    masks: str = "",
    negatives: int = 0,
    rows: str = "empty",
    **more: Any,
) -> Found:
    """The same through GradCache, on this rank's rows."""
    mesh = Mesh(layout)
    model = Towers(make(mesh), mesh, **more).to(mesh.device)  # type: ignore[arg-type]
    engine = ig.Engine(model, mesh, sgd, bucket_mb=0.001)
    encoders = [model.query, model.document, model.document][: 2 + bool(negatives)]
    cache = ig.contrastive.GradientCache(engine, model.loss, encode=encoders, chunk=chunk, keep_mb=keep_mb)
    mine = batch(mesh.index("dp"), negatives, rows).to(mesh.device)
    given = {"ids": mine.ids} if "ids" in masks else {}
    if "guides" in masks:
        given["guides"] = mine.guides
    cache.backward(*mine.towers, **given)  # type: ignore[arg-type]
    found = Found({n: g.clone() for n, g in engine.grads().items()})
    found.loss = engine.step().loss
    return found


def assert_same(found: Found, true: Found, label: str, limit: float = 1e-12) -> None:
    for name, gradient in true.gradients.items():
        error = float((found.gradients[name] - gradient).norm() / gradient.norm())
        assert error <= limit, f"{label}: gradient of {name}: error {error:.1e}"
    assert abs(found.loss - true.loss) <= limit * abs(true.loss), label
