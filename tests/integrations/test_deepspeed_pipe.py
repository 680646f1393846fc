"""DeepSpeed's PipelineModule on our stages: gradients by name, in fp64, those of its layers in turn on one device."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isograd as ig
from isograd.comm import world
from isograd.integrations import deepspeed
from isograd.integrations.deepspeed.pipe import (
    LayerSpec,
    PipelineModule,
    TiedLayerSpec,
)

WORDS, WIDTH, LENGTH, IGNORED, SEED, STEPS = 17, 8, 5, -100, 70, 2
Batch = tuple[Any, Tensor]


class Block(nn.Module):
    """Is given, and passes on, hidden states and the words that they are of, which carry no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 11).double(), nn.Linear(11, width).double()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, words = inputs
        return hidden + torch.tanh(self.down(torch.tanh(self.up(hidden)))) * (words % 3).unsqueeze(-1), words


class Head(nn.Module):
    """Of another class than the embedding, whose weight it has."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(words, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(words, width, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


def both(embedding: nn.Module, words: Tensor) -> tuple[Tensor, Tensor]:
    return embedding(words), words


def logits(embedding: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden, embedding.weight)


def hidden_of(inputs: tuple[Tensor, Tensor]) -> Tensor:
    return inputs[0]


EMBED = partial(TiedLayerSpec, "embed", nn.Embedding, WORDS, WIDTH, dtype=torch.float64)


def specs(kind: str) -> list[Any]:
    """untied: a head of its own. tied: the embedding again. typed: a head of another class, which has its weight."""
    last: dict[str, Any] = {
        "untied": LayerSpec(nn.Linear, WIDTH, WORDS, dtype=torch.float64),
        "tied": EMBED(forward_fn=logits),
        "typed": TiedLayerSpec("embed", Head, WIDTH, WORDS),
    }
    blocks = [LayerSpec(Block, WIDTH) for _ in range(3)]
    relu = LayerSpec(nn.ReLU, inplace=True)  # in place: may be the first layer of a stage
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)
    return [EMBED(forward_fn=both), *blocks, hidden_of, relu, linear, last[kind]]


def weighed(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the labels of a micro-batch, of which one has none, and their number."""
    found = F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    return found, (labels != IGNORED).sum()


def batch(step: int, number: int) -> Batch:
    """Of uneven rows and labels."""
    generator = torch.Generator().manual_seed(10 * step + number)
    words = torch.randint(WORDS, (1 + (step + 2 * number) % 4, LENGTH), generator=generator)
    labels = torch.randint(WORDS, words.shape, generator=generator)
    hidden = torch.rand(words.shape, generator=generator) < (1.0 if number == 1 else 0.4)
    return words, labels.masked_fill(hidden, IGNORED)


def config(accumulation: int, stage: int = 0) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.02, "warmup_max_lr": 0.05, "warmup_num_steps": 3},
        },
        "zero_optimization": {"stage": stage},
    }


def engine_of(layers: list[Any], accumulation: int, stage: int = 0, loss: Any = weighed, **given: Any) -> Any:
    net = PipelineModule(layers, loss_fn=loss, **given)
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config(accumulation, stage))[0]


def batches(engine: Any, steps: range, accumulation: int) -> Iterator[Batch]:
    """Those of this data rank."""
    first = engine.mesh.index("dp") * accumulation
    return iter([batch(step, first + number) for step in steps for number in range(accumulation)])


def named(engine: Any) -> dict[str, Tensor]:
    return {name.removeprefix("kept."): g.clone() for name, g in engine.engine.grads().items()}


Found = dict[str, Any]


