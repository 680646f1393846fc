"""FAILURES C, sentence-transformers: all options of CachedMultipleNegativesRankingLoss; MatryoshkaLoss around ours.

Gradients are compared with one graph of all rows on one device, fp64, of the definition written out below. Where
sentence-transformers is installed, its own loss and its own MatryoshkaLoss are used; else, its MatryoshkaLoss is
replaced by what it does to a cached loss: it wraps `calculate_loss`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import isograd as ig
from isograd.core.mesh import Mesh
from isograd.errors import ContrastiveError
from isograd.integrations.contrastive.sentence_transformers import CachedInfoNCE
from tests.losses.contrastive.test_front_ends import UNEVEN, Sentences, assert_right, gradients, joined, sentences
from tests.losses.contrastive.toys import DIM, sgd

SIGNATURE = (  # of sentence-transformers 6.2
    "model scale similarity_fct mini_batch_size mini_batch_num_tokens gather_across_devices directions partition_mode "
    "show_progress_bar hardness_mode hardness_strength"
)
DIMS, WEIGHTS = (DIM, DIM // 2), (1.0, 0.3)


def dots(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


EVERY = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "dots": {"similarity_fct": dots, "scale": 0.5},
    "all directions": {"directions": EVERY},
    "per direction": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    "in-batch": {"hardness_mode": "in_batch_negatives", "hardness_strength": 3.0},
    "hard": {"hardness_mode": "hard_negatives", "hardness_strength": 3.0, "directions": EVERY[:2]},
    "all negatives": {"hardness_mode": "all_negatives", "hardness_strength": 3.0},
    "tokens": {"mini_batch_num_tokens": 7},
}


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


def definition(vectors: list[Tensor], options: dict[str, Any]) -> Tensor:
    """The loss of all rows, one row after another."""
    score, scale = options.get("similarity_fct", cosines), options.get("scale", 5.0)
    queries, columns, n = vectors[0], vectors[1:], len(vectors[0])
    near = [score(queries, documents) for documents in columns]
    mode, strength = options.get("hardness_mode"), options.get("hardness_strength", 0.0)
    losses = []
    for i in range(n):
        terms: dict[str, list[Tensor]] = {name: [] for name in options.get("directions", EVERY[:1])}
        for j in range(n):
            for tower in range(len(columns)):
                negative = "hard" if tower and i == j else "positive" if i == j else "in_batch"
                harder = mode == "all_negatives" and negative != "positive"
                harder |= mode is not None and mode.removesuffix("_negatives") == negative
                s = near[tower][i, j]
                terms["query_to_doc"].append(scale * s + (strength * s.detach() if harder else 0.0))
                if "doc_to_doc" in terms and i != j:
                    terms["doc_to_doc"].append(scale * score(columns[tower][j : j + 1], columns[0][i : i + 1])[0, 0])
            if "query_to_query" in terms and i != j:
                terms["query_to_query"].append(scale * score(queries[i : i + 1], queries[j : j + 1])[0, 0])
            if "doc_to_query" in terms:
                terms["doc_to_query"].append(scale * near[0][j, i])
        if options.get("partition_mode") == "per_direction":
            total = sum(torch.stack(t).logsumexp(0) for t in terms.values()) / len(terms)
        else:
            total = torch.stack([t for ts in terms.values() for t in ts]).logsumexp(0)
        losses.append(total - scale * near[0][i, i])
    return torch.stack(losses).mean()


@cache
def true(name: str, dims: tuple[int, ...] = ()) -> tuple[dict[str, Tensor], float]:
    model = Sentences()
    vectors = [model(joined(sentences, UNEVEN, column))["sentence_embedding"] for column in range(3)]
    loss = definition(vectors, OPTIONS[name])
    if dims:
        cut = zip(WEIGHTS, dims, strict=True)
        loss = sum(w * definition([F.normalize(v[:, :dim], dim=1) for v in vectors], OPTIONS[name]) for w, dim in cut)
    loss.backward()
    return gradients(model), float(loss.detach())


def matryoshka(loss: CachedInfoNCE) -> nn.Module:
    """sentence-transformers' own around ours, or what it does."""
    try:
        from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
    except ImportError:
        loss.calculate_loss = Shrinking(loss.calculate_loss)  # type: ignore[method-assign]
        return loss
    return MatryoshkaLoss(_Dimension(), loss, DIMS, WEIGHTS)  # type: ignore[no-any-return]


class _Dimension(nn.Module):
    def get_embedding_dimension(self) -> int:
        return DIM


class Indexed(Sentences):
    def __getitem__(self, _: int) -> nn.Module:  # sentence-transformers looks at a model's first module
        return self.embed


