"""Wrong input is refused on all ranks, with the rank that had it; without an engine the loss is NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.core.attributes import set_attributes
from isograd.core.input_checks import IdCheck, InputChecks
from isograd.core.mesh import Mesh
from isograd.core.rng import key
from isograd.engine import Engine
from isograd.errors import IsogradError
from isograd.models import Transformer, preset
from tests.engine import toys

CONFIG = preset("tiny-llama")
VOCAB = CONFIG.vocab
Batch = tuple[Tensor, Tensor]


def batch(seed: int = 0, rows: int = 2) -> Batch:
    ids = torch.randint(VOCAB, (rows, 9), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def with_id(batch: Batch, which: int, wrong: int) -> Batch:
    """The batch with one wrong id: 0 among the tokens, 1 among the labels."""
    batch[which][1, 2] = wrong
    return batch


def transformer(layout: str = "1", **options: Any) -> tuple[Mesh, Transformer]:
    mesh = Mesh(layout)
    return mesh, Transformer(CONFIG, mesh, dtype=torch.float64, **options)


# -- one rank, no engine


@pytest.mark.parametrize("which", [0, 1], ids=["token", "label"])
@pytest.mark.parametrize("wrong", [-1, VOCAB, 10**9])
def test_a_wrong_id_makes_loss_and_gradients_nan_without_an_engine(which: int, wrong: int) -> None:
    """FAILURES A5: it trained as a token without a target, or raised a bare IndexError."""
    _, model = transformer()
    loss, count = model(*with_id(batch(), which, wrong))
    loss.backward()
    assert loss.isnan()
    assert int(count) == 16
    assert any(p.grad.isnan().any() for p in model.parameters() if p.grad is not None)


def test_any_label_can_mark_positions_without_a_target() -> None:
    """FAILURES A5: nanoGPT's ignore index is -1."""
    tokens, labels = batch()
    labels[0, :5] = -1
    _, model = transformer(ignore_index=-1)
    loss, count = model(tokens, labels)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-1)
    expected.backward()
    assert int(count) == 11
    assert abs(float((loss - expected).detach())) < 1e-12
    for name, p in model.named_parameters():
        assert float((found[name] - p.grad).norm()) <= 1e-9 * float(p.grad.norm()), name
    assert model(*with_id((tokens, labels), 1, -100))[0].isnan()  # the usual ignore index is no label now


def test_wrong_ids_are_told_by_number_and_extremes() -> None:
    counter = IdCheck("labels", 10, ignored=-1)
    assert counter.find(torch.tensor([0, 9, -1, -1])).tolist() == [False] * 4
    assert counter.describe() is None
    assert counter.find(torch.tensor([3, 10, -2, -1])).tolist() == [False, True, True, False]
    counter.find(torch.tensor([], dtype=torch.long))
    counter.find(torch.tensor([12], dtype=torch.int32))
    assert counter.describe() == "3 labels between -2 and 12 (vocabulary 10, ignore_index -1)"
    with torch.no_grad():
        counter.find(torch.tensor([-7]))
    assert counter.describe() == "3 labels between -2 and 12 (vocabulary 10, ignore_index -1)"


# -- ranks


def refused(action: Callable[[], object]) -> tuple[str, str]:
    try:
        action()
    except IsogradError as error:
        return error.code, f"{error.what}: {error.seen}"
    return "", ""


def wrong_on_rank_1(layout: str) -> list[tuple[str, str]]:
    """What refuses a wrong label (-1), label (61), token id (-1), in a step and in evaluate(); then one good step."""
    found = []
    for which, wrong in ((1, -1), (1, VOCAB), (0, -1), (0, VOCAB + 3)):
        mesh, model = transformer(layout)
        engine = Engine(model, mesh, toys.sgd)
        data = batch(mesh.index("dp"))
        data = with_id(data, which, wrong) if mesh.index("dp") == mesh.size("dp") - 1 else data
        found.append(refused(lambda engine=engine, data=data: engine.train_step(data)))
    engine = Engine(model, mesh, toys.sgd)
    found.append(refused(lambda: engine.evaluate(data)))
    if mesh.size("pp") == 1:
        with torch.no_grad():
            model(*data)  # belongs to no step
    good = batch(mesh.index("dp"))
    found += [refused(lambda: engine.evaluate(good)), refused(lambda: engine.train_step(good))]
    return found


