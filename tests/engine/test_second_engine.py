"""A second Engine of one model: half a step that an optimizer has left in the weights, and the Engine before."""

from __future__ import annotations

import gc
import io
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import isograd as ig
from isograd.checkpoint import CheckpointManager
from isograd.comm import raw, threads, world
from isograd.core.mesh import Mesh
from isograd.engine.data_parallel import DataParallel
from isograd.launcher.launch import launch


class HalfWay(torch.optim.SGD):
    """Steps its first tensor, and raises."""

    armed = False

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if self.armed:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise MemoryError("half way")
        super().step()


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    for parameter in model.parameters():  # ranks as threads share torch's generator
        parameter.data = torch.linspace(-0.5, 0.7, parameter.numel()).double().view(parameter.shape)
    return model


def made(model: nn.Module, mesh: Mesh, **more: bool) -> ig.Engine:
    return ig.Engine(model, mesh, lambda ps: HalfWay(ps, lr=0.1), elementwise=True, **more)


def stepped(engine: ig.Engine | DataParallel, model: nn.Module) -> str:
    """One step, or what it is refused with."""
    x = torch.arange(8.0).reshape(2, 4).double() / (1 + world.world()[0])
    try:
        if isinstance(engine, DataParallel):
            engine(x).mean().backward()
        else:
            engine.backward(model(x).mean(), weight=2)
            engine.step()
    except (MemoryError, ig.IsogradError) as error:
        engine.discard()
        return str(error)
    return "stepped"


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def torn(layout: str) -> tuple[nn.Module, Mesh, ig.Engine]:
    """A model of which the last rank's optimizer has raised half way."""
    model, mesh = net(), Mesh(layout)
    engine = made(model, mesh)
    assert stepped(engine, model) == "stepped"
    engine.optimizer.armed = mesh.rank == mesh.size("world") - 1  # type: ignore[attr-defined]
    assert stepped(engine, model) != "stepped"
    return model, mesh, engine


LAYOUTS = ["dp1", "dp2", "dp2 zero1", "dp2 zero3"]


def second_engine(layout: str, way: str, folder: str) -> list[str]:
    saved = net().state_dict()
    model, mesh, first = torn(layout)
    if way == "forwards":  # at ZeRO 3 they gather parameters
        with torch.no_grad():
            model(torch.ones(1, 4).double())
    if way == "loaded in between":
        with first.full_parameters():
            model.load_state_dict(saved)
    if way == "one loaded in between":
        with first.full_parameters():
            model.load_state_dict({"0.bias": saved["0.bias"]}, strict=False)
    second = made(model, mesh, accept_weights=way == "accepted")
    if way == "a third":
        second = made(model, mesh)
    if way == "a checkpoint":
        with CheckpointManager(folder, second) as keeper:
            assert keeper.load() is not None
    said = [stepped(second, model) for _ in range(2)]
    with second.full_parameters():
        if said == ["stepped"] * 2:
            alike = raw.gather_list(torch.cat([w.flatten() for w in weights(model)]), mesh.group("world"))
            assert all(torch.equal(one, alike[0]) for one in alike)
    return said


