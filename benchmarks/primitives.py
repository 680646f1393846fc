"""What gloo's collectives cost here, beside the same ones built from pair sends, and by the one
primitive that comm/raw.py builds every collective from: the table that it was chosen from.

    python -m benchmarks.primitives                      # W = 2, 4, 8; 4 KB to 64 MB; a markdown table for each W
    python -m benchmarks.primitives --ranks 2 --sizes 4K 1M

A size is that of the whole fp32 tensor: what is reduced, what a gather gives, what each rank cuts into W slices for an
exchange. One repetition calls every primitive once behind a barrier and takes the time of the slowest rank, so a noisy
neighbour hits all of them alike; a cell is the median over repetitions, with the minimum beside it under --minimum.
Before any is timed, each primitive's result is compared with its definition.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from isograd.comm import raw
from isograd.comm.world import new_group
from isograd.launcher.launch import World

own_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

KB, MB = 1 << 10, 1 << 20
SIZES = {"4K": 4 * KB, "64K": 64 * KB, "1M": MB, "16M": 16 * MB, "64M": 64 * MB}
LARGEST = {8: 16 * MB}  # eight ranks on a small machine: the rest is minutes of swapping contexts
SMALL_REPEATS, MEDIUM_REPEATS, LARGE_REPEATS = 200, 40, 9

Primitive = Callable[[], Tensor]


def pair_sends(out: Sequence[Tensor], into: Sequence[Tensor], rank: int) -> None:
    """Send out[i] to rank i and fill into[i] from rank i, all at once. Receives first: arrivals have a place."""
    world = len(out)
    works = [dist.irecv(into[(rank - step) % world], (rank - step) % world) for step in range(1, world)]
    works += [dist.isend(out[(rank + step) % world], (rank + step) % world) for step in range(1, world)]
    for work in works:
        if work is not None:
            work.wait()


def raw_exchange(out: Sequence[Tensor], into: Sequence[Tensor], rank: int) -> None:
    """The same, by comm/raw.py's `exchange`."""
    world = new_group("world", tuple(range(len(out))), rank)
    raw.exchange([[t] for t in out], [[t] for t in into], world).wait()


def ordered_sum(pieces: Sequence[Tensor], total: Tensor) -> Tensor:
    torch.add(pieces[0], pieces[1], out=total)
    for piece in pieces[2:]:
        total += piece
    return total


def primitives(rank: int, world: int, x: Tensor) -> dict[str, Primitive]:
    """Every primitive on one rank's input `x`, with its memory made beforehand, as an engine would hold it."""
    inplace, got, whole = x.clone(), torch.empty_like(x), torch.empty_like(x)
    slices, arrived = x.chunk(world), list(got.chunk(world))
    mine, total = torch.empty_like(slices[rank]), torch.empty_like(slices[rank])

    def collective_all_reduce() -> Tensor:
        dist.all_reduce(inplace)
        return inplace

    def collective_reduce_scatter() -> Tensor:
        own_reduce_scatter(mine, x)
        return mine

    def collective_all_gather() -> Tensor:
        all_gather(whole, slices[rank])
        return whole

    def all_to_all() -> Tensor:
        dist.all_to_all_single(got, x)
        return got

    def broadcast() -> Tensor:
        dist.broadcast(got, 0)
        return got

    def all_to_all_reduce_scatter() -> Tensor:
        dist.all_to_all_single(got, x)
        return ordered_sum(arrived, total)

    found = {
        "all_reduce": collective_all_reduce,
        "reduce_scatter_tensor": collective_reduce_scatter,
        "all_gather_into_tensor": collective_all_gather,
        "all_to_all_single": all_to_all,
        "broadcast": broadcast,
        "reduce-scatter = all_to_all_single + sum": all_to_all_reduce_scatter,
    }
    return found | sent(rank, x, pair_sends, "pair sends") | sent(rank, x, raw_exchange, "raw.exchange")


