"""An exception of one rank's own code in a foreign loop: in its forward, in its backward, between backward and step, or
in its optimizer.

Where the program handles it, on all ranks, by the integration's way to drop a step, the other ranks know who failed
and why, nothing of the step is left, and the next steps have the gradients of one device, at all accumulations.
Behind an optimizer that failed, every further step is refused on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isograd as ig
from isograd.comm import world

from . import toys
from .worlds import as_lightning_finds_it, as_torchrun_starts_it

pytest.importorskip("accelerate")
pytestmark = pytest.mark.medium
IGNORED, STEPS, MICROS, CLASSES = -100, 4, 4, 5
FAILING, LATE = 1, 1  # the rank that fails, or all where there is one; and in which of its steps
PLACES = ("forward", "backward", "callback", "optimizer")


class Halt(Exception):
    """Of a user's code."""


class Fault:
    """Raises once, in the place where it is to, in one micro-batch of one step."""

    def __init__(self, place: str, micro: int) -> None:
        self.rank, ranks = world.world()
        self.place = place if self.rank == FAILING % ranks else ""
        self.at, self.now = (LATE, micro), (-1, -1)

    def __call__(self, place: str) -> None:
        if place == self.place and (self.now == self.at or (place == "optimizer" and self.now[0] == LATE)):
            self.place = ""
            raise Halt(f"in its {place}")


class Passes(torch.autograd.Function):
    """The same tensor; its backward may fail."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.fault("backward")
        return gradient, None


class Net(nn.Module):
    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 7).double(), nn.Linear(7, CLASSES).double()
        self.fault = fault

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows).tanh()
        if self.fault is not None:
            self.fault("forward")
            hidden = Passes.apply(hidden, self.fault)  # type: ignore[no-untyped-call]
        found: Tensor = self.last(hidden)
        return found


def micro(step: int, number: int) -> tuple[Tensor, Tensor]:
    """Rows and labels of a micro-batch, the same ones however many ranks there are."""
    generator = torch.Generator().manual_seed(10 * step + number)
    rows = 1 + (step + 2 * number) % 4
    labels = torch.randint(CLASSES, (rows, 3), generator=generator)
    labels[torch.rand(rows, 3, generator=generator) < 0.4] = IGNORED
    return torch.randn(rows, 3, 6, generator=generator, dtype=torch.float64), labels


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Breaks(torch.optim.SGD):
    """Half of its step is done when it fails."""

    fault: Fault

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0 if self.fault.place == "optimizer" else 0.0)
        self.fault("optimizer")
        super().step()


def sgd(model: nn.Module, fault: Fault) -> torch.optim.Optimizer:
    torch.optim.SGD([torch.zeros(1)])  # of an SGD that was made before, torch calls the hooks of a step once more
    made = Breaks(model.parameters(), lr=0.5)
    made.fault = fault
    return made


Trained = tuple[list[str], dict[str, Tensor]]  # what went wrong in each step, and parameters


def over_steps(
    fault: Fault, run: Callable[[list[tuple[Tensor, Tensor]]], None], drop: Callable[[], None], engine: bool = True
) -> list[str]:
    """A loop whose handler drops the step on every rank, and goes on. It ends where no step can be right: all ranks
    learn in an engine's step that an optimizer has raised, and without one in the next backward."""
    rank, ranks = world.world()
    said = []
    for step in range(STEPS):
        said.append("")
        fault.now = (step, -1)
        try:
            try:
                run([micro(step, number) for number in range(rank, MICROS, ranks)])
            except Exception as error:
                said[-1] = f"{type(error).__name__}: {error}"
                drop()
        except ig.IsogradError as refused:
            said[-1] += str(refused)
        if "IG559" in said[-1] or (engine and "in its optimizer" in said[-1]):
            break
    return said


