"""Layouts that people chose beside the best that `isograd plan` finds for the same model, devices, batch and program.

    python -m benchmarks.plan_choices ground_truth.csv --write   # the table of docs/plan-accuracy.md; two minutes

A choice is the fastest published run of a model on the most devices, of publishers that chose their layouts to be
fast (vTrain and MosaicML measured grids and one kind of layout). Both times are predictions, so that what the predictor
gets wrong about a machine is wrong in both. The search may use what isograd has and the publisher's program may not
have had: zero-bubble schedules, Ulysses, sp, gradients that leave with each micro-batch.
"""

from __future__ import annotations

import argparse

from benchmarks import tables
from benchmarks.plan_accuracy import Row, bytes_of, read, with_rates
from isograd.errors import PlanError
from isograd.plan.search import Candidate, search
from isograd.plan.step_time import predict

CHOOSERS = ("MT-NLG", "NVIDIA", "bigscience", "Nemotron", "torchtitan")
SHARE = 0.88  # of the best product's rate, by benchmarks/plan_accuracy.py
MOST = 1100  # devices
NEAR = 0.05


def choices(rows: list[Row]) -> list[Row]:
    """The fastest run of each model and device, on the most devices."""
    best: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.seconds is None or row.publisher not in CHOOSERS or row.layout.world_size > MOST:
            continue
        if row.publisher == "bigscience" and row.work.model.layers != 70:
            continue  # the model that was trained in the end
        if row.publisher == "torchtitan" and (row.work.length > 8192 or row.layout.world_size < 100):
            continue
        key = (row.publisher, row.work.model.hidden, row.work.model.layers, row.kind)
        rank = (-row.layout.world_size, row.seconds)
        if key not in best or rank < (-best[key].layout.world_size, best[key].seconds):
            best[key] = row
    return list(best.values())


def main() -> None:
    """Search for each choice; print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = [
        "| run | chosen layout, micro-batches | predicted | best found | predicted | chosen / best | why |",
        "|---|---|---|---|---|---|---|",
    ]
    near = 0
    found = choices(read(options.csv)[0])
    for row in found:
        machine = with_rates(row, SHARE)
        mine = predict(row.work, row.layout, machine).seconds
        name = f"{row.publisher}, {row.label.split()[0]}, {row.label.split()[1]} x {row.kind}"
        chosen = f"`{row.layout}`, {row.work.micro_batches}"
        try:
            recomputes = tuple(dict.fromkeys((row.work.recompute, "full")))
            best = search(row.work, row.layout.world_size, machine, shown=1, recomputes=recomputes).best[0]
        except PlanError as error:
            lines.append(f"| {name} | {chosen} | {mine:.2f} s | none: {error.what} | | | |")
            continue
        ratio = mine / best.step.seconds
        near += ratio <= 1 + NEAR
        lines.append(
            f"| {name} | {chosen} | {mine:.2f} s | `{best.layout}`, {best.work.micro_batches} "
            f"| {best.step.seconds:.2f} s | {ratio:.2f} | {why(row, best) if abs(ratio - 1) > NEAR else ''} |"
        )
        print(lines[-1], flush=True)
    text = "\n".join([f"{near} of {len(found)} choices are within {NEAR:.0%} of the best.", "", *lines])
    if options.write:
        tables.write("plan-accuracy", "choices", text)
    else:
        print(text)


def why(row: Row, best: Candidate) -> str:
    """What the best does that the run did not, in the order of what it can be held against."""
    a, b = row.layout, best.layout
    said = []
    if bytes_of(row) > row.machine.memory_gb * 1e9:
        said.append("the run is said not to fit")
    if b.schedule == "zb":
        said.append("zero-bubble schedule")
    if b.sp and not a.sp:
        said.append("sp, which the program did not have")
    if b.zero == 3 and a.zero != 3:
        said.append("ZeRO 3")
    if b.vpp > a.vpp:
        said.append(f"vpp{b.vpp}, not vpp{a.vpp}")
    for axis in ("tp", "pp", "cp", "ep"):
        mine, other = getattr(a, axis), getattr(b, axis)
        if mine != other:
            said.append(f"{axis}{other}, not {axis}{mine}")
    if best.work.recompute != row.work.recompute:
        said.append(f"recompute {best.work.recompute}")
    rows = [one.work.batch / one.layout.dp / one.work.micro_batches for one in (row, best)]
    if rows[0] != rows[1]:
        said.append(f"{rows[1]:g} sequences a micro-batch, not {rows[0]:g}")
    return "; ".join(said)


if __name__ == "__main__":
    main()
