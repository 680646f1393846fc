"""What a PipelineModule and its engine refuse, on every rank alike; layers that fail; recomputing, loaders, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isograd as ig
from isograd.comm import world
from isograd.errors import IsogradError
from isograd.integrations import deepspeed
from isograd.integrations.deepspeed.pipe import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineModule,
    PipeModelDataParallelTopology,
    RepeatingLoader,
    TiedLayerSpec,
)

from .test_deepspeed_pipe import (
    EMBED,
    IGNORED,
    SEED,
    WIDTH,
    WORDS,
    Batch,
    Head,
    batch,
    batches,
    config,
    engine_of,
    one_device,
    specs,
    weighed,
)


def told(act: Callable[[], Any]) -> str:
    """The code and what was seen; the name of another exception."""
    try:
        act()
    except IsogradError as error:
        return f"{error.code} {error.seen}"
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


def pair(out: Any = weighed, layers: list[Any] | None = None, stage: int = 0, **given: Any) -> Any:
    given = {"num_stages": 2} | given
    return engine_of(layers or specs("untied"), 2, stage, loss=out, **given)


def faulty(number: int) -> Iterator[Batch]:
    """On rank 1 the second micro-batch cannot be read."""
    yield batch(0, number)
    if world.world()[0] == 1:
        raise OSError("a file is torn")
    yield batch(0, number + 2)


def one_tuple(x: Any) -> tuple[Any]:
    return (x,)


def refused() -> dict[str, str]:
    """What is refused on every rank alike; and the step after it, which nothing is left of."""
    linear = partial(LayerSpec, nn.Linear, 4, 4)
    engine = pair(seed_layers=True, base_seed=SEED)
    rank, few = world.world()[0], 2 - world.world()[0]
    calls: dict[str, Callable[[], Any]] = {
        "raises": lambda: engine.train_batch(faulty(2)),
        "ends": lambda: engine.train_batch(iter([batch(0, n) for n in range(few)])),
        "ended": lambda: engine.train_batch(iter([])),
        "ended, evaluated": lambda: engine.eval_batch(iter([])),
        "no data": engine.train_batch,
        "loader": lambda: engine.train_batch([batch(0, 0)] * 2),
        "no pair": lambda: engine.train_batch(iter([{"x": 1}] * 2)),
        "other data": lambda: engine.train_batch(iter([batch(rank, 2), batch(0, 2)])),
        "forward": lambda: engine(batch(0, 0)[0]),
        "backward": lambda: engine.backward(torch.zeros(())),
        "step": engine.step,
        "no_sync": lambda: engine.no_sync().__enter__(),
        "logits": lambda: engine.eval_batch(iter([]), return_logits=True),
        "zero2": lambda: pair(stage=2),
        "zero3": lambda: pair(stage=3),
        "stages": lambda: pair(layers=[linear()]),
        "no parameters": lambda: pair(layers=[linear(), nn.Tanh()]),
        "trained loss": lambda: pair(out=nn.Linear(1, 1)),
        "section": lambda: deepspeed.initialize(
            model=engine.module, config=config(2) | {"pipeline": {"pipe_partitioned": True}}
        ),
        "method": lambda: pair(partition_method="profile"),
        "no such type": lambda: pair(partition_method="type:transformer"),
        "no stages": lambda: PipelineModule([linear()]),
        "ranks": lambda: pair(num_stages=3),
        "topology": lambda: pair(topology=[2, 2]),
        "tied": lambda: pair(layers=[EMBED(), TiedLayerSpec("embed", Head, WIDTH, WORDS, tied_weight_attr="training")]),
        "layout": lambda: deepspeed.initialize(model=engine.module, config=config(2), layout="zero1"),
        "autotp": lambda: deepspeed.initialize(
            model=engine.module, config=config(2) | {"tensor_parallel": {"autotp_size": 2}}
        ),
    }
    said = {what: told(call) for what, call in calls.items()}
    said["then"] = str(float(engine.train_batch(batches(engine, range(1), 2))))
    return said


REFUSED = {
    "raises": "IG868 a data iterator that raised OSError: a file is torn",
    "ends": "IG868 a data iterator that ended after 1 of 2 micro-batches of a step",
    "ended": "IG868 a data iterator that ended after 0 of 2 micro-batches of a step",
    "ended, evaluated": "IG868 a data iterator that ended after 0 of 2 micro-batches of a step",
    "no data": "IG868 a NoneType as data_iter",
    "loader": "IG868 a list as data_iter",
    "no pair": "IG868 a batch that is a dict",
    **dict.fromkeys(("forward", "backward", "step", "no_sync"), "IG868 forward, backward, step or no_sync"),
    "logits": "IG868 eval_batch of outputs",
    "zero2": "IG868 stage 2 with a PipelineModule",
    "zero3": "IG868 stage 3 with a PipelineModule",
    "stages": "IG806 2 stages (pp x vpp), 1 layers",
    "no parameters": "IG868 stages of 'parameters' that have [2, 0] trained parameters",
    "trained loss": "IG868 a loss_fn with trained parameters",
    "method": "IG868 partition_method='profile'",
    "no such type": "IG868 partition_method='type:transformer'",
    "no stages": "IG868 num_stages=None, topology=None",
    "ranks": "IG110 world of 2",
    "topology": "IG868 num_stages=2, topology=[2, 2]",
    "tied": "IG868 tied_weight_attr=['training'] of a Head",
    "layout": "IG868 layout, mpu or mesh_param with a PipelineModule",
    "autotp": "IG864 ",
    "section": "IG865 pipeline take it out of the file: PipelineModule has arguments for it",
}


def test_what_cannot_be_kept_is_refused_on_every_rank(worlds) -> None:
    first, second = worlds(2).run(refused)
    assert first.pop("other data")[:5] == second.pop("other data")[:5] == "IG804"
    assert first == second
    assert float(first.pop("then")) == pytest.approx(one_device("untied", 2, 1)["losses"][0], rel=1e-9)
    assert first.keys() == REFUSED.keys()
    for what, said in REFUSED.items():
        assert first[what].startswith(said), what


class Failing(nn.Linear):
    """Raises in its second micro-batch on the way there, or back."""

    def __init__(self, way: str) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.way, self.seen = way, 0

    def count(self, _gradient: Any = None) -> None:
        self.seen += 1
        if self.seen == 2:
            raise ValueError("this layer has had enough")

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.way == "backward":
            y.register_hook(self.count)
        else:
            self.count()
        return y


def failing(layer: int, way: str) -> str:
    """Of a layer of one stage; or a stage ends with what cannot be told from a tensor."""
    layers = specs("untied")
    layers[layer] = one_tuple if way == "tuple" else LayerSpec(Failing, way)
    engine = engine_of(layers, 3, num_stages=2, partition_method="uniform")
    return told(lambda: engine.train_batch(batches(engine, range(1), 3)))


CASE = [(5, "forward"), (6, "backward"), (3, "tuple")]


def fails_in_turn(directory: str) -> list[str]:
    """Each in a world of its own, in the same processes."""
    said, rank = [], world.world()[0]
    for number, (layer, way) in enumerate(CASE):
        world.leave()
        place = Path(directory) / str(number)
        place.mkdir(exist_ok=True)
        world.join(rank, 2, str(place))
        said.append(failing(layer, way))
    world.leave()
    return said


def test_a_layer_that_fails_takes_no_other_stage_along_into_a_hang(worlds, tmp_path: Path) -> None:
    own = worlds(2)
    first, second = own.run(fails_in_turn, str(tmp_path))
    own.close(kill=True)  # the next test gets a world that nobody has left
    assert second[:2] == ["ValueError this layer has had enough"] * 2
    assert all(said.startswith("IG805 rank 1: its pipeline failed: ValueError") for said in first[:2])
    assert first[2] == "IG868 a tuple of one tensor after layer 3, between stages"
    assert second[2].startswith("IG805 rank 0")


def test_loaders_repeat_and_topologies_are_those_of_deepspeed() -> None:
    loader = RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert ig.core.layout.Layout.parse(PipeDataParallelTopology(num_pp=2, num_dp=3)).coordinates(4) == {
        **dict.fromkeys(("cp", "tp"), 0),
        "pp": 1,
        "dp": 1,
    }
    assert ig.core.layout.Layout.parse(PipeModelDataParallelTopology(2, 4, 3)).world_size == 24


@pytest.mark.parametrize("classes", [False, True])
def test_torchs_own_loss_weighs_the_labels_that_it_counts_and_others_rows(classes: bool, capsys: Any) -> None:
    """Of another loss without a weight, this is said once."""
    weight = torch.linspace(1, 2, WORDS, dtype=torch.float64) if classes else None
    loss = nn.CrossEntropyLoss(weight, ignore_index=IGNORED)
    rows = [torch.tensor([3, 5, IGNORED]), torch.tensor([1, IGNORED, IGNORED, 16]), torch.tensor([9])]
    data = [
        (torch.linspace(-1, n, len(labels) * WIDTH).double().view(-1, WIDTH), labels) for n, labels in enumerate(rows)
    ]
    found = []
    for fn in (loss, loss.forward):
        layers = [LayerSpec(nn.Linear, WIDTH, WORDS, dtype=torch.float64)]
        engine = engine_of(layers, 3, loss=fn, topology=PipeDataParallelTopology(1, 1), seed_layers=True)
        with torch.no_grad():
            losses = torch.stack([loss(engine.module.kept["0"](x), labels) for x, labels in data])
        counts = torch.tensor([float((labels != IGNORED).sum()) for _, labels in data], dtype=torch.float64)
        if weight is not None:
            counts = torch.stack([weight[labels[labels != IGNORED]].sum() for _, labels in data])
        weights = counts if fn is loss else torch.tensor([float(len(labels)) for _, labels in data])
        found.append(float(engine.train_batch(iter(data))))
        assert found[-1] == pytest.approx(float((losses * weights).sum() / weights.sum()), rel=1e-9)
    assert found[0] != pytest.approx(found[1], rel=1e-3)
    assert capsys.readouterr().err.count("losses weigh their rows") == 1


class Seen(nn.Linear):
    """Notes in which mode each forward runs."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return super().forward(x)


@pytest.mark.parametrize(
    "interval, names, calls, forwards",
    [(0, None, 0, 1), (1, None, 3, 2), (2, None, 2, 2), (2, ["Seen"], 1, 2), (3, ["Seen", "Linear", "Tanh"], 2, 2)],
)
def test_layers_are_recomputed_by_intervals_and_only_those_that_may_be(
    interval: int, names: list[str] | None, calls: int, forwards: int
) -> None:
    """An interval without parameters is not, unless its layers are named; an evaluation recomputes nothing."""
    recomputed: list[int] = []

    def checkpoint(run: Callable[..., Any], *inputs: Tensor) -> Any:
        recomputed.append(len(inputs))
        return torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False)

    net = PipelineModule(
        [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Tanh), Seen(), Seen(), nn.Tanh()],
        num_stages=1,
        loss_fn=lambda output, labels: output.square().mean(),
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=checkpoint,
        checkpointable_layers=names,
    )
    engine, *_ = deepspeed.initialize(model=net, config=config(1))
    data = [(torch.ones(2, 4), torch.zeros(2))]
    engine.eval_batch(iter(data))
    engine.train_batch(iter(data))
    assert recomputed == [1] * calls
    assert net.kept["2"].modes == [False, *[True] * forwards]