@pytest.mark.medium
@pytest.mark.parametrize(("layout", "named"), [("dp2 zero1", ["dp1"]), ("tp2 sp", ["tp0", "tp1"]), ("pp2", ["pp"])])
def test_a_wrong_id_is_refused_on_all_ranks_naming_the_rank_that_had_it(worlds, layout: str, named: list[str]) -> None:
    """FAILURES A5."""
    first, second = worlds(2).run(wrong_on_rank_1, layout)
    assert first == second
    assert [code for code, _ in first] == ["IG417"] * 5 + ["", ""]
    for (_, text), words in zip(first, ("label", "label", "token", "token", "token"), strict=False):
        assert words in text
        assert f"vocabulary {VOCAB}" in text
        assert all(f"{name}" in text for name in named)
        assert "dp0" not in text
    assert "such as -1" in first[0][1]
    assert f"such as {VOCAB}" in first[1][1]


class Foreign(nn.Module):
    """Nothing in it knows about tp; inputs come by position, by name and nested."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, more: dict[str, Any]) -> Tensor:
        return self.inner(x + more["y"][0]).square().mean()


def data_by_rank(model_of: str, unlike: str) -> tuple[str, str]:
    """A step of two micro-batches. `unlike`: which of the inputs goes by mesh.rank."""
    mesh = Mesh(model_of.partition(":")[2])
    whole = model_of.startswith("transformer")
    model = Transformer(CONFIG, mesh) if whole else Foreign()
    engine = Engine(model, mesh, toys.sgd)
    place = mesh.index("dp" if whole else "dp cp")
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))
    for turn in range(2):
        micro = turn
        at = {name: mesh.rank if name == unlike else place for name in ("x", "y", "labels")}
        if unlike == "later" and turn:
            at["x"] = mesh.rank
        if unlike == "order" and mesh.index("tp"):
            micro = 1 - turn
        if unlike == "evaluated":
            with torch.no_grad():
                model(x[mesh.rank], more={"y": [x[0], None, 3]})
        if whole:
            loss, weight = model(batch(at["x"])[0], batch(at["labels"] + micro)[1])
        else:
            loss, weight = model(x[at["x"] + micro], more={"y": [x[at["y"]], None, 3]}), 1
        engine.backward(loss, weight)
    return refused(engine.step)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("case", "unlike", "code"),
    [
        ("transformer:tp2", "x", "IG516"),
        ("transformer:tp2 sp", "labels", "IG516"),
        ("transformer:tp2 sp", "nothing", ""),
        ("transformer:cp2", "later", "IG516"),
        ("transformer:cp2", "nothing", ""),
        ("foreign:tp2", "x", "IG516"),
        ("foreign:tp2", "y", "IG516"),
        ("foreign:tp2", "order", "IG516"),
        ("foreign:tp2", "nothing", ""),
        ("foreign:tp2", "evaluated", ""),
        ("foreign:dp2", "x", ""),
        ("foreign:cp2", "x", ""),
    ],
)
def test_a_tp_or_cp_group_must_be_given_one_batch(worlds, case: str, unlike: str, code: str) -> None:
    """FAILURES A6: equal weights hid that ranks of a tp group, or of a cp group, trained on different contents."""
    first, second = worlds(2).run(data_by_rank, case, unlike)
    assert first == second
    assert first[0] == code
    assert not code or "[0, 1]" in first[1]


def one_group_unlike() -> tuple[str, str]:
    """Only ranks 2 and 3 differ, and their digests by little: in the last bit of one element."""
    mesh = Mesh("dp2 tp2")
    engine = Engine(Foreign(), mesh, toys.sgd)
    x = torch.ones(3)
    x[2] += torch.finfo(torch.float32).eps * (mesh.rank == 3)
    engine.backward(engine.model(x, more={"y": [x[0].clone().fill_(1)]}), weight=1)
    return refused(engine.step)


def test_ranks_of_other_tp_groups_refuse_too(worlds) -> None:
    found = worlds(4).run(one_group_unlike)
    assert found == [("IG516", found[0][1])] * 4
    assert "[2, 3]" in found[0][1]


def unlike_beside_the_batch(layout: str, what: str) -> tuple[str, str]:
    """What else tp and cp ranks must have in common: the key of dropout, the mode, the loss."""
    mesh = Mesh(layout)
    model = Transformer(replace(CONFIG, dropout=0.1), mesh, dtype=torch.float64)
    engine = Engine(model, mesh, toys.sgd)
    odd = mesh.rank == 1
    tokens, labels = batch()
    if what == "mode" and odd:
        model.eval()
    drop = {"key": key(3, int(what == "key" and odd)), "samples": torch.arange(len(tokens))}
    loss, weight = model(tokens, labels, **drop)
    engine.backward(loss * (2 if what == "loss" and odd else 1), weight)
    return refused(engine.step)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layout", "what", "code"),
    [
        ("tp2", "nothing", ""),
        ("tp2 sp", "key", "IG516"),
        ("tp2", "mode", "IG516"),
        ("tp2", "loss", "IG547"),
        ("cp2", "nothing", ""),
        ("cp2", "key", "IG516"),
        ("cp2", "mode", "IG516"),
    ],
)
def test_a_tp_or_cp_group_computes_one_thing(worlds, layout: str, what: str, code: str) -> None:
    first, second = worlds(2).run(unlike_beside_the_batch, layout, what)
    assert first == second
    assert first[0] == code
    assert not code or "[0, 1]" in first[1]


def micro_batches_of_stages() -> tuple[str, str]:
    """Under sp, what a stage is passed differs between tp ranks: it is no input."""
    mesh, model = transformer("tp2 sp pp2")
    engine = Engine(model, mesh, toys.sgd)
    good = refused(lambda: engine.train_step(batch(0, 4), 2)), refused(lambda: engine.evaluate(batch(0, 4)))
    assert good == (("", ""), ("", ""))
    tokens, labels = batch(0, 4)
    labels[0, 0] = (labels[0, 0] + mesh.index("tp")) % VOCAB
    return refused(lambda: engine.train_step((tokens, labels), 2))


def test_stages_of_a_pipeline_compare_what_they_are_given_and_not_what_they_are_passed(worlds) -> None:
    assert [code for code, _ in worlds(4).run(micro_batches_of_stages)] == ["IG516"] * 4


def test_a_model_is_watched_by_its_latest_engine_only() -> None:
    model, mesh = Foreign(), Mesh.unbound("tp2")
    InputChecks(model, mesh)
    latest = InputChecks(model, mesh)
    assert len(model._forward_pre_hooks) == 1
    model(torch.ones(3), more={"y": [torch.ones(3)]})
    assert float(latest.columns()[0]) != 0
    latest.clear()
    assert latest.columns().tolist() == [0.0, 0.0]


class Interrupted:
    """Ctrl-C comes while its attribute is set to False."""

    training = True

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if not value:
            raise KeyboardInterrupt


def test_attributes_are_as_before_when_an_interrupt_comes_while_they_are_set() -> None:
    layer, other = nn.Linear(3, 3), Interrupted()
    with pytest.raises(KeyboardInterrupt), set_attributes(layer, other, training=False):
        raise AssertionError("it was entered")
    assert layer.training and other.training
