"""States in which gradients would be silently wrong are refused, on every rank, with a code and a remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from isograd.core.contract import Shard, declare
from isograd.core.mesh import Mesh
from isograd.engine import DataParallel, Engine, LossScale
from isograd.errors import IsogradError
from isograd.models import Transformer, preset

from . import toys


def fresh(layout: str = "dp2 zero1", **options: object) -> tuple[Mesh, toys.Toy, Engine]:
    mesh, model = Mesh(layout), toys.Toy()
    return mesh, model, Engine(model, mesh, toys.sgd, **options)  # type: ignore[arg-type]


def loss_of(model: nn.Module, rows: int = 3) -> torch.Tensor:
    x = torch.ones(rows, 13, dtype=torch.float64)
    return model(x).square().mean()  # type: ignore[no-any-return]


def step_inside_no_sync() -> None:
    _, model, engine = fresh()
    with engine.no_sync():
        engine.backward(loss_of(model), 3)
        engine.step()


def detached_loss() -> None:
    _, model, engine = fresh()
    engine.backward(loss_of(model).detach(), 3)


def vector_loss() -> None:
    _, model, engine = fresh()
    engine.backward(loss_of(model).repeat(2), 3)


def complex_loss() -> None:
    _, model, engine = fresh()
    engine.backward(loss_of(model) * (1 + 1j), 3)


def negative_weight() -> None:
    _, model, engine = fresh()
    engine.backward(loss_of(model), -1)


def weight_beyond_floats() -> None:
    _, model, engine = fresh()
    engine.backward(loss_of(model), 10**400)


def no_weight_anywhere() -> None:
    _, model, engine = fresh()
    engine.backward(loss_of(model), 0)
    engine.step()


def plain_backward() -> None:
    _, model, _ = fresh()
    loss_of(model).backward()


def unowned_parameter() -> None:
    Engine(toys.Toy(), Mesh("dp2 zero1"), lambda ps: torch.optim.SGD(ps[1:], lr=0.1))


def owned_parameter_of_another_model() -> None:
    other = nn.Parameter(torch.zeros(3))
    Engine(toys.Toy(), Mesh("dp2 zero1"), lambda ps: torch.optim.SGD([*ps, other], lr=0.1))


def group_that_matches_nothing() -> None:
    Engine(toys.Toy(), Mesh("dp2"), lambda ps: torch.optim.SGD(ps.groups({"*.bais": {}, "*": {}}), lr=0.1))


def model_cast_later() -> None:
    _, model, engine = fresh()
    model.float()
    engine.backward(loss_of(model.double()), 3)
    engine.step()


def model_frozen_later() -> None:
    _, model, engine = fresh()
    model.first.weight.requires_grad_(False)
    engine.backward(loss_of(model), 3)
    engine.step()


def everything_frozen() -> None:
    Engine(toys.Toy().requires_grad_(False), Mesh("dp2"), toys.sgd)


def different_models() -> None:
    mesh, model = Mesh("dp2"), toys.Toy()
    if mesh.rank == 1:
        model.out = nn.Linear(150, 6, dtype=torch.float64)
    Engine(model, mesh, toys.sgd)


def frozen_on_one_rank() -> None:
    mesh, model = Mesh("dp2"), toys.Toy()
    model.first.requires_grad_(mesh.rank == 0)
    Engine(model, mesh, toys.sgd)


def gradients_from_before() -> None:
    model = toys.Toy()
    loss_of(model).backward()
    Engine(model, Mesh("dp2"), toys.sgd)


def parameters_without_memory() -> None:
    Engine(toys.Toy().to("meta"), Mesh("dp2"), toys.sgd)


def unequal_tp_replicas() -> None:
    mesh, model = Mesh("tp2"), toys.Toy()
    with torch.no_grad():
        model.out.bias[2] += mesh.rank
    Engine(model, mesh, toys.sgd)


def different_batches_in_a_tp_group() -> None:
    mesh = Mesh("tp2")
    model = Transformer(preset("tiny-llama"), mesh)
    engine = Engine(model, mesh, toys.sgd)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    labels = tokens.clone()
    labels[:, : mesh.rank] = -100
    loss, count = model(tokens, labels)
    engine.backward(loss, count)
    engine.step()


def mean_over_no_label_under_cp() -> None:
    model = toys.Toy()
    engine = Engine(model, Mesh("cp2"), toys.sgd)
    x, y = toys.micro_batch(0, 3)
    engine.backward(toys.loss_of(model, x[:0], y[:0]), weight=0)


def experts_in_data_parallel() -> None:
    mesh, model = Mesh("dp2 ep2"), toys.Toy()
    shards = (Shard.even("ep", 0, 300, 2),)
    declare(model.last.weight, mesh, shape=(300, 37), shards=shards, data="edp")
    DataParallel(model)


def experts_that_owe_dp() -> None:
    mesh, model = Mesh("dp2 ep2"), toys.Toy()
    declare(model.last.weight, mesh, shape=(300, 37), shards=(Shard.even("ep", 0, 300, 2),))


def experts_that_owe_tp() -> None:
    declare(toys.Toy().last.weight, Mesh("tp2"), shape=(150, 37), partial_over=("tp",), data="edp")


def contract_replaced() -> None:
    mesh = Mesh("dp2")
    model = Transformer(preset("tiny-llama"), mesh)
    model.norm.weight = nn.Parameter(torch.ones(24))
    Engine(model, mesh, toys.sgd)


def clip_below_zero() -> None:
    fresh(clip=-1.0)


def clip_in_words() -> None:
    fresh(clip="1")


def loss_scale_as_a_number() -> None:
    fresh(loss_scale=1024)


def engine_of(mesh: Any, make: Any) -> None:
    Engine(nn.Linear(3, 3), mesh, make)


def made_optimizer() -> None:
    engine_of(Mesh("dp2"), torch.optim.SGD(nn.Linear(3, 3).parameters(), 0.1))


def layout_for_a_mesh() -> None:
    engine_of("dp2", partial(torch.optim.SGD, lr=0.1))


def function_that_makes_no_optimizer() -> None:
    engine_of(Mesh("dp2"), lambda ps: None)


def number_for_a_layout() -> None:
    Mesh(2)  # type: ignore[arg-type]


def bucket_of_no_size() -> None:
    fresh(bucket_mb=math.nan)


def bucket_below_zero() -> None:
    fresh(bucket_mb=-1)


def sums_checked_on_one_rank() -> None:
    mesh, model, engine = fresh()
    if mesh.rank:
        engine.check_sums()
    engine.backward(loss_of(model), 3)
    engine.step()


def hook_that_uses_a_withheld_gradient() -> None:
    _, model, engine = fresh()
    model.first.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    engine.backward(loss_of(model), 3)


class Returns(toys.Toy):
    """A model that returns something else than a loss with its weight."""

    found: object = None

    def forward(self, rows: torch.Tensor) -> object:
        return self.found


def trained(model: nn.Module, micro_batches: object = 1) -> None:
    Engine(model, Mesh("dp2"), toys.sgd).train_step((torch.ones(4, 2),), micro_batches)  # type: ignore[arg-type]


def model_that_returns_nothing() -> None:
    trained(Returns())


def model_that_returns_a_loss_alone() -> None:
    model = Returns()
    model.found = (torch.zeros(()),)
    trained(model)


def micro_batches_in_words() -> None:
    trained(Returns(), "2")


def clip_of_each_rank() -> None:
    fresh(clip=0.1 * (1 + Mesh("dp2").rank))


def loss_scale_on_one_rank() -> None:
    fresh(loss_scale=LossScale() if Mesh("dp2").rank else None)


def loss_scale_changed_on_one_rank() -> None:
    mesh, model, engine = fresh(loss_scale=LossScale())
    assert engine.loss_scale is not None
    engine.step_state.change(loss_scale=LossScale(engine.loss_scale.value * (1 + mesh.rank)))
    engine.backward(loss_of(model), 3)
    engine.step()


def no_weight_on_one_rank() -> None:
    mesh, model, engine = fresh()
    engine.backward(loss_of(model), 3 if mesh.rank else None)
    engine.step()


def weights_of_some_micro_batches() -> None:
    _, model, engine = fresh()
    for number in range(2):
        with engine.no_sync():
            engine.backward(loss_of(model), 3 if number else None)
    engine.step()


def trained_views_in_two_orders() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight.data = model[0].weight.data.t()
    Engine(model, Mesh("dp2 zero1"), toys.sgd)


def values_replaced_at_zero3() -> None:
    _, model, engine = fresh("dp2 zero3")
    model.last.weight.data = torch.ones_like(model.last.weight)
    engine.backward(loss_of(model), 3)


REFUSED: dict[Callable[[], None], tuple[str, str]] = {
    experts_in_data_parallel: ("IG539", "last.weight over ep"),
    experts_that_owe_dp: ("IG304", "data axes 'dp cp', cut over 'ep'"),
    experts_that_owe_tp: ("IG304", "partial over 'tp'"),
    mean_over_no_label_under_cp: ("IG524", "max(1, labels)"),
    everything_frozen: ("IG501", "no trainable parameter"),
    different_models: ("IG502", "ranks [1] disagree|ranks [0] disagree"),
    frozen_on_one_rank: ("IG502", "differ between ranks"),
    parameters_without_memory: ("IG503", "device='meta'"),
    unowned_parameter: ("IG504", "not owned: ['gain']"),
    owned_parameter_of_another_model: ("IG504", "tensors it was not given: 1"),
    group_that_matches_nothing: ("IG505", "*.bais"),
    unequal_tp_replicas: ("IG506", "out.bias"),
    gradients_from_before: ("IG507", "zero_grad"),
    plain_backward: ("IG510", "engine.backward(loss, weight=...)"),
    step_inside_no_sync: ("IG511", "move engine.step()"),
    no_weight_anywhere: ("IG512", "[0.0, 0.0]"),
    detached_loss: ("IG513", "detached"),
    vector_loss: ("IG514", "(2,)"),
    complex_loss: ("IG514", "shape (), torch.complex128"),
    negative_weight: ("IG515", "-1"),
    weight_beyond_floats: ("IG515", "1000"),
    different_batches_in_a_tp_group: ("IG516", "mesh.index('dp')"),
    model_cast_later: ("IG517", "the model was changed"),
    model_frozen_later: ("IG517", "first.weight"),
    contract_replaced: ("IG301", "norm.weight"),
    clip_below_zero: ("IG522", "clip=-1.0"),
    clip_in_words: ("IG522", "clip='1'"),
    loss_scale_as_a_number: ("IG522", "loss_scale=1024"),
    made_optimizer: ("IG500", "Engine(Linear, Mesh, SGD)"),
    layout_for_a_mesh: ("IG500", "Engine(Linear, str, partial)"),
    function_that_makes_no_optimizer: ("IG504", "not owned: ['weight', 'bias']"),
    number_for_a_layout: ("IG101", "unknown token '2'"),
    bucket_of_no_size: ("IG522", "bucket_mb=nan"),
    bucket_below_zero: ("IG522", "bucket_mb=-1"),
    sums_checked_on_one_rank: ("IG548", "check_sums() or the loss scale on ranks [1]"),
    hook_that_uses_a_withheld_gradient: ("IG517", "first.weight"),
    model_that_returns_nothing: ("IG518", "NoneType"),
    model_that_returns_a_loss_alone: ("IG518", "tuple of 1"),
    micro_batches_in_words: ("IG518", "'2'"),
    clip_of_each_rank: ("IG522", "clip is 0.1 or 0.2"),
    loss_scale_on_one_rank: ("IG522", "loss_scale is"),
    loss_scale_changed_on_one_rank: ("IG548", "the loss scale on ranks [1]"),
    no_weight_on_one_rank: ("IG535", "losses without a weight on ranks [0]; with one on ranks [1]"),
    weights_of_some_micro_batches: ("IG535", "without a weight on ranks [0, 1]; with one on ranks [0, 1]"),
    trained_views_in_two_orders: ("IG573", "['0.weight', '1.weight']"),
    values_replaced_at_zero3: ("IG517", "last.weight"),
}


def refusal_of(action: Callable[[], None]) -> tuple[str, str]:
    try:
        action()
    except IsogradError as error:
        return error.code, str(error)
    return "", "nothing was refused"


@pytest.mark.medium
@pytest.mark.parametrize("action", REFUSED, ids=lambda a: a.__name__)
def test_a_wrong_state_is_refused_on_every_rank_with_its_remedy(worlds, action: Callable[[], None]) -> None:
    code, hint = REFUSED[action]
    world = worlds(2)
    for found, text in world.run(partial(refusal_of, action)):
        assert found == code, text
        assert any(part in text for part in hint.split("|")), text


def weights_left_out(given: tuple[float | None, ...]) -> list[float]:
    """The weight of steps in which each rank gives its own."""
    mesh, model, engine = fresh()
    found = []
    for _ in range(2):
        engine.backward(loss_of(model), given[mesh.rank])
        found.append(engine.step().weight)
    return found


@pytest.mark.parametrize(("given", "weight"), [((None, None), 2.0), ((None, 0), 1.0), ((5, 0), 5.0), ((1, 2), 3.0)])
def test_a_rank_whose_loss_counts_for_nothing_says_so_beside_losses_of_any_kind(worlds, given, weight: float) -> None:
    assert worlds(2).run(weights_left_out, given) == [[weight] * 2] * 2


def replicas_after_start() -> list[float]:
    """Ranks that start from different random weights and buffers."""
    mesh = Mesh("dp2")
    torch.manual_seed(mesh.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(float(mesh.rank))
    Engine(model, mesh, toys.sgd)
    return [float(t.double().sum()) for t in (*model.parameters(), *model.buffers())]


def test_data_replicas_start_from_the_first_ones_weights_and_buffers(worlds) -> None:
    first, second = worlds(2).run(replicas_after_start)
    assert first == second