class Shrinking:
    """As sentence-transformers' CachedLossDecorator: the loss of shortened vectors, whose `.grad` it expects."""

    def __init__(self, calculate: Callable[..., Tensor]) -> None:
        self.calculate = calculate

    def __call__(self, reps: list[list[Tensor]], *args: Any, **kwargs: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for dim, weight in zip(DIMS, WEIGHTS, strict=True):
            short = [[F.normalize(r[..., :dim], dim=-1) for r in column] for column in reps]
            leaves = [[r.detach().requires_grad_(torch.is_grad_enabled()) for r in column] for column in short]
            total = total + weight * self.calculate(leaves, *args, **kwargs)
            if torch.is_grad_enabled():
                for a, b in zip(chain(*short), chain(*leaves), strict=True):
                    a.backward(weight * b.grad)
        return total


def runs() -> dict[str, tuple[dict[str, Tensor], float]]:
    mesh, found = Mesh("dp2"), {}
    columns = [sentences(mesh.rank, UNEVEN, column) for column in range(3)]
    for name in [*OPTIONS, "matryoshka"]:
        options = {"scale": 5.0, "mini_batch_size": 2, "gather_across_devices": True, **OPTIONS.get(name, {})}
        wrap = matryoshka if name == "matryoshka" else lambda loss: loss
        averaged = DistributedDataParallel(Sentences())
        wrap(CachedInfoNCE(averaged, **options))(columns, torch.zeros(0)).backward()
        found[f"{name}/DDP"] = gradients(averaged), 0.0
        model = Sentences()
        engine = ig.Engine(model, mesh, sgd)
        loss = wrap(CachedInfoNCE(model, engine=engine, **options))
        engine.backward(loss(columns, torch.zeros(0)), weight=UNEVEN[mesh.rank])
        found[f"{name}/engine"] = dict(engine.grads().items()), engine.step().loss
    return found


@pytest.mark.medium
def test_every_option_and_matryoshka_have_the_gradient_of_one_device(worlds) -> None:
    for found in worlds(2).run(runs):
        assert len(found) == 2 * len(OPTIONS) + 2
        for label, (mine, value) in found.items():
            name, kind = label.split("/")
            expected, loss = true("default", DIMS) if name == "matryoshka" else true(name)
            assert_right(mine, expected, label)
            assert kind == "DDP" or abs(value - loss) < 1e-12, label


@pytest.mark.peers
def test_the_options_are_those_of_sentence_transformers_and_mean_the_same() -> None:
    assert " ".join(inspect.signature(CachedInfoNCE).parameters) == f"{SIGNATURE} engine"
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses", reason="SIGNATURE is that of 6.2")
    theirs = losses.CachedMultipleNegativesRankingLoss
    assert " ".join(inspect.signature(theirs).parameters) == SIGNATURE
    columns = [joined(sentences, UNEVEN, column) for column in range(3)]
    for name, more in OPTIONS.items():
        model = Indexed()
        options = {"scale": 5.0, "mini_batch_size": 3, **more}
        loss = theirs(model, **options)
        value = loss([dict(c) for c in columns], None)
        value.backward()
        assert_right(gradients(model), true(name)[0], f"{name}, theirs")
        assert abs(float(value.detach()) - true(name)[1]) < 1e-12, name
        ours = CachedInfoNCE(model, **options).get_config_dict()
        assert ours == loss.get_config_dict(), name


def test_chunks_of_tokens_are_as_large_as_they_may_be() -> None:
    loss = CachedInfoNCE(Sentences(), mini_batch_num_tokens=5)
    lengths = torch.tensor([2, 3, 1, 7, 4, 1, 1])
    mask = (torch.arange(8) < lengths[:, None]).long()
    assert loss._sizes({"input_ids": mask, "attention_mask": mask}) == [2, 1, 1, 2, 1]


def test_a_progress_bar_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    columns = [sentences(0, UNEVEN, column) for column in range(2)]
    CachedInfoNCE(Sentences(), mini_batch_size=2, show_progress_bar=True)(columns)
    assert "Embed mini-batches" in capsys.readouterr().err


def test_an_option_that_cannot_be_followed_is_refused_by_name() -> None:
    model, mask = Sentences(), torch.ones(3, 4, dtype=torch.long)

    def said(run: Callable[[], object]) -> str:
        with pytest.raises(ContrastiveError, match="IG970") as error:
            run()
        return str(error.value)

    for options, words in (
        ({"directions": ("doc_to_query",)}, "query_to_doc among them"),
        ({"directions": ("query_to_docs",)}, "did you mean 'query_to_doc'"),
        ({"directions": EVERY, "partition_mode": "per_direction"}, "partition_mode='joint'"),
        ({"partition_mode": "apart"}, "partition_mode"),
        ({"hardness_mode": "hard_negatives"}, "hardness_strength=5.0"),
        ({"hardness_strength": 2.0}, "hardness_mode"),
        ({"hardness_mode": "hard", "hardness_strength": 2.0}, "hardness_mode"),
        ({"hardness_mode": "hard_negatives", "hardness_strength": -1.0}, "hardness_strength"),
        ({"similarity_fct": nn.Bilinear(2, 2, 1)}, "FullBatchLoss"),
        ({"mini_batch_num_tokens": 0}, "mini_batch_num_tokens"),
        ({"mini_batch_size": 0}, "mini_batch_size"),
        ({"scale": 0.0}, "scale"),
    ):
        assert words in said(lambda options=options: CachedInfoNCE(model, **options)), options  # type: ignore[misc]
    tokens = CachedInfoNCE(model, mini_batch_num_tokens=5)
    assert "mini_batch_size" in said(lambda: tokens([{"input_ids": mask}] * 2))
    flat = {"input_ids": mask, "cu_seq_lens_q": torch.arange(4)}
    assert "flattening" in said(lambda: CachedInfoNCE(model)([flat] * 2))


def other_widths() -> str:
    mesh = Mesh("dp2")
    loss = CachedInfoNCE(Sentences(), gather_across_devices=True)
    vectors = torch.randn(3, 4 - mesh.rank)
    with pytest.raises(ContrastiveError) as error:
        loss.calculate_loss([[vectors], [vectors]])
    return str(error.value)


def test_vectors_of_other_lengths_on_one_rank_are_refused_on_both(worlds) -> None:
    """MatryoshkaLoss(n_dims_per_step=...) draws dimensions from Python's generator: ranks must seed it alike."""
    for said in worlds(2).run(other_widths):
        assert said.startswith("IG960") and "[4] on rank 0, [3] on rank 1" in said
