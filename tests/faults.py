"""Kill ranks of runs that survive it, at every point of a step, and write what happened into docs/faults.md.

    python -m tests.faults                                  the whole table: hours on two busy cores
    python -m tests.faults --layouts "dp2 zero1" --ranks 0  some of its rows

A rank kills itself with SIGKILL at a point of the fourth step. The row of the table says how soon the launcher saw it,
which rank it named, how many finished steps had to be done again, how long it took until the next step was finished,
and whether all losses are those of the run that nothing happened to: the same bits, as the layout is the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isograd.checkpoint import write
from isograd.engine import norm
from isograd.layout import Layout
from isograd.resilience import Attempt, Crew
from isograd.train import journal, peers
from isograd.train.config import Config
from isograd.train.language import Language
from isograd.train.loop import Orders
from isograd.train.survive import survive
from tests.train.test_loop import config_of, losses

LAYOUTS = ("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2 sp zero1", "pp2 zero1", "dp2 tp2 sp zero1")
POINTS = ("forward", "backward", "before the vote", "after the vote", "re-forming", "saving")
AT = 3  # finished steps when the rank dies
STEPS = 6
TABLE = Path(__file__).parents[1] / "docs" / "faults.md"


@dataclass
class Fault:
    """Given to the ranks as `Orders.before_step`: it plants the death at its point, in its step, on its rank, once."""

    point: str
    rank: int
    folder: Path
    ranks: int
    steps_here: int = field(default=0, compare=False)  # that this process has begun in this world

    def __call__(self, step: int, job: Language) -> None:
        if self.steps_here and job.mesh.rank == 0 and (self.folder / "dead").exists():
            with open(self.folder / "again", "a") as file:  # the first line: when a step was finished after the death
                file.write(f"{time.time()}\n")
        self.steps_here += 1
        if self.point == "re-forming" and step == AT and job.mesh.rank == (self.rank + 1) % self.ranks:
            _at_forward(job, partial(self.die, "first"))
        if step != AT or job.mesh.rank != self.rank:
            return
        if self.point == "forward":
            _at_forward(job, self.die)
        elif self.point == "backward":
            _at_backward(job, self.die)
        elif self.point == "before the vote":
            _around(norm, "global_norm", before=self.die)
        elif self.point == "after the vote":
            _around(norm, "global_norm", after=self.die)
        elif self.point == "saving":
            _around(write, "flush_folder", before=self.die)
        elif self.point == "re-forming":
            _around(peers, "same_config", before=self.die)

    def die(self, name: str = "dead") -> None:
        """Unless it has been done before."""
        try:
            with open(self.folder / name, "x") as file:
                file.write(str(time.time()))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def _around(module: Any, name: str, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None):
    inner = getattr(module, name)

    def outer(*args: Any, **options: Any) -> Any:
        if before is not None:
            before()
        value = inner(*args, **options)
        if after is not None:
            after()
        return value

    setattr(module, name, outer)


def _linear(job: Language) -> nn.Module:
    """A layer that every stage of every layout has."""
    return next(m for n, m in job.model.named_modules() if n.endswith(("mlp.up", "mlp.down")))


def _at_forward(job: Language, die: Callable[[], None]) -> None:
    _linear(job).register_forward_hook(lambda *_: die())


def _at_backward(job: Language, die: Callable[[], None]) -> None:
    def plant(module: nn.Module, given: Any, result: Tensor) -> None:
        if result.requires_grad:
            result.register_hook(lambda _: die())

    _linear(job).register_forward_hook(plant)


class Watched(Crew):
    """A crew that remembers its attempts."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts: list[Attempt] = []

    def attempt(self, size: int, fn: Callable[..., Any], *args: Any) -> Attempt:
        self.attempts.append(super().attempt(size, fn, *args))
        return self.attempts[-1]


