"""A loop of Fabric with our strategy, against one device on all micro-batches of a step; resumed; and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isograd as ig
from isograd.comm import world
from isograd.comm.device import device

from .worlds import as_lightning_finds_it

fabrics = pytest.importorskip("lightning.fabric")
assert ig.integrations.FabricStrategy  # registers the name
pytestmark = pytest.mark.medium
IGNORED, CLASSES, MICROS, STEPS = -100, 5, 4, 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()


def micro(step: int, number: int) -> tuple[Tensor, Tensor]:
    """Rows and labels, uneven; the first micro-batch of a step has no label."""
    generator = torch.Generator().manual_seed(10 * step + number)
    rows = 1 + (step + 2 * number) % 4
    labels = torch.randint(CLASSES, (rows, 3), generator=generator)
    labels[torch.rand(rows, 3, generator=generator) < 0.4] = IGNORED
    values = torch.randn(rows, 3, 6, generator=generator, dtype=torch.float64)
    return values, labels if number else labels.fill_(IGNORED)


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def made(layout: str | None, **given: Any) -> tuple[Any, Any, Any, Any]:
    with as_lightning_finds_it() as (_, ranks):
        strategy = ig.integrations.FabricStrategy(layout) if layout else "isograd"
        fabric = fabrics.Fabric(accelerator=device().type, devices=ranks, strategy=strategy, **given)
        fabric.launch()
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        plan = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return fabric, *fabric.setup(model, optimizer), plan


def train(made: tuple[Any, Any, Any, Any], weighed: bool, steps: range) -> list[float]:
    """The loop of Fabric's documentation. The norms that clip_gradients gave."""
    fabric, model, optimizer, plan = made
    rank, ranks = world.world()
    norms = []
    for step in steps:
        for number in range(rank, MICROS, ranks):
            rows, labels = (t.to(device()) for t in micro(step, number))
            with fabric.no_backward_sync(model, enabled=number + ranks < MICROS):
                if weighed:
                    fabric.backward(mean(model(rows), labels), weight=(labels != IGNORED).sum())
                else:
                    fabric.backward(model(rows).square().mean())
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
        plan.step()
        norms.append(float(norm))
    return norms


def ours(layouts: list[str | None]) -> list[Any]:
    found = []
    for layout in layouts:
        for weighed in (True, False):
            parts = made(layout)
            norms = train(parts, weighed, range(STEPS))
            found.append((norms, parts[0].strategy.get_module_state_dict(parts[1].module)))
    return found


