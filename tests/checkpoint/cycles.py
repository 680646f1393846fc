"""Random histories of runs: train, save, drop the process's state, resume under another layout and stage, five times.

    python -m tests.checkpoint.cycles --seeds 0 50              more of them than the tests run
    python -m tests.checkpoint.cycles --seeds 0 50 --ranks 4

A history is compared with the undisturbed run of its first layout: every tensor and every number of the checkpoint that
both write at the end.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isograd.checkpoint import CheckpointManager
from isograd.checkpoint.read import Reader
from isograd.core.mesh import Mesh
from isograd.engine import ChainedOptimizer, Engine, LossScale
from isograd.launcher.launch import World
from isograd.losses.contrastive import GradientCache, InfoNCE
from tests.checkpoint import toys
from tests.engine.toys import Toy, loss_of, micro_batch

RESUMES = 5
Optimizer = torch.optim.Optimizer


class Counted(Optimizer):
    """A user's optimizer: momentum, a step count as a tensor, another as an int, and one number for the whole run."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["seen"] = self.state.get("seen", 0) + 1  # type: ignore[index,call-overload]
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=torch.zeros(()), times=0, one=torch.zeros(1), average=torch.zeros_like(p))
                state["count"] += 1
                state["one"] += 2
                state["times"] += 1
                state["average"].lerp_(p.grad, 1 / float(state["count"] + group["calls"] + self.state["seen"]))  # type: ignore[index,operator]
                p.sub_(state["average"], alpha=group["lr"])


def muon(shards: Any) -> Optimizer:
    return ChainedOptimizer(torch.optim.Muon(shards.matrices, lr=2e-2), torch.optim.AdamW(shards.rest, lr=1e-2))


@dataclass
class Task:
    """A model with its optimizer, and one step of it."""

    engine: Engine
    step: Callable[[int], Any]


def _language(layout: str, seed: int, optimizer: Callable[..., Optimizer], **options: Any) -> Task:
    engine = toys.engine_of(layout, model="small", optimizer=optimizer, seed=seed, **options)
    return Task(engine, lambda step: engine.train_step(toys.batch(step, engine.mesh), 2))


class Dropping(Toy):
    """torch's own dropout draws from the default generator of each rank; a gain of one element has state, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(torch.tanh(self.first(x)), 0.2)
        return self.out(torch.tanh(self.last(self.frozen(x)) * self.gain))  # type: ignore[no-any-return]


def _module(layout: str, seed: int, model: nn.Module, optimizer: Callable[..., Optimizer], **options: Any) -> Task:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(seed / 10)
    engine = Engine(model, Mesh(layout), optimizer, clip=0.5, **options)

    def step(number: int) -> None:
        share = 4 // engine.mesh.size("dp")
        for j in range(share):
            x, y = micro_batch(number, engine.mesh.index("dp") * share + j)
            engine.backward(loss_of(model, x, y), weight=len(x))
        engine.step()

    return Task(engine, step)


def _scheduled(layout: str, seed: int) -> Task:
    """torch's scheduler as in its own documentation: made again with the step that was loaded."""
    task = _module(layout, seed, Toy(), toys.sgd)
    schedule: list[torch.optim.lr_scheduler.LRScheduler] = []

    def step(number: int) -> None:
        if not schedule:
            last = number - 1 if number else -1
            schedule.append(torch.optim.lr_scheduler.LambdaLR(task.engine.optimizer, lambda n: 0.9**n, last_epoch=last))
        plain(number)
        schedule[0].step()

    plain, task.step = task.step, step
    return task


