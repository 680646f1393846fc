"""Predicted steps of 30 layouts beside measured ones, on this computer: 2 and 4 ranks, on quiet cores.

    python -m benchmarks.plan_cpu --write          # all of it, ten minutes; writes the table of docs/plan-accuracy.md
    python -m benchmarks.plan_cpu --state FILE     # where it keeps what it has measured; start it again to continue

The computer is measured first (`isograd machine measure`), before any step: nothing is fitted to steps. Then every
layout is trained for a few steps in its turn, in ROUNDS rounds, each turn in a world of its own; a time is the median
over rounds. Turns beside which other jobs worked are repeated, and counted if that did not help.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

import isograd as ig
from benchmarks import quiet, tables
from isograd.io import yaml_reader
from isograd.launcher.launch import World
from isograd.plan import machine as machines
from isograd.plan.machine import Machine
from isograd.plan.measure import measure
from isograd.plan.step_time import predict
from isograd.plan.work import Work

LAYOUTS = (
    "dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp", "cp2 ulysses", "cp2 ring", "pp2", "pp2 gpipe",
    "pp2 zb", "pp2 vpp2", "dp4", "dp4 zero1", "dp4 zero3", "tp4", "tp4 sp", "cp4 ulysses", "cp4 ring", "pp4", "pp4 zb",
    "dp2 tp2 sp zero1", "dp2 tp2 zero3", "dp2 cp2 ring zero1", "dp2 cp2 ulysses zero1", "dp2 pp2 zero1",
    "dp2 pp2 vpp2 zero1", "tp2 sp pp2", "cp2 ring tp2 sp", "cp2 ulysses pp2",
)  # fmt: skip
CONFIG = ig.models.TransformerConfig(vocab=1024, hidden=256, layers=4, heads=8, kv_heads=4, mlp=704)
WORK = Work(model=CONFIG, length=256, batch=16, micro_batches=4, dtype="fp32")
ROUNDS, STEPS, ATTEMPTS = 3, 2, 2


def turn(words: str) -> tuple[float, float]:
    """On a rank: (seconds of a step, seconds that this process worked)."""
    mesh = ig.Mesh(words)
    engine = ig.Engine(ig.models.Transformer(CONFIG, mesh), mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-4), clip=1.0)
    rows = WORK.batch // mesh.size("dp")
    window = torch.randint(CONFIG.vocab, (rows, WORK.length + 1), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": window[:, :-1].clone(), "labels": window[:, 1:].clone()}
    found = []
    for _ in range(1 + STEPS):
        began = time.perf_counter()
        engine.train_step(batch, WORK.micro_batches)
        found.append(time.perf_counter() - began)
    return min(found[1:]), time.process_time()


def measured(words: str, patient: bool) -> tuple[float, bool]:
    """(Seconds of a step of the slowest rank, whether other jobs worked meanwhile)."""
    disturbed = True
    for _ in range(ATTEMPTS if patient else 1):
        watch = quiet.Watch()
        with World(ig.Layout.parse(words).world_size) as world:
            turns = world.run(turn, words, timeout=300.0)
        disturbed = watch.disturbed(sum(work for _, work in turns))
        if not disturbed:
            break
    return max(seconds for seconds, _ in turns), disturbed


def table(here: Machine, state: dict[str, Any]) -> str:
    """By layout."""
    lines = ["| layout | ranks | predicted ms | interval | measured ms | error |", "|---|---|---|---|---|---|"]
    off, held = [], 0
    for words in LAYOUTS:
        layout = ig.Layout.parse(words)
        step = predict(WORK, layout, here.shared(layout.world_size))
        seconds = median(state["turns"][words])
        off.append(step.seconds / seconds - 1)
        held += step.low <= seconds <= step.high
        between = f"{step.low * 1e3:.0f} to {step.high * 1e3:.0f}"
        lines.append(
            f"| `{words}` | {layout.world_size} | {step.seconds * 1e3:.0f} | {between} "
            f"| {seconds * 1e3:.0f} | {off[-1]:+.0%} |"
        )
    summary = (
        f"{here.about}; {len(LAYOUTS)} layouts: mean error {mean(map(abs, off)):.1%}, bias {mean(off):+.1%}, "
        f"{held} of {len(LAYOUTS)} intervals hold (a factor of {math.exp(here.rates.spread):.2f} each way); "
        f"{state['disturbed']} of {ROUNDS * len(LAYOUTS)} turns were disturbed by other jobs."
    )
    return "\n".join([summary, "", *lines])


def main() -> None:
    """Measure what is not in the state yet; print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", default="plan_cpu.json", help="file of what has been measured")
    parser.add_argument("--anyway", action="store_true", help="also beside other jobs")
    parser.add_argument("--write", action="store_true", help="write the table into docs/plan-accuracy.md")
    options = parser.parse_args()
    file = Path(options.state)
    state = json.loads(file.read_text()) if file.exists() else {"turns": {}, "disturbed": 0}
    if not options.anyway:
        quiet.refuse_noise()
    if "machine" not in state:
        state["machine"] = machines.text(measure())
        file.write_text(json.dumps(state))
    for number in range(ROUNDS):
        for words in LAYOUTS:
            found = state["turns"].setdefault(words, [])
            if len(found) > number:
                continue
            seconds, disturbed = measured(words, patient=not options.anyway)
            found.append(seconds)
            state["disturbed"] += disturbed
            print(
                f"round {number + 1}, {words}: {seconds * 1e3:.0f} ms{' (disturbed)' if disturbed else ''}", flush=True
            )
            file.write_text(json.dumps(state))
    here = machines.from_dict(yaml_reader.parse(state["machine"]), "measured")
    text = table(here, state)
    print("\n" + text)
    if options.write:
        tables.write("plan-accuracy", "cpu", text)


if __name__ == "__main__":
    main()