def trained(kind: str, stages: int, stage: int, accumulation: int, more: dict[str, Any]) -> Found:
    """Gradients of the first step, and what train_batch and eval_batch said in all."""
    engine = engine_of(specs(kind), accumulation, stage, num_stages=stages, seed_layers=True, base_seed=SEED, **more)
    engine.engine.accumulate(engine._micros(batches(engine, range(1), accumulation), accumulation))
    found: Found = {"gradients": named(engine), "losses": [], "evaluated": []}
    engine.engine.discard()
    source = batches(engine, range(STEPS), accumulation)
    for step in range(STEPS):
        found["evaluated"].append(float(engine.eval_batch(batches(engine, range(step, step + 1), accumulation))))
        found["losses"].append(float(engine.train_batch(source)))
    found |= {"norm": engine.get_global_grad_norm(), "lr": engine.get_lr(), "steps": engine.global_steps}
    found |= {"state": engine.module_state_dict(), "ends": (engine.is_first_stage(), engine.is_last_stage())}
    assert all(
        torch.equal(p, found["state"][name]) for name, p in engine.module.named_parameters()
    )  # copies of a tie, too
    return found


def built(number: int, spec: Any) -> Any:
    torch.manual_seed(SEED + number)
    return spec.build() if isinstance(spec, LayerSpec) else spec


