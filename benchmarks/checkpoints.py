"""Saving and loading beside torch.distributed.checkpoint, in one run: the same model, sharded alike, on the same disk.

    python -m benchmarks.checkpoints                     # 2 ranks, 20 million parameters, about a minute
    python -m benchmarks.checkpoints --large --rounds 5 --folder /somewhere     # 83 million
    python -m benchmarks.checkpoints --manifest          # what a manifest of 512 ranks costs, of 360 tensors

Ours: zero3, CheckpointManager. Theirs: FSDP2, get_state_dict, async_save, load. Both keep parameters and AdamW's state,
12 bytes for each parameter, half of it on each rank, and both flush files to the disk. Ours also reads every file again
before the checkpoint gets its name, and hashes every piece, when it saves and when it loads. Rounds alternate; medians
over rounds of the slower rank, in seconds and in seconds of CPU (all threads of its process). "pause": until training
may go on. "whole": until the checkpoint is on the disk. "load": from files that the page cache holds. The checkpoint of
the round before is removed between rounds by both.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import isograd as ig
from benchmarks.data_peers import FSDP2
from benchmarks.ours import IsogradData
from benchmarks.task import Sizes, batch
from isograd.checkpoint import manifest
from isograd.launcher.launch import World

SMALL, LARGE = Sizes(), Sizes(hidden=768, layers=10, heads=12, mlp=2048)
MOMENTS = ("pause", "whole", "load")
Times = dict[str, Tensor]  # (seconds, of CPU)


def seconds(run: Callable[[], Any]) -> Tensor:
    """Of the slower rank; all begin together."""
    dist.barrier()
    began = torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)
    run()
    took = torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64) - began
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took


def remove(place: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place)


class Ours:
    name = "isograd"

    def __init__(self, sizes: Sizes, home: Path, rank: int, world: int) -> None:
        self.contestant = IsogradData(sizes, rank, world, zero=3)
        self.contestant.step(batch(sizes, 0))
        self.keeper, self.home = ig.checkpoint.CheckpointManager(home, self.contestant.engine), home

    def round(self, number: int) -> Times:
        began = seconds(lambda: self.keeper.save(number))
        rest = seconds(self.keeper.wait)
        loaded = seconds(self.keeper.load)
        remove(self.home / f"step-{number:08d}")
        return {"pause": began, "whole": began + rest, "load": loaded}


class Theirs:
    name = "torch DCP"

    def __init__(self, sizes: Sizes, home: Path, rank: int, world: int) -> None:
        self.contestant = FSDP2(sizes, rank, world, reshard=True)
        self.contestant.step(batch(sizes, 0))
        self.home = home
        self.group = dist.new_group(backend="gloo")  # its thread calls collectives: on the world's group they meet ours

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.contestant.model, self.contestant.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, place: Path) -> Any:
        return dcp.async_save(self.state(), checkpoint_id=place, process_group=self.group)

    def load(self, place: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=place)
        set_state_dict(
            self.contestant.model,
            self.contestant.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def round(self, number: int) -> Times:
        place, waiting = self.home / f"step-{number}", []
        began = seconds(lambda: waiting.append(self.save(place)))
        rest = seconds(waiting[0].result)
        loaded = seconds(lambda: self.load(place))
        remove(place)
        return {"pause": began, "whole": began + rest, "load": loaded}


def race(sizes: Sizes, home: Path, rounds: int) -> list[tuple[str, Times]]:
    """Runs inside every rank."""
    warnings.simplefilter("ignore")
    rank, world = dist.get_rank(), dist.get_world_size()
    contestants = [Ours(sizes, home / "ours", rank, world), Theirs(sizes, home / "theirs", rank, world)]
    found = []
    for number in range(rounds + 1):
        for one in contestants if number % 2 else reversed(contestants):
            times = one.round(number + 1)
            if number:  # the first makes buffers
                found.append((one.name, times))
    contestants[0].keeper.close()
    return found


def manifest_of(ranks: int, tensors: int) -> list[tuple[str, float]]:
    """Seconds (and MB) of the list of pieces, of tensors that every rank holds rows of."""
    box_of = [[[rank * 56, (rank + 1) * 56], [0, 8192]] for rank in range(ranks)]
    run = {"groups": [], "loss_scale": None}
    notes = []
    for rank in range(ranks):
        listed = {f"model/{n}": [[ranks * 56, 8192], "F32", box_of[rank], "0" * 32] for n in range(tensors)}
        notes.append({"file": f"rank-{rank:05d}.safetensors", "bytes": 1 << 40, "tensors": listed, "counts": {}})
    found, at = [], time.perf_counter()

    def lap(what: str) -> None:
        nonlocal at
        found.append((what, time.perf_counter() - at))
        at = time.perf_counter()

    with tempfile.TemporaryDirectory() as home:
        merged = manifest.merge(notes, {"step": 1, "layout": "", "model": None, "extra": {}, "run": run})
        lap("merge")
        merged.write(Path(home))
        lap("write")
        manifest.read(Path(home))
        lap("read")
        found.append(("MB", (Path(home) / manifest.NAME).stat().st_size / 1e6))
    return [("pieces", ranks * tensors), *found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--large", action="store_true", help="83 million parameters")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--manifest", action="store_true", help="only time the manifest of many ranks")
    options = parser.parse_args()
    if options.manifest:
        print(", ".join(f"{what} {value:.3g}" for what, value in manifest_of(ranks=512, tensors=360)))
        return
    sizes = LARGE if options.large else SMALL
    with tempfile.TemporaryDirectory(dir=options.folder) as home, World(options.ranks) as world:
        found = world.run(race, sizes, Path(home), options.rounds)[0]
    size = 12 * sizes.parameters() / 2**20
    for clock, of in enumerate(("seconds", "seconds of CPU")):
        table = Table(title=f"{size:.0f} MiB on {options.ranks} ranks: {of}, and of torch's")
        for heading in ("", *MOMENTS):
            table.add_column(heading, justify="left" if not heading else "right")
        medians = {
            name: {m: statistics.median(float(times[m][clock]) for who, times in found if who == name) for m in MOMENTS}
            for name in ("torch DCP", "isograd")
        }
        for name, took in medians.items():
            table.add_row(name, *(f"{took[m]:.3f} ({took[m] / medians['torch DCP'][m]:.2f})" for m in MOMENTS))
        Console().print(table)


if __name__ == "__main__":
    main()
