"""Hundreds of deaths at random points of one run, whose parameters then are those of the run that nothing happened to.

    python -m tests.soak --faults 300 --seed 0 --work FOLDER
    python -m tests.soak --faults 30 --across --work FOLDER       no rank is replaced: other layouts, and back again

One run of a toy model, in which random ranks kill themselves at random points of random steps (tests/planted.py), often
several in one step. At its end the parameters and the optimizer's state in the last checkpoint must be equal to those
of the undisturbed run: under the same layout to the bit; across layouts to 1e-9 of each tensor's norm. Killed, it is
started again with the same words, and resumes: what has happened does not happen again.

A fault happens when its rank comes to its point. Some never do: after a death in a save the copies become that
checkpoint, so nobody saves this step again; a process that was just started has no fault for the meeting that it comes
to. So a quarter more than `--faults` are planned, and when so many have happened, no other one does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
import warnings
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import torch

from isograd.checkpoint.compare import differences
from isograd.checkpoint.folder import checkpoints
from isograd.checkpoint.read import open_whole
from isograd.core.layout import Layout
from isograd.elastic import WorkerPool
from isograd.train import journal
from isograd.train.loop import RunOptions
from isograd.train.run.survive import survive
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


def draw_across(count: int, seed: int) -> tuple[Fault, ...]:
    """Deaths in steps in turn with ranks that come back: of four ranks, and sometimes of the two that go on."""
    chance = random.Random(seed)
    found: list[Fault] = []
    deaths, step = 0, 1
    while deaths < count:
        found.append(Fault(chance.choice(IN_A_STEP), step, chance.randrange(4)))
        deaths += 1
        if chance.random() < 0.5 and deaths < count:
            step += 1
            found.append(Fault(chance.choice(IN_A_STEP), step, chance.randrange(2)))
            deaths += 1
        found.append(Fault("forward", step + 1, 0, "grow"))
        step += 2
    return tuple(found)


def main(given: list[str] | None = None) -> int:
    """The soak; 0: equal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", help="default: dp2 zero1; with --across dp2 tp2 sp zero1")
    parser.add_argument("--steps", type=int, default=120, help="with --across: as many as the faults need")
    parser.add_argument("--across", action="store_true", help="after_death: shrink, and ranks that come back")
    parser.add_argument("--work", type=Path, required=True, help="a folder for it, which a second start resumes from")
    options = parser.parse_args(given)
    layout = options.layout or ("dp2 tp2 sp zero1" if options.across else "dp2 zero1")
    steps = options.steps
    faults.commit()
    if options.across:
        plan = draw_across(options.faults, options.seed)
        steps = plan[-1].step + 2
    else:
        plan = draw(options.faults * 5 // 4, options.seed, steps, Layout.parse(layout).world_size)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(
        ["isograd.launcher.worker", "tests.preloaded", "tests.planted", "matplotlib.figure"]
    )
    forkserver.ensure_running()
    text, marks = options.work / "text" / "tokens", options.work / "marks"
    marks.mkdir(parents=True, exist_ok=True)
    if not text.exists():
        faults.tokens(text.parent)
    changes = {
        "steps": steps, "checkpoint": {"every": EVERY}, "evaluate": {"every": EVERY, "batches": 1},
    }  # fmt: skip
    whole, disturbed = options.work / "whole", options.work / "run"
    if not checkpoints(whole / "checkpoints") or checkpoints(whole / "checkpoints")[-1][0] < steps:
        faults.undisturbed(whole, text, layout, **changes)
    planned = Faults(plan, marks, None if options.across else options.faults)
    how = "shrink" if options.across else "replace"
    after = {"after_death": how, "copies": "partner", "tries": 1000, "wait_s": 60.0}
    began = time.time()
    with WorkerPool(wait_s=60.0) as pool:
        outcome = survive(
            faults.config(disturbed, text, layout, resilience=after, **changes),
            RunOptions(show="none", signals=(), before_step=planned), pool,
        )  # fmt: skip
        worlds = pool.worlds
    recovered = [
        sum(line["parts"].values())
        for line in journal.read(disturbed / "metrics.jsonl")
        if line.get("event") == "recovered"
    ]
    happened = {plan[number] for number in planned.happened()}
    missed = Counter(fault.point for fault in plan if fault not in happened)
    state = apart(whole, disturbed)
    found = {
        "layout": layout, "across": options.across, "seed": options.seed, "steps": steps, "commit": faults.commit(),
        "exit code": outcome.code, "deaths": sum(fault.does == "kill" for fault in happened),
        "planned, and nobody came there": dict(missed),
        "worlds of this start": worlds, "seconds of this start": round(time.time() - began),
        "median seconds of a recovery": sorted(recovered)[len(recovered) // 2] if recovered else None,
        "losses": faults.same(losses(disturbed), losses(whole)),
        "state": state if isinstance(state, str) else f"apart by {state:.1e} of a tensor's norm at most",
    }  # fmt: skip
    print(json.dumps(found, indent=1), flush=True)
    (options.work / "found.json").write_text(json.dumps(found, indent=1) + "\n")
    if options.across:
        return (
            0
            if found["losses"] != "DIFFERENT" and (state == SAME or (isinstance(state, float) and state < 1e-9))
            else 1
        )
    return 0 if found["losses"] == state == SAME else 1


SAME = "the same bits"


def apart(one: Path, other: Path) -> str | float:
    """How far the tensors and numbers of two runs' last checkpoints are from each other; in words where that is more
    than a number."""
    first, second = (open_whole(checkpoints(run / "checkpoints")[-1][1]) for run in (one, other))
    assert first.manifest.tensors
    found = list(differences(first, second))
    unlike = [str(each) for each in found if each.what]
    if unlike or not found:
        return "; ".join(unlike[:4]) or SAME
    return max(each.relative for each in found)


if __name__ == "__main__":
    sys.exit(main())