def sent(rank: int, x: Tensor, send: Callable[..., None], by: str) -> dict[str, Primitive]:
    """The primitives that are built of sends."""
    world = dist.get_world_size()
    got, whole = torch.empty_like(x), torch.empty_like(x)
    slices, arrived, gathered = x.chunk(world), list(got.chunk(world)), list(whole.chunk(world))
    total = torch.empty_like(slices[rank])
    gathered[rank].copy_(slices[rank])

    def gather() -> Tensor:
        send([slices[rank]] * world, gathered, rank)
        return whole

    def exchange() -> Tensor:
        arrived[rank].copy_(slices[rank])
        send(slices, arrived, rank)
        return got

    def reduce_scatter() -> Tensor:
        send(slices, arrived, rank)
        return ordered_sum([*arrived[:rank], slices[rank], *arrived[rank + 1 :]], total)

    def all_reduce() -> Tensor:
        send(slices, arrived, rank)
        ordered_sum([*arrived[:rank], slices[rank], *arrived[rank + 1 :]], gathered[rank])
        send([gathered[rank]] * world, gathered, rank)
        return whole

    def swap() -> Tensor:
        send([x, x], [got, got], rank)
        return torch.add(*((x, got) if rank == 0 else (got, x)), out=whole)

    found = {
        f"{by}, gather": gather,
        f"{by}, exchange": exchange,
        f"reduce-scatter = {by} + sum": reduce_scatter,
        f"all-reduce = {by}, reduce-scatter + gather": all_reduce,
    }
    return found | ({f"all-reduce = {by}, one swap + add": swap} if world == 2 else {})


def definition(name: str, inputs: Sequence[Tensor], rank: int) -> Tensor | None:
    """What a primitive gives, from all ranks' inputs; None for those that only move into the memory of another."""
    world = len(inputs)
    if name.startswith(("all_reduce", "all-reduce")):
        return torch.stack(list(inputs)).sum(0)
    if name.startswith("reduce"):
        return torch.stack(list(inputs)).sum(0).chunk(world)[rank]
    if name == "broadcast":
        return None
    if "gather" in name:
        return torch.cat([x.chunk(world)[i] for i, x in enumerate(inputs)])
    return torch.cat([x.chunk(world)[rank] for x in inputs])


def check() -> None:
    """Each primitive once, on small integers: exact."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [torch.arange(world * 3, dtype=torch.float32) * (i + 1) for i in range(world)]
    for name in primitives(rank, world, inputs[rank]):
        got = primitives(rank, world, inputs[rank].clone())[name]()
        want = definition(name, inputs, rank)
        if want is not None and not torch.equal(got, want):
            raise AssertionError(f"{name} on rank {rank}: {got.tolist()}, expected {want.tolist()}")


def measure(size: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every repetition on this rank, by primitive."""
    rank, world = dist.get_rank(), dist.get_world_size()
    calls = primitives(rank, world, torch.zeros(size // 4))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            call()
            if repeat:  # the first one opens connections and touches memory
                seconds[name].append(time.perf_counter() - began)
    return seconds


def repeats_for(size: int) -> int:
    return SMALL_REPEATS if size < MB else MEDIUM_REPEATS if size < 16 * MB else LARGE_REPEATS


def table(world: int, sizes: Sequence[str], minimum: bool) -> str:
    """The markdown table of one world size."""
    fitting = [name for name in sizes if SIZES[name] <= LARGEST.get(world, SIZES[name])]
    columns: dict[str, dict[str, str]] = {}
    with World(world) as ranks:
        ranks.run(check, timeout=60)
        for size in fitting:
            print(f"W={world}, {size} ...", flush=True)
            per_rank = ranks.run(measure, SIZES[size], repeats_for(SIZES[size]), timeout=600)
            for name in per_rank[0]:
                slowest = [max(times) * 1e3 for times in zip(*(r[name] for r in per_rank), strict=True)]
                cell = f"{statistics.median(slowest):.2f}" + (f" ({min(slowest):.2f})" if minimum else "")
                columns.setdefault(name, {})[size] = cell
    lines = [f"| W = {world}, ms | " + " | ".join(f"{size}B" for size in fitting) + " |"]
    lines.append("|---|" + "---:|" * len(fitting))
    return "\n".join(lines + [f"| {n} | " + " | ".join(row[s] for s in fitting) + " |" for n, row in columns.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--minimum", action="store_true", help="the fastest repetition in brackets")
    options = parser.parse_args()
    for world in options.ranks:
        print("\n" + table(world, options.sizes, options.minimum) + "\n", flush=True)


if __name__ == "__main__":
    main()