def one_device(kind: str, micros: int, steps: int = STEPS) -> Found:
    """The layers in turn in plain torch: one embedding, used twice."""
    given = specs(kind)
    layers = [built(number, spec) for number, spec in enumerate(given)]
    if kind == "tied":
        layers[-1] = layers[0]
    elif kind == "typed":
        layers[-1].weight = layers[0].weight
    named_ones = {
        f"{n}.{name}": p
        for n, layer in enumerate(layers)
        if isinstance(layer, nn.Module)
        for name, p in layer.named_parameters()
    }
    parameters = {name: p for name, p in named_ones.items() if name in dict(unique(named_ones))}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.05, weight_decay=0.1)
    plan = ig.integrations.deepspeed.settings.read(config(1), 1).schedule
    assert plan is not None
    scheduler, found = plan(optimizer), dict[str, Any](losses=[])
    first = {name: p.detach().clone() for name, p in parameters.items()}
    for step in range(steps):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for words, labels in (batch(step, number) for number in range(micros)):
            x: Any = words
            for spec, layer in zip(given, layers, strict=True):
                act = getattr(spec, "forward_fn", None)
                x = act(layer, x) if act else layer(x)
            if (labels != IGNORED).any():
                total = total + F.cross_entropy(
                    x.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
                )
                count += int((labels != IGNORED).sum())
        (total / count).backward()
        found.setdefault("gradients", {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        found["losses"].append(float(total.detach()) / count)
        found["norm"] = float(nn.utils.clip_grad_norm_(parameters.values(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found["lr"] = scheduler.get_last_lr()
    state = {name: p.detach().clone() for name, p in parameters.items()}
    assert not any(torch.equal(value, first[name]) for name, value in state.items())  # the steps have a rate
    return found | {"state": state}


def unique(parameters: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    seen: dict[int, str] = {}
    return [(name, p) for name, p in parameters.items() if seen.setdefault(id(p), name) == name]


def is_equal(found: Found, expected: Found) -> None:
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert float((found["gradients"][name] - gradient).norm()) <= 1e-9 * float(gradient.norm()), name
    assert [found["losses"], found["evaluated"]] == [pytest.approx(expected["losses"], rel=1e-9)] * 2
    assert [found["norm"], *found["lr"]] == pytest.approx([expected["norm"], *expected["lr"]], rel=1e-9)
    for name, value in expected["state"].items():
        assert torch.allclose(found["state"][f"kept.{name}"], value, rtol=1e-9, atol=1e-12), name


CASES = [
    (1, [("tied", 1, 1, 3, {})]),
    (
        2,
        [
            ("tied", 2, 1, 3, {}),
            ("untied", 2, 0, 1, {}),
            ("typed", 2, 1, 3, {"partition_method": "uniform"}),
            ("tied", 2, 0, 3, {"activation_checkpoint_interval": 2}),
            ("typed", 1, 1, 1, {}),
            ("tied", 2, 1, 3, {"topology": "pp2 zb zero1"}),
            ("tied", 2, 0, 3, {"topology": "pp2 vpp2"}),
        ],
    ),
    (
        4,
        [
            ("tied", 2, 1, 3, {}),
            ("tied", 2, 0, 1, {}),
            ("tied", 4, 0, 3, {"partition_method": "type:block|emb|lin"}),
            ("typed", 4, 1, 3, {}),
        ],
    ),
]


@pytest.mark.parametrize("ranks, cases", CASES, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_train_batch_has_the_gradients_of_one_device(worlds, ranks: int, cases: list[Any]) -> None:
    for kind, stages, stage, accumulation, more in cases:
        expected = one_device(kind, ranks // stages * accumulation)
        act = partial(trained, kind, stages, stage, accumulation, more)
        every = [act()] if ranks == 1 else worlds(ranks).run(act)
        for rank, found in enumerate(every):
            here = found["gradients"].keys()
            is_equal(
                found | {"gradients": {**every[0]["gradients"], **found["gradients"]}} if here else found, expected
            )
            assert found["ends"] == (rank < ranks // stages, rank >= ranks - ranks // stages)
            assert found["steps"] == STEPS


def resumed(folder: str) -> Found:
    """A step of four ranks under each of three layouts, each of which goes on from the one before."""
    found: Found = {"losses": []}
    for step, (stages, stage, accumulation) in enumerate([(2, 1, 3), (4, 0, 6), (1, 1, 2)]):
        # seeds are given at the beginning alone: what is loaded does not begin with the same weights
        engine = engine_of(specs("tied"), accumulation, stage, num_stages=stages, seed_layers=not step, base_seed=SEED)
        if step:
            place, state = engine.load_checkpoint(folder)
            assert (Path(place).name, state, engine.global_steps) == (f"global_step{step}", {"epoch": step - 1}, step)
        if step == 2:  # the micro-batches are four ranks' two, of which there are six: two ranks have none in the last
            source = iter([batch(2, n) for n in (range(engine.mesh.rank, 6, 4))] + [empty()])
        else:
            source = batches(engine, range(step, step + 1), accumulation)
        found["losses"].append(float(engine.train_batch(source)))
        engine.save_checkpoint(folder, client_state={"epoch": step})
    other = engine_of(specs("tied"), 1, num_stages=2)
    other.load_checkpoint(folder, load_module_only=True)
    whole, found["state"] = other.module_state_dict(), engine.module_state_dict()
    assert other.global_steps == 0
    assert all(torch.equal(value, whole[name]) for name, value in found["state"].items() if name in whole)
    return found | {"evaluated": found["losses"], "norm": engine.get_global_grad_norm(), "lr": engine.get_lr()}


def empty() -> Batch:
    """A row without a label."""
    return torch.zeros(1, LENGTH, dtype=torch.long), torch.full((1, LENGTH), IGNORED)


def test_a_checkpoint_resumes_under_another_number_of_stages(worlds, tmp_path: Path) -> None:
    expected = one_device("tied", 6, 3)
    for found in worlds(4).run(resumed, str(tmp_path)):
        is_equal(found | {"gradients": expected["gradients"]}, expected)


def first_weights(stages: int) -> dict[str, Tensor]:
    torch.manual_seed(3 + world.world()[0])
    net = PipelineModule(specs("typed"), num_stages=stages, loss_fn=weighed)
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def test_every_layout_begins_with_the_same_weights_of_the_first_ranks_seed(worlds) -> None:
    """No layer is built alike by chance: their seeds differ, and those of the ranks do."""
    expected = first_weights(1)
    assert not torch.equal(expected["kept.1.up.weight"], expected["kept.2.up.weight"])
    for ranks, stages in ((2, 2), (4, 2), (4, 4)):
        found: dict[str, Tensor] = {}
        for one in worlds(ranks).run(first_weights, stages):
            assert all(torch.equal(expected[name], value) for name, value in one.items())
            found |= one
        assert found.keys() == expected.keys()


BUILT: list[int] = []


class Counted(nn.Linear):
    """Notes where it is built with memory."""

    def __init__(self, number: int) -> None:
        super().__init__(4, 4)
        if not self.weight.is_meta:
            BUILT.append(number)


def built_here() -> list[int]:
    BUILT.clear()
    PipelineModule([LayerSpec(Counted, n) for n in range(6)], num_stages=2, loss_fn=weighed)
    return [*BUILT]


def test_a_layer_is_built_where_it_is_held(worlds) -> None:
    assert worlds(2).run(built_here) == [[0, 1, 2], [3, 4, 5]]


def cut_layers(mesh: ig.Mesh) -> list[LayerSpec]:
    """Two that are cut over tp, which are given a mesh; and two that are not."""
    key = ig.core.rng.Key(5)
    mlps = [LayerSpec(ig.nn.MLP, WIDTH, 12, mesh, key=key.fold(n), std=0.5, dtype=torch.float64) for n in range(2)]
    linear = LayerSpec(nn.Linear, WIDTH, WORDS, dtype=torch.float64)
    return [LayerSpec(nn.Embedding, WORDS, WIDTH, dtype=torch.float64), *mlps, linear]


def cut(stage: int, folder: str) -> list[Found]:
    """A step under each of three layouts, each of which goes on from the one before."""
    found: list[Found] = []
    for step, (layout, micros) in enumerate([("tp2 pp2", 6), ("dp2 tp2", 3), ("tp4", 6)]):
        mesh = ig.Mesh(layout)
        engine = engine_of(cut_layers(mesh), micros, stage, topology=mesh, seed_layers=not step, base_seed=SEED)
        if step:
            engine.load_checkpoint(folder)
        engine.engine.accumulate(engine._micros(batches(engine, range(step, step + 1), micros), micros))
        found.append({"gradients": named(engine)})
        engine.engine.discard()
        found[-1]["loss"] = float(engine.train_batch(batches(engine, range(step, step + 1), micros)))
        engine.save_checkpoint(folder)
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_layers_that_are_cut_over_tp_are_given_a_mesh(worlds, stage: int, tmp_path: Path) -> None:
    """Gradients are those of plain autograd, also of a run that goes on under another layout; its last checkpoint is
    loaded by one device."""
    layers = [built(number, spec) for number, spec in enumerate(cut_layers(ig.Mesh("1")))]
    parameters = {f"{n}.{name}": p for n, layer in enumerate(layers) for name, p in layer.named_parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.05, weight_decay=0.1)
    plan = ig.integrations.deepspeed.settings.read(config(1), 1).schedule
    assert plan is not None
    rates, every = plan(optimizer), worlds(4).run(cut, stage, str(tmp_path))
    for step, ranks in enumerate(zip(*every, strict=True)):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for words, labels in (batch(step, number) for number in range(6)):
            output = nn.Sequential(*layers)(words).flatten(0, 1)
            total = total + F.cross_entropy(output, labels.flatten(), ignore_index=IGNORED, reduction="sum")
            count += int((labels != IGNORED).sum())
        (total / count).backward()
        for found in ranks:
            assert found["loss"] == pytest.approx(float(total.detach()) / count, rel=1e-9)
            assert found["gradients"].keys() == parameters.keys()
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                error = float((found["gradients"][name] - parameter.grad).norm())
                assert error <= 1e-9 * float(parameter.grad.norm()), (step, name)
        nn.utils.clip_grad_norm_(parameters.values(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    mesh = ig.Mesh("1")
    engine = engine_of(cut_layers(mesh), 3, topology=mesh)
    engine.load_checkpoint(str(tmp_path))
    assert engine.global_steps == 3
    for name, value in engine.module_state_dict().items():
        assert torch.allclose(value, parameters[name.removeprefix("kept.")], rtol=1e-9, atol=1e-12), name


def shared_module(stages: int) -> list[Found]:
    """One module twice among the layers, and a second engine beside the first one."""
    torch.manual_seed(1)
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    embed = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
    layers = [embed, linear, torch.tanh, nn.Linear(WIDTH, WIDTH, dtype=torch.float64), linear, nn.Dropout(0.0)]
    layers += [nn.Linear(WIDTH, WORDS, dtype=torch.float64)]
    engines = [
        engine_of(layers, 3, 1, num_stages=stages),
        engine_of(specs("tied"), 3, num_stages=stages, seed_layers=True),
    ]
    found = []
    for engine in engines * 2:
        engine.engine.accumulate(list(batches(engine, range(1), 3)))
        found.append({"gradients": named(engine)})
        engine.engine.discard()
        found[-1]["loss"] = float(engine.train_batch(batches(engine, range(1), 3)))
    return found


def test_a_module_that_stands_twice_is_one_and_two_engines_train_in_turn(worlds) -> None:
    expected = shared_module(1)
    for every in worlds(2).run(shared_module, 2):
        for found, single in zip(every, expected, strict=True):
            assert found["loss"] == pytest.approx(single["loss"], rel=1e-9)
            assert found["gradients"].keys() == single["gradients"].keys()
            for name, gradient in single["gradients"].items():
                assert float((found["gradients"][name] - gradient).norm()) <= 1e-9 * float(gradient.norm()), name


EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "deepspeed_pipeline.py"


def alexnet(stages: int) -> list[float]:
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(3)
    return example["train"](example["AlexNetPipe"](num_stages=stages, dropout=0.0), 96, 6)


def test_the_documented_example_trains_as_one_device_from_import_lines_that_differ(worlds) -> None:
    """Six steps, of which the fourth begins the rows anew."""
    example, losses = runpy.run_path(str(EXAMPLE)), list[float]()
    torch.manual_seed(3)
    net = example["AlexNetPipe"](num_stages=1, dropout=0.0)
    layers = nn.Sequential(*(nn.Flatten() if type(m) is nn.Identity else m for m in net.kept.values()))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=3e-3, weight_decay=0.0)
    images, labels = example["dataset"](96).tensors
    for step in range(6):
        rows = [32 * step % 96 + row for row in range(32)]
        loss = F.cross_entropy(layers(images[rows]), labels[rows])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for ranks, stages in ((2, 2), (4, 2)):
        for found in worlds(ranks).run(alexnet, stages):
            assert found == pytest.approx(losses, rel=2e-5)  # fp32
    assert sum("isograd" in line for line in EXAMPLE.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (
            TiedLayerSpec("e", nn.Embedding, WORDS + 1, WIDTH),
            "layer 2 has {'weight': (18, 8)}, layer 0 {'weight': (17, 8)}",
        ),
        (TiedLayerSpec("e", nn.Linear, WIDTH, WORDS + 1, bias=False), "layer 2 has [(18, 8)], layer 0 [(17, 8)]"),
        (
            TiedLayerSpec("e", Head, WIDTH, WORDS, tied_weight_attr=["weight", "bias"]),
            "[(17, 8), (17,)], layer 0 [(17, 8)]",
        ),
    ],
)
def test_ties_of_other_shapes_are_refused_with_both_layers(second: Any, named: str) -> None:
    """The second layer was built as the first one, without a word."""
    layers = [TiedLayerSpec("e", nn.Embedding, WORDS, WIDTH), LayerSpec(nn.Linear, WIDTH, WIDTH), second]
    with pytest.raises(ig.IsogradError, match="IG868") as caught:
        PipelineModule(layers, num_stages=1, loss_fn=F.cross_entropy)
    assert named in str(caught.value)