@pytest.mark.parametrize("way", ["at once", "forwards", "one loaded in between", "a third"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_a_step_in_the_weights_is_refused_by_the_next_engine_too(layout: str, way: str) -> None:
    """It trained on, from the first rank's weights, without a word."""
    ranks = 2 if "2" in layout else 1
    for said in threads.run(second_engine, ranks, layout, way, "", timeout=30):
        for text in said:
            assert text.startswith("IG559") and f"rank {ranks - 1}: MemoryError: half way" in text, text
            assert f"{Path(__file__).name}:" in text and "accept_weights=True" in text
            assert "CheckpointManager.load" in text


def written(layout: str, folder: str) -> None:
    model, mesh = net(), Mesh(layout)
    with CheckpointManager(folder, made(model, mesh)) as keeper:
        keeper.save(1)


@pytest.mark.parametrize("way", ["loaded in between", "accepted", "a checkpoint"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_were_loaded_or_accepted_are_trained(layout: str, way: str, tmp_path: Path) -> None:
    ranks = 2 if "2" in layout else 1
    threads.run(written, ranks, layout, str(tmp_path), timeout=30)
    found = threads.run(second_engine, ranks, layout, way, str(tmp_path), timeout=30)
    assert found == [["stepped"] * 2] * ranks


def accepted_by_one() -> str:
    model, mesh, _ = torn("dp2")
    return stepped(made(model, mesh, accept_weights=mesh.rank == 0), model)


def test_weights_are_accepted_by_all_ranks_or_by_none() -> None:
    for text in threads.run(accepted_by_one, 2, timeout=30):
        assert text.startswith("IG559") and "rank 1: MemoryError: half way" in text and "rank 0: " not in text


def data_parallel() -> str:
    model, _, _ = torn("dp2")
    return stepped(DataParallel(model), model)


def test_data_parallel_refuses_them_too() -> None:
    for text in threads.run(data_parallel, 2, timeout=30):
        assert text.startswith("IG559") and "rank 1: MemoryError: half way" in text


def in_a_new_world(store: str) -> list[str]:
    """Rank 1's optimizer is interrupted in a message: connections are closed. The processes join a new world."""
    model, mesh = net(), Mesh("dp2 zero1")
    engine, said = made(model, mesh), list[str]()
    message = engine._sharded_optimizer._write_back

    def interrupted(*given: object) -> None:
        if mesh.rank == 1:
            raise KeyboardInterrupt
        message(*given)  # type: ignore[arg-type]

    engine._sharded_optimizer._write_back = interrupted  # type: ignore[method-assign, assignment]
    try:
        engine.backward(model(torch.ones(2, 4).double()).mean(), weight=2)
        engine.step()
    except (KeyboardInterrupt, ig.IsogradError) as error:
        said.append(type(error).__name__)
    world.leave()
    world.join(mesh.rank, 2, store)
    said.append(stepped(made(model, Mesh("dp2 zero1")), model))
    return said


def test_the_weights_of_an_interrupted_step_are_refused_in_a_new_world(tmp_path: Path) -> None:
    first, second = launch(in_a_new_world, 2, str(tmp_path), timeout=120)
    assert first[0] == "CommError" and second[0] == "KeyboardInterrupt"
    for text in (first[1], second[1]):
        assert text.startswith("IG559") and "rank 1: KeyboardInterrupt" in text, text


# -- the Engine before --------------------------------------------------------------------------------------------


def taken_over(layout: str, kind: str) -> list[str]:
    model, mesh = net(), Mesh(layout)
    first: ig.Engine | DataParallel = DataParallel(model) if kind == "DataParallel" else made(model, mesh)
    second = made(model, mesh)
    x, said = torch.ones(2, 4).double(), list[str]()
    for call in (
        lambda: first(x).mean().backward() if isinstance(first, DataParallel) else first.backward(model(x).mean(), 2),
        lambda: first.skip() if isinstance(first, DataParallel) else first.step(),
    ):
        try:
            call()
        except ig.IsogradError as error:
            said.append(str(error))
    second.discard()
    return [*said, stepped(second, model)]


@pytest.mark.parametrize(("layout", "kind"), [
    ("dp1", "Engine"), ("dp2 zero1", "Engine"), ("dp2 zero3", "Engine"), ("dp1", "DataParallel"),
    ("dp2", "DataParallel"),
])  # fmt: skip
def test_an_engine_whose_model_was_taken_over_says_so_with_the_line(layout: str, kind: str) -> None:
    """It said that the gradient arrived outside engine.backward, which it had been given to."""
    line = made.__code__.co_firstlineno + 1
    for *said, last in threads.run(taken_over, 2 if "2" in layout else 1, layout, kind, timeout=30):
        assert len(said) == 2 and last == "stepped"
        for text in said:
            assert text.startswith(("IG510", "IG578")) and f"{Path(__file__).name}:{line}" in text, text
        assert "taken" in said[-1]


def left(kind: str) -> list[bool]:
    """Whether a parameter, the engine and the model are there when nobody holds them any more."""

    def trained() -> list[weakref.ref[object]]:
        model = net()
        if kind == "DataParallel":
            engine: ig.Engine | DataParallel = DataParallel(model)
            model.zero_grad()
        else:
            engine = made(model, Mesh(f"dp2 {kind}"))
        assert stepped(engine, model) == "stepped"
        return [weakref.ref(one) for one in (next(model.parameters()), engine, model)]

    found = trained()
    gc.collect()
    return [one() is not None for one in found]


@pytest.mark.parametrize("kind", ["zero0", "zero1", "zero3", "DataParallel"])
def test_nothing_of_an_engine_that_nobody_holds_is_left(worlds, kind: str) -> None:
    """Hooks of parameters held the engine's step, and the step the parameters."""
    assert worlds(2).run(left, kind) == [[False] * 3] * 2


def test_a_model_that_was_saved_whole_under_an_engine_takes_another_one() -> None:
    """Its parameters come back with a list of hooks that no engine holds."""
    model, mesh, file = net(), Mesh("dp1"), io.BytesIO()
    made(model, mesh)
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert stepped(made(again, mesh), again) == "stepped"


def taken_over_mid_step(layout: str, way: str) -> float:
    """The Engine before has sent gradients of a step that it does not end. How far those of the next one are off."""
    model, mesh = net(), Mesh(layout)
    x = torch.arange(8.0).reshape(2, 4).double()
    first = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1), bucket_mb=1e-4)
    loss = model(100 * x).square().mean()
    if way == "failed on one" and mesh.rank == 1:
        loss.register_hook(fails)
    try:
        first.backward(loss, weight=2)
    except (MemoryError, ig.IsogradError):  # the latter at ZeRO 3, where ranks wait for each other in a backward
        assert way == "failed on one"
    second = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    second.backward(model(x).square().mean(), weight=2)  # the same rows on all ranks
    alone = net()
    alone(x).square().mean().backward()
    right = {name: parameter.grad for name, parameter in alone.named_parameters()}
    worst = max(float((g - right[name]).abs().max()) for name, g in second.grads().items())
    second.step()
    return worst


def fails(_: torch.Tensor) -> None:
    raise MemoryError("in backward")


@pytest.mark.parametrize("way", ["fine", "failed on one"])
@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1", "dp2 zero3"])
def test_the_messages_of_a_step_that_was_left_do_not_meet_those_of_the_next_engine(layout: str, way: str) -> None:
    """All ranks waited for ever: the new Engine's buckets met those that the Engine before had sent."""
    for worst in threads.run(taken_over_mid_step, 2, layout, way, timeout=20):
        assert worst < 1e-12
