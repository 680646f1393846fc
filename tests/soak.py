"""Hundreds of deaths at random points of one run, whose parameters then are those of the run that nothing happened to.

    python -m tests.soak --faults 300 --seed 0 --work FOLDER

One run of a toy model, in which random ranks kill themselves at random points of random steps (tests/planted.py), often
several in one step. At its end the parameters and the optimizer's state in the last checkpoint must be equal to those
of the undisturbed run under the same layout, to the bit. It prints a line for each death. Killed, it is started again
with the same words, and resumes: what has happened does not happen again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
import warnings
from multiprocessing import forkserver
from pathlib import Path

import torch

from isograd.checkpoint.folder import checkpoints
from isograd.layout import Layout
from isograd.resilience import Crew
from isograd.train import journal
from isograd.train.loop import Orders
from isograd.train.survive import survive
from tests import faults
from tests.planted import IN_A_STEP, MEETING_AGAIN, SAVING, SAVING_FIRST, Fault, Faults
from tests.train.test_loop import losses

EVERY = 10  # steps between checkpoints and evaluations


def draw(count: int, seed: int, steps: int, ranks: int) -> tuple[Fault, ...]:
    """Random faults, all different, in the order of their steps. None before the first or after the last step."""
    chance = random.Random(seed)
    found: set[Fault] = set()
    while len(found) < count:
        step, rank = chance.randrange(1, steps - 1), chance.randrange(ranks)
        points = [*IN_A_STEP, "reading"]
        if step % EVERY == 0:
            points += ["evaluation", *SAVING, *(SAVING_FIRST if rank == 0 else ())]
        found.add(Fault(chance.choice(points), step, rank))
        if chance.random() < 0.15:  # a second death, while the ranks meet again after the first
            survivor = (rank + chance.randrange(1, ranks)) % ranks
            found.add(Fault(chance.choice(MEETING_AGAIN), step, survivor))
    return tuple(sorted(found, key=lambda fault: (fault.step, fault.rank, fault.point)))[:count]


def main() -> int:
    """The soak; 0: equal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", default="dp2 zero1")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--work", type=Path, required=True, help="a folder for it, which a second start resumes from")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(
        ["isograd.comm.worker", "tests.preloaded", "tests.planted", "matplotlib.figure"]
    )
    forkserver.ensure_running()
    text, marks = options.work / "text" / "tokens", options.work / "marks"
    marks.mkdir(parents=True, exist_ok=True)
    if not text.exists():
        faults.tokens(text.parent)
    changes = {
        "steps": options.steps, "checkpoint": {"every": EVERY}, "evaluate": {"every": EVERY, "batches": 1},
    }  # fmt: skip
    whole, disturbed = options.work / "whole", options.work / "disturbed"
    if not checkpoints(whole / "checkpoints") or checkpoints(whole / "checkpoints")[-1][0] < options.steps:
        faults.undisturbed(whole, text, options.layout, **changes)
    planned = Faults(draw(options.faults, options.seed, options.steps, Layout.parse(options.layout).world_size), marks)
    after = {"after_death": "replace", "copies": "partner", "tries": 1000, "wait_s": 60.0}
    began = time.time()
    with Crew(wait_s=60.0) as crew:
        outcome = survive(
            faults.config(disturbed, text, options.layout, resilience=after, **changes),
            Orders(show="none", signals=(), before_step=planned), crew,
        )  # fmt: skip
        worlds = crew.worlds
    recovered = [
        sum(line["parts"].values())
        for line in journal.read(disturbed / "metrics.jsonl")
        if line.get("event") == "recovered"
    ]
    found = {
        "layout": options.layout, "seed": options.seed, "steps": options.steps, "exit code": outcome.code,
        "faults planned": options.faults, "faults that happened": len(planned.happened()),
        "worlds of this start": worlds, "seconds of this start": round(time.time() - began),
        "median seconds of a recovery": sorted(recovered)[len(recovered) // 2] if recovered else None,
        "losses": faults.same(losses(disturbed), losses(whole)),
        "state": "the same bits" if equal_state(whole, disturbed) else "DIFFERENT",
    }  # fmt: skip
    print(json.dumps(found, indent=1), flush=True)
    (options.work / "found.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["losses"] == found["state"] == "the same bits" else 1


def equal_state(one: Path, other: Path) -> bool:
    """Whether the last checkpoints of two runs hold the same tensors: by the hashes that the checkpoints say."""
    manifests = [
        json.loads((checkpoints(run / "checkpoints")[-1][1] / "manifest.json").read_text()) for run in (one, other)
    ]
    return bool(manifests[0]["tensors"]) and manifests[0]["tensors"] == manifests[1]["tensors"]


if __name__ == "__main__":
    sys.exit(main())