def by_accelerate(fault: Fault, layout: str) -> Trained:
    with as_torchrun_starts_it() as (_, ranks):
        accelerator = ig.integrations.Accelerator(
            gradient_accumulation_steps=MICROS // ranks, layout=layout, elementwise=True
        )
        accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
        bare = Net(fault)
        model, optimizer = accelerator.prepare(bare, sgd(bare, fault))

        def run(micros: list[tuple[Tensor, Tensor]]) -> None:
            for number, (rows, labels) in enumerate(micros):
                fault.now = (fault.now[0], number)
                with accelerator.accumulate(model):
                    accelerator.backward(mean(model(rows), labels), weight=(labels != IGNORED).sum())
                    fault("callback")
                    optimizer.step()
                    optimizer.zero_grad()

        whole = layout == "zero0"
        said = over_steps(fault, run, model.discard if whole else accelerator.engine.discard, engine=not whole)
        return said, accelerator.get_state_dict(model)


def by_deepspeed(fault: Fault, stage: int) -> Trained:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    config |= {"gradient_accumulation_steps": MICROS // world.world()[1], "zero_allow_untested_optimizer": True}
    model = Net(fault)
    engine, *_ = ig.integrations.deepspeed.initialize(model=model, optimizer=sgd(model, fault), config=config)

    def run(micros: list[tuple[Tensor, Tensor]]) -> None:
        for number, (rows, labels) in enumerate(micros):
            fault.now = (fault.now[0], number)
            engine.backward(mean(engine(rows), labels), weight=(labels != IGNORED).sum())
            fault("callback")
            engine.step()

    return over_steps(fault, run, engine.engine.discard), engine.module_state_dict()


def by_fabric(fault: Fault, layout: str) -> Trained:
    from lightning.fabric import Fabric

    with as_lightning_finds_it() as (_, ranks):
        fabric = Fabric(
            accelerator="cpu", devices=ranks, strategy=ig.integrations.FabricStrategy(layout, elementwise=True)
        )
        fabric.launch()
        bare = Net(fault)
        model, optimizer = fabric.setup(bare, sgd(bare, fault))

    def run(micros: list[tuple[Tensor, Tensor]]) -> None:
        for number, (rows, labels) in enumerate(micros):
            fault.now = (fault.now[0], number)
            with fabric.no_backward_sync(model, enabled=number + 1 < len(micros)):
                fabric.backward(mean(model(rows), labels), weight=(labels != IGNORED).sum())
            fault("callback")
        optimizer.step()
        optimizer.zero_grad()

    said = over_steps(fault, run, fabric.strategy.engine.discard)
    return said, fabric.strategy.get_module_state_dict(model.module)


INTEGRATIONS: dict[str, Callable[[Fault], Trained]] = {
    "accelerate": lambda fault: by_accelerate(fault, "zero0"),
    "accelerate 1": lambda fault: by_accelerate(fault, "zero1"),
    "accelerate 3": lambda fault: by_accelerate(fault, "zero3"),
    "deepspeed 0": lambda fault: by_deepspeed(fault, 0),
    "deepspeed 3": lambda fault: by_deepspeed(fault, 3),
    "fabric 1": lambda fault: by_fabric(fault, "zero1"),
    "fabric 3": lambda fault: by_fabric(fault, "zero3"),
}


def faults(integration: str) -> list[tuple[str, Trained]]:
    ranks = world.world()[1]
    places = [(place, micro) for place in PLACES[:3] for micro in range(MICROS // ranks)] + [("optimizer", 0)]
    found = []
    for place, number in places:
        said, parameters = INTEGRATIONS[integration](Fault(place, number))
        found.append((place, (said, {name: value.clone() for name, value in parameters.items()})))
    return found


def one_device(steps: list[int]) -> dict[str, Tensor]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in steps:
        micros = [micro(step, number) for number in range(MICROS)]
        mean(model(torch.cat([m[0] for m in micros])), torch.cat([m[1] for m in micros])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_a_step_in_which_a_rank_fails_is_dropped_on_all_and_the_next_ones_are_right(
    worlds, integration: str, ranks: int
) -> None:
    if integration.startswith("fabric") and find_spec("lightning") is None:
        pytest.skip("needs lightning")
    each = [faults(integration)] if ranks == 1 else worlds(ranks).run(faults, integration)
    for rank, found in enumerate(each):
        for place, (said, parameters) in found:
            what = f"{integration}, {place}, rank {rank} of {ranks}: {said}"
            assert said[0] == "", what
            if rank == FAILING % ranks:
                assert said[1].startswith(f"Halt: in its {place}"), what
            if place == "optimizer":  # half of its step is done: no rank trains on
                told = rank == FAILING % ranks or ("IG559" in said[-1] and f"rank {FAILING % ranks}: " in said[-1])
                assert told and len(said) <= 3, what
                continue
            if "IG559" in said[-1]:  # its optimizer has missed a step
                assert ranks > 1 and (integration, place) == ("accelerate", "callback"), what
                assert f"rank {FAILING % ranks}: " in said[-1] and len(said) <= 3, what
                continue
            if rank != FAILING % ranks:
                assert "rank 1" in said[1].lower() or "ranks [1]" in said[1], what
            assert said[2:] == [""] * (STEPS - 2), what
            for name, value in one_device([0, 2, 3]).items():
                assert torch.allclose(parameters[name], value, rtol=1e-9, atol=1e-12), what


TRAINERS = [("on_step_begin", (1,)), ("on_step_end", (1,)), ("on_step_end", (0, 1)), ("on_prediction_step", (0,))]


def by_a_trainer(layout: str, faults: list[tuple[str, tuple[int, ...]]], folder: str) -> list[Any]:
    """Behind an exception in a callback: training again from the first weights, of the same Trainer or a new one."""
    from transformers import Trainer, TrainerCallback

    def made(callbacks: list[Any]) -> Any:
        options = toys.arguments(folder, 2, 2, dataloader_pin_memory=False, eval_strategy="steps", eval_steps=1)
        return ig.integrations.trainer(Trainer, layout)(
            toys.model(), options, train_dataset=toys.Rows(16), eval_dataset=toys.Rows(8), callbacks=callbacks,
            compute_loss_func=toys.exact,
        )  # fmt: skip

    def trained(trainer: Any) -> dict[str, Tensor]:
        trainer.train()
        with trainer._full_parameters():
            return {name: value.clone() for name, value in trainer.model.state_dict().items()}

    found: list[Any] = []
    with as_torchrun_starts_it():
        clean = trained(made([]))
        for hook, ranks in faults:
            callback, armed = TrainerCallback(), [world.world()[0] in ranks]

            def fault(*_: Any, armed: list[bool] = armed, **__: Any) -> None:
                if armed.pop() if armed else False:
                    raise Halt("in a callback")

            setattr(callback, hook, fault)
            trainer, said = made([callback]), list[str]()
            first = {name: value.clone() for name, value in trainer.model.state_dict().items()}
            for again in range(3):
                try:
                    found.append((said, trained(trainer), clean))
                    break
                except Exception as error:
                    said.append(str(error))
                trainer = made([]) if again and layout == "zero3" else trainer
                if layout != "zero3":
                    trainer.model.load_state_dict(first)
                torch.manual_seed(1)  # as a Trainer begins: data are drawn by it
    return found


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_behind_an_exception_of_a_callback_a_trainer_begins_anew_on_all_ranks(
    worlds, tmp_path: Any, layout: str
) -> None:
    """At zero3, where each rank has rows alone, the same one is refused on all, and a new one is right."""
    faults = TRAINERS if layout == "zero1" else TRAINERS[1:2]
    for rank, each in enumerate(worlds(2).run(by_a_trainer, layout, faults, str(tmp_path))):
        for (hook, ranks), (said, state, clean) in zip(faults, each, strict=True):
            what = (hook, ranks, rank, said)
            assert said[0] == "in a callback" if rank in ranks else said[0].startswith(("IG550", "IG870", "IG213")), (
                what
            )
            assert len(said) == (2 if layout == "zero3" else 1) and said[-1].startswith("IG207") == (len(said) > 1), (
                what
            )
            for name, value in clean.items():
                assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-12), (name, *what)
