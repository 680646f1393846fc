"""Kill runs at random moments and resume them: their losses are those of the run that was never killed, bit for bit.

    python -m tests.train.soak --kills 200

A rank is killed with SIGKILL while it computes, communicates, evaluates or writes a checkpoint. The same command then
resumes the run, until it is done. One layout after another; `--kills` in all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import warnings
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

from isograd.data import build
from isograd.errors import LaunchError
from isograd.launcher.launch import World
from isograd.train import loop
from isograd.train.config import Config
from isograd.train.language import LanguageTask
from tests.train.test_loop import QUIET, config_of, losses

LAYOUTS = ("dp2 zero1", "dp2 zero3", "tp2 sp zero1", "pp2")
STEPS = 8


@dataclass
class Kill:
    """Ends one rank this many seconds after it began a step: the first one of this life, or one of the next."""

    steps_before: int
    rank: int
    after: float

    def __call__(self, step: int, task: LanguageTask) -> None:
        self.steps_before -= 1
        if self.steps_before == -1 and task.mesh.rank == self.rank:
            threading.Timer(self.after, partial(os.kill, os.getpid(), signal.SIGKILL)).start()


def one_life(world: World, config: Config, kill: Kill | None) -> bool:
    """Whether the run came to its end."""
    orders = loop.RunOptions(show="none", signals=(), before_step=kill)
    try:
        ended = all(outcome.code == 0 for outcome in world.run(loop.run, config, orders, timeout=600))
        if kill is not None:
            world.close(kill=True)  # the timer may still be running
        return ended
    except LaunchError as error:
        if "SIGKILL" not in str(error) or kill is None:
            raise
        return False


def course(world: World, folder: Path, text: Path, layout: str, kills: int, draw: random.Random) -> tuple[int, bool]:
    """(times killed, whether the losses are those of the undisturbed run)."""
    changes = {"layout": layout, "steps": STEPS, "model": {"preset": "tiny-llama", "options": {"vocab": 257}}}
    whole = config_of(folder / "whole", text, **changes)
    world.run(loop.run, whole, QUIET, timeout=600)
    cut = config_of(folder / "cut", text, **changes, checkpoint={"every": draw.choice((1, 2))})
    killed, ended = 0, False
    while not ended:
        kill = Kill(draw.randrange(3), draw.randrange(2), draw.random() * 0.2) if killed < kills else None
        ended = one_life(world, cut, kill)
        killed += not ended
    return killed, losses(folder / "cut") == losses(folder / "whole")


def tokens(folder: Path) -> Path:
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(f"{number} of {i * i}" for i in range(20 + 9 * number)))
    build(folder / "tokens", sorted(folder.glob("*.txt")), validation=0.3)
    return folder / "tokens"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    multiprocessing.set_forkserver_preload(["isograd.launcher.worker", "tests.preloaded"])
    forkserver.ensure_running()
    killed = dict.fromkeys(options.layouts, 0)
    different: list[str] = []
    number = 0
    with tempfile.TemporaryDirectory() as home, World(2) as world:
        text = tokens(Path(home))
        while sum(killed.values()) < options.kills:
            layout = options.layouts[number % len(options.layouts)]
            draw = random.Random(f"{options.seed} {number}")
            folder = Path(home) / str(number)
            times, equal = course(world, folder, text, layout, min(5, options.kills - sum(killed.values())), draw)
            killed[layout] += times
            different += [] if equal else [f"course {number} under {layout}"]
            number += 1
            print(f"{sum(killed.values())} kills, {number} courses, {len(different)} differ", flush=True)
    print(killed, "losses differ in:", different or "none")


if __name__ == "__main__":
    main()