def _contrastive(layout: str, seed: int) -> Task:
    """Two towers in one and a temperature that is learned."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.loss = InfoNCE(mesh, 10.0, learn_scale=True)
            self.body = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)  # type: ignore[no-any-return]

    mesh = Mesh(layout)
    model = Tower()
    engine = Engine(model, mesh, toys.adamw)
    cache = GradientCache(engine, model.loss, encode=model, chunk=3)

    def step(number: int) -> None:
        both = torch.randn(2, 8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        a, b = both[:, mesh.index("dp") :: mesh.size("dp")]
        cache.backward(a, b)
        engine.step()

    return Task(engine, step)


TASKS: dict[str, Callable[[str, int], Task]] = {
    "adamw": lambda layout, seed: _language(layout, seed, toys.adamw),
    "sgd": lambda layout, seed: _language(layout, seed, toys.sgd),
    "counted": lambda layout, seed: _language(layout, seed, Counted, elementwise=True),
    "muon": lambda layout, seed: _language(layout, seed, muon, matrices=["blocks.*.mlp.*.weight"]),
    "scheduler": _scheduled,
    "loss scale": lambda layout, seed: _module(
        layout, seed, Toy(torch.float32), toys.adamw, loss_scale=LossScale(growth_interval=2)
    ),
    "dropout": lambda layout, seed: _module(layout, seed, Dropping(), Counted, elementwise=True),
    "contrastive": _contrastive,
}
DATA_ONLY = ("scheduler", "loss scale", "dropout", "contrastive")
LAYOUTS = {
    2: (*(f"dp2 zero{z}" for z in range(4)), "tp2 sp", "tp2 zero3", "pp2 zero1", "cp2 ulysses zero2", "cp2 ring zero3"),
    4: ("dp4 zero1", "dp2 tp2 sp zero1", "dp2 tp2 zero3", "pp2 dp2 zero2", "cp2 ring tp2 sp zero1", "tp2 pp2",
        "dp2 cp2 ulysses zero3", "tp4 sp"),
}  # fmt: skip


def layouts_of(task: str, ranks: int) -> list[str]:
    if task in DATA_ONLY:
        return [f"dp{ranks} zero{z}" for z in range(4)]
    return [layout for layout in LAYOUTS[ranks] if task != "muon" or "tp" not in layout]


@dataclass(frozen=True)
class History:
    """What happens: each life trains to `last` under its layout, and saved at the steps of `saves` on its way."""

    task: str
    seed: int
    lives: tuple[tuple[str, tuple[int, ...], int], ...]  # (layout, saves, last)

    @property
    def exact(self) -> bool:
        return len({layout for layout, _, _ in self.lives}) == 1

    @property
    def end(self) -> int:
        return self.lives[-1][2]


def history(task: str, seed: int, ranks: int) -> History:
    draw = random.Random(f"{task} {seed} {ranks}")
    choices = layouts_of(task, ranks)
    one = draw.choice(choices)
    mixed = draw.random() < 0.7 and task != "dropout"  # whose generators are those of one layout
    lives, at = [], 0
    for life in range(RESUMES + 1):
        saves = tuple(sorted({at + draw.randint(1, 2), at + draw.randint(1, 2)}))
        last = saves[-1] + (draw.randint(0, 1) if life < RESUMES else 0)  # steps after the last save are lost
        lives.append((draw.choice(choices) if mixed else one, saves, last))
        at = saves[-1]
    return History(task, seed, tuple(lives))


def live(folder: Path, past: History) -> None:
    for number, (layout, saves, last) in enumerate(past.lives):
        torch.manual_seed(100 + number)
        task = TASKS[past.task](layout, number)  # other first values in each life: only the checkpoint makes it equal
        with CheckpointManager(folder, task.engine, keep_last=1) as keeper:
            found = keeper.load("auto")
            assert (found is None) == (number == 0)
            for step in range(found.step if found else 0, last):
                task.step(step)
                if step + 1 in saves:
                    keeper.save(step + 1)


def undisturbed(folder: Path, past: History) -> None:
    torch.manual_seed(100)
    task = TASKS[past.task](past.lives[0][0], 0)
    for step in range(past.end):
        task.step(step)
    with CheckpointManager(folder, task.engine) as keeper:
        keeper.save(past.end)


def both(folder: Path, past: History) -> list[str]:
    """What differs between a history and the undisturbed run, in words."""
    live(folder / "cut", past)
    undisturbed(folder / "whole", past)
    name = f"step-{past.end:08d}"
    return unlike(Reader(folder / "cut" / name), Reader(folder / "whole" / name), past.exact)


def unlike(cut: Reader, whole: Reader, exact: bool) -> list[str]:
    def keys(reader: Reader) -> list[str]:  # generators are of one layout
        return [key for key in reader.manifest.tensors if exact or not key.startswith("generator/")]

    found = [f"{key}: in one of them only" for key in {*keys(cut)} ^ {*keys(whole)}]
    for key in {*keys(cut)} & {*keys(whole)}:
        a, b = cut.read(key), whole.read(key)
        if a.dtype == torch.float32 and not exact:
            same = torch.allclose(a, b, rtol=1e-4, atol=1e-5)  # sums in another order
        elif exact or not a.is_floating_point():
            same = torch.equal(a, b)
        else:
            same = float((a - b).norm()) <= 1e-9 * float(b.norm())
        if a.dtype != b.dtype or not same:
            found.append(f"{key}: {a.flatten()[:3].tolist()} for {b.flatten()[:3].tolist()}")
    ours, theirs = _numbers(cut), _numbers(whole)
    return found + [f"{k}: {ours.get(k)} for {theirs.get(k)}" for k in ours | theirs if ours.get(k) != theirs.get(k)]


def _numbers(reader: Reader) -> dict[str, Any]:
    numbers = reader.manifest.numbers
    options = {f"{g['kind']} {name} {k}": v for g in numbers["groups"] for name in g["names"]
               for k, v in g["options"].items()}  # fmt: skip
    counts = {f"{entry} of {name}": v for entry, values in numbers["counts"].items() for name, v in values.items()}
    return {**options, **counts, "loss_scale": numbers["loss_scale"], "counters": numbers["counters"]}


def many(folder: Path, pasts: list[History]) -> list[list[str]]:
    return [both(folder / str(i), past) for i, past in enumerate(pasts)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 5))
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    options = parser.parse_args()
    failed = done = resumes = 0
    with World(options.ranks) as world:
        for seed in range(*options.seeds):
            for task in options.tasks:
                past = history(task, seed, options.ranks)
                with tempfile.TemporaryDirectory() as folder:
                    wrong = world.run(both, Path(folder), past)[0]
                done, resumes, failed = done + 1, resumes + RESUMES, failed + bool(wrong)
                if wrong:
                    print(past, *wrong[:8], sep="\n  ", flush=True)
    print(f"{done} histories, {resumes} resumes: {failed} differ")


if __name__ == "__main__":
    main()
