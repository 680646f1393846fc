"""The front ends people know: under torch's DDP, which averages, and under the engine, every parameter's gradient is
the one that one device has. fp64, 1e-12; ranks with different numbers of rows wherever the front end can know of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import isograd as ig
from isograd.core.mesh import Mesh
from isograd.errors import ContrastiveError
from isograd.integrations.contrastive.open_clip import ClipLoss
from isograd.integrations.contrastive.sentence_transformers import CachedInfoNCE
from tests.losses.contrastive.toys import DIM, sgd

EVEN, UNEVEN = (3, 3), (5, 2)
FEATURES, PAD = 7, 4


class Clip(nn.Module):
    """Two towers and a scale; called with both inputs, as OpenCLIP's models are, or with tokens of either."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.image, self.text = nn.Linear(FEATURES, DIM), nn.Sequential(nn.Linear(FEATURES, 9), nn.Linear(9, DIM))
        self.scale = nn.Parameter(torch.tensor(4.0))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(x), dim=1), F.normalize(self.text(y), dim=1), self.scale


class Sentences(nn.Module):
    """Has the calling convention of a SentenceTransformer: a dict of features in, a dict with the embedding out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, DIM)
        self.dropout = nn.Dropout(0.0)
        self.double()

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"].double()
        hidden = self.dropout(self.embed(features["input_ids"]))
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        features["sentence_embedding"] = self.out(mean)
        return features


def rows(rank: int, counts: tuple[int, ...], column: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + column)
    return torch.randn(counts[rank], FEATURES, generator=generator, dtype=torch.float64)


def sentences(rank: int, counts: tuple[int, ...], column: int) -> dict[str, Tensor]:
    """Tokens with pads behind them, of which the last PAD columns are pads in every row."""
    generator = torch.Generator().manual_seed(50 + 10 * rank + column)
    tokens = torch.randint(11, (counts[rank], 5 + PAD), generator=generator)
    lengths = torch.randint(1, 6, (counts[rank], 1), generator=generator)
    return {"input_ids": tokens, "attention_mask": (torch.arange(5 + PAD) < lengths).long()}


def joined(make: Callable[..., Any], counts: tuple[int, ...], column: int) -> Any:
    parts = [make(rank, counts, column) for rank in range(2)]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def info_nce(queries: Tensor, documents: Tensor, scale: Tensor | float) -> Tensor:
    """A loss as users write it, of all rows."""
    logits = scale * F.normalize(queries, dim=1) @ F.normalize(documents, dim=1).T
    return F.cross_entropy(logits, torch.arange(len(queries)))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_right(found: dict[str, Tensor], true: dict[str, Tensor], label: str) -> None:
    for name, gradient in true.items():
        assert name in found, f"{label}: no gradient of {name}"
        error = float((found[name] - gradient).norm() / gradient.norm())
        assert error <= 1e-12, f"{label}: gradient of {name}: error {error:.1e}"


# -- OpenCLIP

MODES = [(local, home) for local in (False, True) for home in (False, True)]


def clip_runs() -> dict[str, tuple[dict[str, Tensor], float]]:
    mesh, found = Mesh("dp2"), {}
    for local, home in MODES:
        for name, counts in (("even", EVEN), ("uneven", UNEVEN)):
            mine = [rows(mesh.rank, counts, column) for column in (0, 1)]
            loss = ClipLoss(local, home, rank=mesh.rank, world_size=2)
            averaged = DistributedDataParallel(Clip())
            value = loss(*averaged(*mine))
            value.backward()
            found[f"DDP local={local} grad={home} {name}"] = gradients(averaged), float(value.detach())
            model = Clip()
            engine = ig.Engine(model, mesh, sgd)
            value = loss(*model(*mine), output_dict=True)["contrastive_loss"]
            engine.backward(value, weight=len(mine[0]))
            found[f"engine local={local} grad={home} {name}"] = dict(engine.grads().items()), engine.step().loss
    return found


def test_clip_loss_is_right_in_all_four_modes_under_ddp_and_engine(worlds) -> None:
    true = {}
    for name, counts in (("even", EVEN), ("uneven", UNEVEN)):
        model = Clip()
        images, texts, scale = model(joined(rows, counts, 0), joined(rows, counts, 1))
        loss = (info_nce(images, texts, scale) + info_nce(texts, images, scale)) / 2
        loss.backward()
        true[name] = gradients(model), float(loss.detach())
    for found in worlds(2).run(clip_runs):
        assert len(found) == 16
        for label, (mine, value) in found.items():
            expected, loss_there = true[label.split()[-1]]
            if label.startswith("DDP local=True") and label.endswith(" uneven"):
                continue  # a mean of local means, as the page says: DDP cannot know the rows
            assert_right(mine, expected, label)
            if "local=False" in label or label.startswith("engine"):
                assert abs(value - loss_there) < 1e-12, label


def test_clip_loss_in_another_world_than_it_was_told_of_is_refused() -> None:
    with pytest.raises(ContrastiveError, match="IG969"):
        ClipLoss(rank=1, world_size=2)


# -- sentence-transformers


def counted_hook(state: list[int], bucket: Any) -> Any:  # DDP refuses annotations that are strings
    state.append(1)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(None, bucket)


counted_hook.__annotations__ = {}


def test_a_replay_that_draws_otherwise_is_refused() -> None:
    model, draws = Sentences(), iter((1.0, 1.0, 0.9))
    model.register_forward_hook(
        lambda _, __, found: found | {"sentence_embedding": found["sentence_embedding"] * next(draws)}
    )
    loss = CachedInfoNCE(model, 5.0)([sentences(0, EVEN, column) for column in (0, 1)])
    with pytest.raises(ContrastiveError, match="IG965"):
        loss.backward()


def sentence_runs() -> dict[str, dict[str, Tensor]]:
    mesh, found = Mesh("dp2"), {}
    columns = [sentences(mesh.rank, UNEVEN, column) for column in range(3)]
    averaged, reductions = DistributedDataParallel(Sentences()), []
    averaged.register_comm_hook(reductions, counted_hook)
    loss = CachedInfoNCE(averaged, 5.0, mini_batch_size=2, gather_across_devices=True)
    for _ in range(2):
        averaged.zero_grad()
        reductions.clear()
        loss(columns, torch.zeros(UNEVEN[mesh.rank])).backward()
    found["DDP"] = gradients(averaged) | {"reductions": torch.tensor(len(reductions))}
    with torch.no_grad():
        found["evaluation"] = {"loss": loss(columns)}
    model = Sentences()
    engine = ig.Engine(model, mesh, sgd)
    loss = CachedInfoNCE(model, 5.0, mini_batch_size=2, gather_across_devices=True, engine=engine)
    engine.backward(loss(columns), weight=UNEVEN[mesh.rank])
    found["engine"] = dict(engine.grads().items())
    found["value"] = {"loss": torch.tensor(engine.step().loss, dtype=torch.float64)}
    return found


def test_the_sentence_transformers_loss_is_right_under_ddp_and_engine(worlds) -> None:
    model = Sentences()
    vectors = [model(joined(sentences, UNEVEN, column))["sentence_embedding"] for column in range(3)]
    loss = info_nce(vectors[0], torch.cat(vectors[1:]), 5.0)
    loss.backward()
    loss = loss.detach()
    every = worlds(2).run(sentence_runs)
    for found in every:
        assert int(found["DDP"].pop("reductions")) == 1
        assert_right(found["DDP"], gradients(model), "DDP")
        assert_right(found["engine"], gradients(model), "engine")
        assert abs(float(found["value"]["loss"] - loss)) < 1e-12
    assert abs(sum(float(found["evaluation"]["loss"]) for found in every) / 2 - float(loss)) < 1e-12


def test_the_sentence_transformers_loss_works_alone_with_gradients_scaled_by_the_trainer() -> None:
    model, plain = Sentences(), Sentences()
    columns = [sentences(0, UNEVEN, column) for column in range(2)]
    loss = CachedInfoNCE(model, 5.0, mini_batch_size=3)
    (loss(columns) / 4).backward()
    vectors = [plain(dict(column))["sentence_embedding"] for column in columns]
    (info_nce(*vectors, 5.0) / 4).backward()
    assert_right(gradients(model), gradients(plain), "alone")
    assert loss.get_config_dict()["mini_batch_size"] == 3
