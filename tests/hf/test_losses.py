"""Masked models, sequences to sequences, and models of images and text have by name the gradients of one device.

fp64, 1e-9, two steps of two micro-batches with uneven labels, one of which has none. The reference is transformers' own
model, given the whole batch with its labels as they are: it never sees isograd.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isograd as ig
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import ModelError
from isograd.hf import proof
from isograd.hf.build import build
from isograd.hf.force_fp64 import ForceFP64
from isograd.hf.losses import CAUSAL, MASKED, SEQ2SEQ, library_of
from isograd.hf.proof import compare
from isograd.hf.small_config import VOCAB, small
from tests.hf.test_hugging import MICROS, distance, sgd, whole

KINDS = {"eurobert": MASKED, "bert": MASKED, "t5gemma": SEQ2SEQ, "qwen2_vl": CAUSAL}
IGNORE, STEPS = -100, 2


def config_of(kind: str) -> Any:
    from transformers import AutoConfig

    config = small(AutoConfig.for_model(kind), 2)
    if kind == "bert":
        config.architectures = ["BertForMaskedLM"]  # as its folders name it; without it, the causal class
    return config


def batch(step: int, data_rank: int, number: int, loss: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * data_rank + number)
    tokens = torch.randint(3, VOCAB, (2, 9), generator=generator)
    labels = torch.randint(3, VOCAB, (2, 6), generator=generator) if loss == SEQ2SEQ else tokens.clone()
    labels[0, : 1 + (3 * data_rank + 5 * number + step) % 5] = IGNORE
    if (step, data_rank, number) == (1, 0, 1):
        labels[:] = IGNORE
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    labels[1, 4 if loss == SEQ2SEQ else 6 :] = IGNORE
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def one_device(config: Any, start: dict[str, Tensor], ranks: int, loss: str) -> list[dict[str, Tensor]]:
    """The gradients of each step, of transformers alone."""
    library, _ = library_of(config, "")
    model = library._from_config(config, dtype=torch.float64).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])
    optimizer, found = sgd(model.parameters()), []
    for step in range(STEPS):
        batches = [batch(step, rank, number, loss) for rank in range(ranks) for number in range(MICROS)]
        counts = [int((b["labels"][:, loss == CAUSAL :] != IGNORE).sum()) for b in batches]
        optimizer.zero_grad()
        for given, count in zip(batches, counts, strict=True):
            if count:
                with ForceFP64():
                    mean = model(**given).loss
                (mean * count / sum(counts)).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return found


def trained(kind: str, layout: str) -> list[str]:
    """The names of gradients that are not one device's, on this rank."""
    config, mesh, loss = config_of(kind), Mesh(layout), KINDS[kind]
    model: Any = build(config, mesh, torch.float64, noise=0.1)
    engine, found = Engine(model, mesh, sgd), []
    start = whole(engine)
    for step in range(STEPS):
        for number in range(MICROS):
            part = ig.hf.shard(batch(step, mesh.index("dp"), number, loss), mesh, loss)
            with ForceFP64():
                mean = model(**part.inputs).loss
            engine.backward(mean, weight=part.weight)
        found.append(dict(engine.grads().items()))
        engine.step()
    wrong = []
    for ours, theirs in zip(found, one_device(config, start, mesh.size("dp"), loss), strict=True):
        floor = 1e-6 * float(torch.stack([g.norm() for g in theirs.values()]).norm())
        wrong += [n for n, g in theirs.items() if not distance(ours[n], g, floor) <= 1e-9]
        wrong += [n for n, g in ours.items() if n not in theirs and bool(g.any())]
    return wrong


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("eurobert", "tp2"), ("t5gemma", "tp2 zero1"), ("qwen2_vl", "tp2"), ("bert", "dp2 zero3")],
)
def test_gradients_are_one_devices(worlds, kind: str, layout: str) -> None:
    assert worlds(2).run(trained, kind, layout) == [[], []]


def in_stages(kind: str) -> list[str]:
    return list(compare(config_of(kind), Mesh("pp2 1f1b")).wrong)


def test_a_masked_model_is_cut_into_stages(worlds) -> None:
    assert worlds(2).run(in_stages, "eurobert") == [[], []]


def test_a_part_that_was_made_for_another_loss_is_refused() -> None:
    mesh = Mesh.unbound("1")
    model = build(config_of("eurobert"), mesh, torch.float32)
    given = batch(0, 0, 0, MASKED)
    part = ig.hf.shard({"input_ids": given["input_ids"], "labels": given["labels"]}, mesh)
    with pytest.raises(ModelError, match="shifted for a causal model") as caught:
        model(**part.inputs)
    assert caught.value.code == "IG444"
    with pytest.raises(ModelError, match="did you mean 'masked'"):
        ig.hf.shard(given, mesh, loss="maskd")
    with pytest.raises(ModelError, match="pixel_values"):
        ig.hf.shard({**given, "pixel_values": given["labels"]}, mesh, loss=MASKED)


def test_sequences_of_what_is_not_causal_are_not_cut() -> None:
    with pytest.raises(ModelError, match="IG460"):
        build(config_of("eurobert"), Mesh.unbound("cp2 ulysses"), torch.float32)


def test_a_loss_that_is_not_the_mean_of_its_labels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model's that adds a term of its own: here, the definition is given another mean."""
    monkeypatch.setattr(proof, "mean_of_labels", lambda logits, labels, loss: logits.mean())
    with pytest.raises(ModelError, match="is not the mean of the labels") as caught:
        compare(config_of("eurobert"), Mesh.unbound("1"))
    assert caught.value.code == "IG474"
