"""The decoder: the same weights, dropout and logits under every layout; recompute and compile change nothing."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from isograd.core import rng
from isograd.core.contract import assemble
from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import ConfigError, ModelError
from isograd.models import PRESETS, Transformer, TransformerConfig, preset

LAYOUTS = ["tp2", "tp2 sp", "tp4", "tp4 sp", "dp2 tp2 sp"]


def weights(name: str, layout: str) -> dict[str, Tensor]:
    mesh = Mesh(layout)
    model = Transformer(preset(name), mesh, seed=4)
    return {r.name: assemble(r.parameter.detach(), r.contract, mesh).clone() for r in contracts(model, mesh)}


@pytest.mark.medium
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_are_the_same_bits_under_every_layout(threads, name: str, layout: str) -> None:
    expected = {n: p.detach() for n, p in Transformer(preset(name), Mesh.unbound("1"), seed=4).named_parameters()}
    ranks = Mesh.unbound(layout).layout.world_size
    for found in threads(ranks).run(weights, name, layout):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], expected[n]) for n in expected)


def dropped(layout: str) -> Tensor:
    """Which elements of the embedding's output survive: whole, of all tokens."""
    mesh = Mesh(layout)
    config = dataclasses.replace(preset("tiny-gpt2"), dropout=0.5, layers=1)
    model, seen = Transformer(config, mesh), []
    original = model.blocks[0].forward
    model.blocks[0].forward = lambda x, *rest: seen.append(x.detach()) or original(x, *rest)
    tokens = torch.arange(12).view(2, 6)
    model(tokens, tokens, key=rng.key(1), samples=torch.tensor([40, 7]))
    from isograd.comm import ops

    whole = ops.all_gather(seen[0], mesh.group("tp")) if mesh.layout.sp else seen[0]
    return whole != 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_masks_are_the_same_under_every_layout(threads, layout: str) -> None:
    expected = threads(1).run(dropped, "1")[0]
    assert 0.3 < float(expected.double().mean()) < 0.7
    for found in threads(Mesh.unbound(layout).layout.world_size).run(dropped, layout):
        assert torch.equal(found, expected)


def gradients(layout: str, name: str, how: str) -> dict[str, Tensor]:
    mesh = Mesh(layout)
    config = dataclasses.replace(preset(name), dropout=0.2 if how != "compile" else 0.0)
    model = Transformer(config, mesh, dtype=torch.float64)
    engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    model.recompute = how == "recompute"
    if how == "compile":
        assert not model.compile_blocks(backend="aot_eager")
    tokens = torch.randint(config.vocab, (2, 7), generator=torch.Generator().manual_seed(3))
    loss, count = model(tokens, tokens.roll(-1, 1), key=rng.key(0), samples=torch.arange(2))
    engine.backward(loss, weight=count)
    return {n: g.clone() for n, g in engine.grads().items()}


WAYS = ["dp2", "1", "tp2", "dp2 zero3", "tp2 sp"]
COMPILED = [pytest.param(layout, "compile", marks=pytest.mark.slow if layout in WAYS[:3] else ()) for layout in WAYS]


@pytest.mark.parametrize(("layout", "how"), [*product(WAYS, ["recompute"]), *COMPILED])
def test_recomputed_and_compiled_blocks_have_the_gradients_of_plain_ones(threads, layout: str, how: str) -> None:
    world = threads(Mesh.unbound(layout).layout.world_size)
    name = "tiny-gpt2" if how == "recompute" else "tiny-llama"
    truth = world.run(partial(gradients, layout, name, "" if how == "recompute" else "compile-not"))[0]
    if how == "compile":  # plain, with the same (absent) dropout
        truth = world.run(plain_without_dropout, layout, name)[0]
    for found in world.run(gradients, layout, name, how):
        for n, expected in truth.items():
            assert float((found[n] - expected).norm()) <= 1e-12 * max(float(expected.norm()), 1e-6), n