def one_device(weighed: bool) -> tuple[list[float], dict[str, Tensor]]:
    model, norms = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    plan = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(STEPS):
        micros = [micro(step, number) for number in range(MICROS)]
        rows, labels = torch.cat([m[0] for m in micros]), torch.cat([m[1] for m in micros])
        (mean(model(rows), labels) if weighed else model(rows).square().mean()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        plan.step()
    return norms, model.state_dict()


def is_equal(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    for name, value in expected[1].items():
        assert torch.allclose(found[1][name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("ranks, layouts", [(1, ["zero1"]), (2, [None, "zero1", "dp2 zero3"]), (4, ["zero2"])])
def test_a_loop_of_fabric_trains_as_one_device_on_uneven_micro_batches(worlds, ranks: int, layouts: list[Any]) -> None:
    expected = [one_device(weighed) for weighed in (True, False)]
    for each in [ours(layouts)] if ranks == 1 else worlds(ranks).run(ours, layouts):
        assert len(each) == 2 * len(layouts)
        for place, found in enumerate(each):
            is_equal(found, expected[place % 2])


def saved(folder: str) -> list[Any]:
    """Cut after step 2 at zero1, resumed at zero3; and what is refused."""
    parts = made("zero1")
    fabric, model, optimizer, plan = parts
    norms = train(parts, True, range(2))
    fabric.save(f"{folder}/cut.ckpt", {"model": model, "optimizer": optimizer, "plan": plan, "step": 2})
    parts = made("zero3")
    fabric, model, optimizer, plan = parts
    state = {"model": model, "optimizer": optimizer, "plan": plan, "step": 0}
    left = fabric.load(f"{folder}/cut.ckpt", state)
    norms += train(parts, True, range(state["step"], STEPS))
    seen: list[Any] = [(norms, fabric.strategy.get_module_state_dict(model.module)), left]
    fabric.barrier()
    if fabric.is_global_zero:
        shutil.rmtree(f"{folder}/cut.ckpt.isograd")
    fabric.barrier()
    rows = micro(0, 1)[0].to(device())
    for act in (
        lambda: fabric.load(f"{folder}/cut.ckpt", state),
        lambda: fabric.clip_gradients(model, optimizer, clip_val=1.0),
        lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1),
        lambda: fabric.setup_optimizers(torch.optim.SGD(net().parameters(), lr=1.0)),
        lambda: fabric.setup(nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=1.0)),
        lambda: fabric.backward(model(rows).mean(), retain_graph=True),
        lambda: ig.integrations.FabricStrategy(find_unused_parameters=True).setup_optimizer(optimizer),
        lambda: made("dp1 pp2"),
    ):
        try:
            act()
        except ig.IsogradError as error:
            seen.append(error.code)
    before = fabric.strategy.get_module_state_dict(model.module)
    fabric.backward(model(rows).mean() * float("nan"), weight=1)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    try:
        optimizer.step()
    except ig.IsogradError as error:
        seen.append(error.code)
    after = fabric.strategy.get_module_state_dict(model.module)
    return [*seen, all(torch.equal(value, before[name]) for name, value in after.items())]


def test_a_loop_that_is_resumed_at_another_stage_ends_as_one_without_a_cut(worlds, tmp_path: Path) -> None:
    expected = one_device(True)
    for found, left, *codes, kept in worlds(2).run(saved, str(tmp_path)):
        is_equal(found, expected)
        assert left == {}
        assert codes == ["IG867", "IG866", "IG866", "IG866", "IG866", "IG866", "IG856", "IG855", "IG869"]
        assert kept


def weights_after(pattern: str) -> list[float]:
    """SGD of one rank: b(ackward), c(lip to 1e-3), z(ero_grad), s(tep)."""
    fabric = fabrics.Fabric(accelerator="cpu", devices=1, strategy=ig.integrations.FabricStrategy())
    fabric.launch()
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    values, _ = micro(0, 1)
    for kind in pattern:
        if kind == "b":
            fabric.backward(model(values).square().mean(), weight=1)
        elif kind == "c":
            fabric.clip_gradients(model, optimizer, max_norm=1e-3)
        elif kind == "z":
            optimizer.zero_grad()
        else:
            optimizer.step()
    return [float(p.detach().double().sum()) for p in model.parameters()]


def test_clipping_ends_with_the_gradients_it_was_asked_for() -> None:
    with as_lightning_finds_it():
        assert weights_after("bczbs") == weights_after("bs")
        assert weights_after("bcs") != weights_after("bs")
        assert weights_after("bszbs") == weights_after("bsbs"), "a step leaves no gradients"


def test_a_hook_that_reads_gradients_is_refused_and_told_to_look_with_the_engine() -> None:
    with as_lightning_finds_it():
        fabric = fabrics.Fabric(accelerator="cpu", devices=1, strategy=ig.integrations.FabricStrategy())
        fabric.launch()
        model = net()
        model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        fabric.backward(model(micro(0, 1)[0]).sum(), weight=1)
        with pytest.raises(ig.IsogradError, match=r"IG551(.|\n)*engine.grads\(\) to look"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert fabric.strategy.engine.grads().keys() == dict(net().named_parameters()).keys()


def test_of_several_models_each_has_its_own_engine() -> None:
    with as_lightning_finds_it():
        fabric = fabrics.Fabric(accelerator="cpu", devices=1, strategy=ig.integrations.FabricStrategy("zero1"))
        fabric.launch()
        pairs = [fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (net(), net())]
        values, _ = micro(0, 1)
        with pytest.raises(ig.IsogradError, match=r"IG866(.|\n)*model=model"):
            fabric.backward(pairs[0][0](values).square().mean(), weight=1)
        for model, optimizer in pairs[:1]:
            fabric.backward(model(values).square().mean(), model=model, weight=2)
            optimizer.step()
    one = net()
    one(values).square().mean().backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    for (name, value), found, untouched in zip(
        one.state_dict().items(), pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True
    ):
        assert torch.allclose(found, value, rtol=1e-9, atol=1e-12), name
        assert torch.equal(untouched, net().state_dict()[name]), name
    with pytest.raises(ig.IsogradError, match="IG853"):
        pairs[0][1].state_dict()