@dataclass(frozen=True)
class Row:
    """What happened in one case."""

    layout: str
    copies: str
    point: str
    rank: int
    seen_s: float  # from the death to the launcher
    named: list[int]
    lost: int  # finished steps that were done again
    recovered_s: float  # from the death to the end of the next step
    equal: bool

    def __str__(self) -> str:
        cells = [
            f"`{self.layout}`", self.copies, self.point, str(self.rank), f"{self.seen_s:.2f} s",
            "rank " + " and ".join(map(str, self.named)), str(self.lost), f"{self.recovered_s:.1f} s",
            "the same bits" if self.equal else "**DIFFERENT**",
        ]  # fmt: skip
        return f"| {' | '.join(cells)} |"


def config(folder: Path, text: Path, layout: str, **changes: Any) -> Config:
    """A toy run."""
    return config_of(folder, text, **{"layout": layout, "steps": STEPS, "checkpoint": {"every": None}, **changes})


def undisturbed(folder: Path, text: Path, layout: str) -> list[float]:
    """The losses of the run that nothing happens to."""
    with Crew() as crew:
        assert survive(config(folder, text, layout), Orders(show="none", signals=()), crew).code == 0
    return losses(folder)


def one(folder: Path, text: Path, layout: str, copies: str, point: str, rank: int, expected: list[float]) -> Row:
    """Kill one rank at one point."""
    after = {"after_death": "replace", "copies": copies}
    saves = {"every": 2} if copies == "none" or point == "saving" else {"every": None}
    if point == "saving":
        saves = {"every": AT + 1}
    run = config(folder / "run", text, layout, resilience=after, checkpoint=saves)
    fault = Fault(point, rank, folder, Layout.parse(layout).world_size)
    with Watched() as crew:
        outcome = survive(run, Orders(show="none", signals=(), before_step=fault), crew)
    assert outcome.code == 0, outcome
    died = float((folder / "dead").read_text())
    death = [attempt for attempt in crew.attempts if attempt.dead][-1]
    done = AT + (point == "saving")
    lines = list(journal.read(folder / "run" / "metrics.jsonl"))
    resumed = max((line["step"] for line in lines if line.get("event") == "resumed"), default=0)
    again = float((folder / "again").read_text().splitlines()[0])
    named = sorted(rank for attempt in crew.attempts for rank in attempt.dead)
    same = losses(folder / "run") == expected
    return Row(layout, copies, point, rank, death.seen - died, named, done - resumed, again - died, same)


def tokens(folder: Path) -> Path:
    """A little text."""
    from isograd.data import build

    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(f"{number} of {i * i}" for i in range(20 + 9 * number)))
    build(folder / "tokens", sorted(folder.glob("*.txt")), validation=0.3)
    return folder / "tokens"


def main() -> None:
    """Fill in the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--points", nargs="*", default=POINTS)
    parser.add_argument("--copies", nargs="*", default=("partner", "none"))
    parser.add_argument("--ranks", nargs="*", type=int, help="default: the first and the last")
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(["isograd.comm.worker", "tests.preloaded"])
    forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as home:
        text = tokens(Path(home))
        for layout in options.layouts:
            place = Path(home) / layout.replace(" ", "-")
            expected = undisturbed(place / "whole", text, layout)
            last = Layout.parse(layout).world_size - 1
            for copies in options.copies:
                for point in options.points:
                    for rank in options.ranks or (0, last):
                        folder = place / f"{copies}-{point}-{rank}".replace(" ", "-")
                        folder.mkdir(parents=True)
                        row = one(folder, text, layout, copies, point, rank, expected)
                        print(row, flush=True)
                        put(row, options.table)


MARK = "<!-- the table below is written by python -m tests.faults -->\n"
HEAD = "| layout | copies | killed in | rank | seen after | named | steps lost | next step after | losses |\n"
HEAD += "|---|---|---|---|---|---|---|---|---|\n"
KEY = 4  # columns that say which case it is


def put(row: Row, table: Path) -> None:
    """Into the table, in place of an older row of the same case."""
    before, _, after = table.read_text().partition(MARK)
    rows = [line for line in after.splitlines() if line.startswith("| `")]
    key = str(row).split("|")[: KEY + 1]
    rows = [line for line in rows if line.split("|")[: KEY + 1] != key] + [str(row)]
    table.write_text(before + MARK + "\n" + HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