@pytest.mark.medium
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-gpt2"])
def test_blocks_are_compiled_without_a_graph_break_as_one_graph_for_all(name: str) -> None:
    from torch._dynamo.utils import counters

    mesh, config = Mesh("1"), preset(name)
    model = Transformer(config, mesh)
    engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    torch._dynamo.reset()
    counters.clear()
    assert not model.compile_blocks(backend="eager")
    tokens = torch.arange(14).view(2, 7)
    for _ in range(2):
        loss, count = model(tokens, tokens)
        engine.backward(loss, weight=count)
        engine.step()
    assert len(model.blocks) > 1
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.medium
def test_a_block_that_would_be_cut_to_pieces_is_left_as_it_is_and_says_why() -> None:
    config, mesh = preset("tiny-llama"), Mesh.unbound("1")
    experts = {"number": 4, "per_token": 2, "width": 8, "dense_first": 1}
    sparse = TransformerConfig.from_dict({**vars(config), "experts": experts})
    for wrong, named, reason in (
        (sparse, ["blocks.1"], "experts"),
        (dataclasses.replace(config, sliding_window=4, full_layers=(1,)), ["blocks.0"], "window"),
        (dataclasses.replace(config, dropout=0.1), ["blocks.0", "blocks.1"], "dropout"),
    ):
        left = Transformer(wrong, mesh).compile_blocks(backend="eager")
        assert list(left) == named
        assert all(reason in why for why in left.values())


def plain_without_dropout(layout: str, name: str) -> dict[str, Tensor]:
    mesh = Mesh(layout)
    model = Transformer(preset(name), mesh, dtype=torch.float64)
    engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    tokens = torch.randint(preset(name).vocab, (2, 7), generator=torch.Generator().manual_seed(3))
    loss, count = model(tokens, tokens.roll(-1, 1))
    engine.backward(loss, weight=count)
    return {n: g.clone() for n, g in engine.grads().items()}


def test_a_causal_model_does_not_see_the_future_nor_the_pads() -> None:
    model = Transformer(preset("tiny-llama"), Mesh.unbound("1"), dtype=torch.float64)
    tokens = torch.arange(10).view(1, 10)
    later = tokens.clone()
    later[:, 6:] += 3
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, :6], model(later)[:, :6])
        assert not torch.equal(model(tokens)[:, 6:], model(later)[:, 6:])


def refusals() -> list[str]:
    alone, tokens = Mesh.unbound("1"), torch.zeros(1, 40, dtype=torch.long)
    drop = Transformer(dataclasses.replace(preset("tiny-llama"), dropout=0.1), alone)
    calls = [
        lambda: Transformer(preset("tiny-llama"), Mesh.unbound("dp2 ep2")),
        lambda: Transformer(preset("tiny-llama"), Mesh.unbound("tp8")),
        lambda: Transformer(dataclasses.replace(preset("tiny-llama"), activation="silo"), alone),
        lambda: Transformer(dataclasses.replace(preset("tiny-llama"), mlp=2), Mesh.unbound("tp4")),
        lambda: Transformer(dataclasses.replace(preset("tiny-llama"), vocab=2), Mesh.unbound("tp4")),
        lambda: Transformer(preset("tiny-gpt2"), alone)(tokens),
        lambda: drop(tokens, tokens),
        lambda: drop(tokens[0]),
        lambda: TransformerConfig(vocab=0, hidden=10, layers=1, heads=3, mlp=4, norm="batch"),
        lambda: drop(tokens, tokens, key=rng.key(0), samples=None),
        lambda: Transformer("tiny-llama", alone),  # type: ignore[arg-type]
        lambda: Transformer(preset("tiny-llama"), "dp2"),  # type: ignore[arg-type]
    ]
    codes = []
    for call in calls:
        with pytest.raises((ModelError, ConfigError)) as error:
            call()
        codes.append(error.value.code)
    return codes


def test_models_that_cannot_be_are_refused_by_code() -> None:
    expected = ["IG400", "IG406", "IG403", "IG404", "IG402", "IG411", "IG413", "IG410", "IG601", "IG413"]
    expected += ["IG418", "IG418"]
    assert refusals() == expected
