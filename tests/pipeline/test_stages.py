"""Any list of modules as a pipeline: ties, tuples and frozen parts train as they do on one device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from isograd.core.contract_table import contracts
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine.zero import Shards
from isograd.errors import PipelineError
from isograd.pipeline import Stages
from tests.sizes import sized

from . import toys
from .test_refusals import LIMIT, batch, engine_of

LAYOUTS = (
    "pp2",
    "pp2 gpipe",
    "pp2 zb zero1",
    "pp3 zero2",
    "pp2 vpp2",
    "dp2 pp2 zb zero3",
    "dp2 pp3 zero1",
    "pp2 vpp2 zb",
)


MODELS = (toys.plain, toys.tied, toys.half_used, toys.tuples, toys.partly_frozen)
GRID = list(product(LAYOUTS, MODELS, (2, 6)))


def settings(case: tuple[Any, ...]) -> tuple[Hashable, ...]:
    """The values of a case of which any two meet in `make test`."""
    layout, *rest = case
    sizes = Layout.parse(layout)
    return (sizes.dp, sizes.pp, sizes.vpp, sizes.schedule, sizes.zero, *rest)


def quick(case: tuple[Any, ...]) -> bool:
    """The cases of `make test-fast`."""
    return case[0] in ("pp2", "pp2 zb zero1") and case[2] == 2


@pytest.mark.parametrize(
    ("layout", "make", "micro_batches"),
    sized(GRID, settings, quick),
    ids=[f"{layout}-{make.__name__}-{micro_batches}" for layout, make, micro_batches in GRID],
)
def test_stages_train_as_one_device_does(worlds, layout: str, make: toys.Make, micro_batches: int) -> None:
    found = worlds(Layout.parse(layout).world_size).run(partial(toys.train, layout, make, micro_batches))
    assert not toys.differences(found, toys.one_device(make, micro_batches))


@pytest.mark.parametrize("layout", ["pp2", "pp2 zb zero1"])
def test_asking_for_other_gradients_hooks_and_weights_of_other_classes_are_left_to_autograd(
    worlds, layout: str
) -> None:
    found = worlds(2).run(partial(toys.train, layout, toys.special_linears, 4, clip=1e9))
    truth = toys.by_micro_batch(toys.special_linears, 4)
    for name, gradient in truth.items():
        assert float((found[0].gradients[0][name] - gradient).norm()) <= 1e-9 * float(gradient.norm()), name


@pytest.mark.parametrize("layout", ["pp2 zero3", "pp2 zb zero3"])
def test_a_loss_of_nothing_that_is_nan_reaches_no_earlier_stage(worlds, layout: str) -> None:
    found = worlds(2).run(partial(toys.masked, layout))
    truth = toys.by_micro_batch(toys.plain, 2)
    for name, gradient in truth.items():
        assert float((found[0][name] - gradient).norm()) <= 1e-9 * float(gradient.norm()), name


@pytest.mark.medium
@pytest.mark.parametrize("split", [(1, 6, 1), (4, 3, 1), (1, 1, 6)])
def test_a_users_own_split_changes_no_gradient(worlds, split: tuple[int, ...]) -> None:
    found = worlds(3).run(partial(toys.train, "pp3 zero1", toys.tied, 4, split=split))
    assert not toys.differences(found, toys.one_device(toys.tied, 4))


def test_on_one_device_stages_are_the_modules_in_turn() -> None:
    model = Stages(toys.plain(), Mesh.unbound("1"), loss=toys.loss_of)
    x, y = (t.float() for t in toys.micro_batch(0, 0))
    loss, weight = model(x, y)
    assert weight == len(x)
    assert torch.equal(loss, toys.loss_of(nn.Sequential(*toys.plain())(x), (x, y))[0])


def holds(make: toys.Make, layout: str, rank: int, **options: object) -> Stages:
    return Stages(make(), Mesh.unbound(layout, rank), loss=toys.loss_of, **options)  # type: ignore[arg-type]


def test_a_tie_is_one_parameter_under_its_first_name_and_owes_the_stages_that_use_it() -> None:
    owing = []
    for rank in range(4):
        model = holds(toys.tied, "pp4", rank, split=(2, 1, 3, 2))
        table = contracts(model, model.mesh)
        owing.append({r.name: r.contract.partial_over for r in table if r.contract.partial_over})
        assert sum(p.numel() for p in model.parameters() if p.shape == (8, 8)) == (0 if rank == 1 else 64)
    tie = {"kept.1.weight": ("pp:0+2+3",)}
    assert owing == [tie, {}, tie, tie]


def test_a_tie_inside_one_rank_owes_nothing() -> None:
    model = holds(toys.tied, "pp2", 0, split=(7, 1))
    assert not [r for r in contracts(model, model.mesh) if r.contract.partial_over]
    assert model.get_parameter("kept.1.weight") is model.get_parameter("kept.6.weight")


def test_each_rank_keeps_its_own_modules_only() -> None:
    names = [{n.split(".")[1] for n, _ in holds(toys.plain, "pp2 vpp2", r).named_parameters()} for r in (0, 1)]
    assert names[0] | names[1] == {"0", "1", "2", "3", "4"}
    assert not names[0] & names[1]


def made_by_functions() -> list[object]:
    """As `tied`, but each module is made where it lives, from its own seed."""

    def seeded(seed: int, make: type[nn.Module], *args: int) -> nn.Module:
        torch.manual_seed(seed)
        return make(*args)

    def use() -> nn.Module:
        torch.manual_seed(7)
        return toys.Use(nn.Parameter(torch.randn(8, 8) / 3))

    linear = partial(seeded, 1, nn.Linear, 5, 8)
    return [linear, use, partial(toys.block, 1), use, partial(toys.block, 2), use, partial(seeded, 2, nn.Linear, 8, 3)]


TIES = {"3.weight": "1.weight", "5.weight": "1.weight"}


def trained_on_one_device() -> toys.Outcome:
    modules = [make() for make in made_by_functions()]
    for later, name in TIES.items():
        modules[int(later[0])].weight = modules[int(name[0])].weight
    return toys.one_device(lambda: modules, 4)


@pytest.mark.parametrize("layout", ["pp3 zero1", "pp2 vpp2", "dp2 pp2 zb zero2"])
def test_modules_made_where_they_live_are_tied_by_name(worlds, layout: str) -> None:
    world = worlds(Layout.parse(layout).world_size)
    found = world.run(partial(toys.train, layout, made_by_functions, 4, ties=TIES))
    assert not toys.differences(found, trained_on_one_device())


def modules_made(layout: str) -> list[int]:
    made: list[int] = []

    def make(number: int) -> nn.Module:
        made.append(number)
        return nn.Linear(8, 8)

    Stages([partial(make, n) for n in range(6)], Mesh(layout), loss=toys.loss_of)
    return made


def test_functions_are_called_only_where_their_module_lives(worlds) -> None:
    assert worlds(3).run(modules_made, "pp3") == [[0, 1], [2, 3], [4, 5]]


def test_a_model_cut_into_stages_is_not_called() -> None:
    with pytest.raises(PipelineError) as error:
        holds(toys.plain, "pp2", 1)(torch.zeros(1, 5), torch.zeros(1, 3))
    assert error.value.code == "IG808"
    assert "rank 1 (pp1)" in str(error.value)


def test_measured_costs_balance_the_stages() -> None:
    model = holds(toys.plain, "pp2", 0, costs=[9, 1, 1, 1, 1])
    assert [len(part) for part in model.parts] == [1, 4]


# -- parameter groups, of which a stage may lack some


def layer_by_layer(ps: Shards) -> torch.optim.Optimizer:
    """A group for each parameter, with a rate of its own: no stage has a group of another one."""
    return torch.optim.SGD([{"params": [p], "lr": 0.1 / (len(n) + int(n.split(".")[1]))} for n, p in ps.named()])


def named_groups(ps: Shards) -> torch.optim.Optimizer:
    """Equal at the start; the rate of each layer goes its own way."""
    return torch.optim.SGD([{"params": [p], "name": n} for n, p in ps.named()], lr=0.1)


def steps_of(make: Callable[..., Any], schedule: str, layout: str, frozen: bool) -> float:
    modules = toys.plain()
    modules[0].requires_grad_(not frozen)
    engine = engine_of(layout, modules, optimizer=make)
    groups = engine.optimizer.param_groups
    scheduler = torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, [g["lr"] for g in groups], 4)
    for step in range(3):
        loss = engine.train_step(batch(seed=step), micro_batches=2).loss
        if schedule == "torch":
            scheduler.step()
        for group in groups if schedule == "each its own" else ():
            group["lr"] *= 1 / (1 + int(group["name"].split(".")[1]))
        if schedule == "by hand":
            engine.clip = 2.0
            for group in groups:
                group["lr"] = 0.3 * group["initial_lr"]
    return loss


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (toys.with_groups, "torch"),
        (layer_by_layer, "torch"),
        (toys.with_groups, "by hand"),
        (named_groups, "each its own"),
    ],
)
@pytest.mark.parametrize(("layout", "frozen"), [("pp2", False), ("pp2 zero1", True), ("pp2 vpp2 zb", False)])
def test_stages_may_have_groups_of_their_own(
    worlds, make: Callable[..., Any], schedule: str, layout: str, frozen: bool
) -> None:
    first, second = worlds(2).run(steps_of, make, schedule, layout, frozen, timeout=LIMIT)
    assert first == second
