"""Beside FSDP2 and DDP on imagined cards: what a step of Llama-8B-shaped blocks launches, copies, sends and waits for.

    python -m benchmarks.imagined_race            # writes the table of docs/imagined-gpu.md

Nothing here was measured on a GPU: tests/imagined_cuda counts, and the timeline is arithmetic. The model is a sixteenth
as wide as the blocks of Llama 8B, and all contestants run the same plain code, eager, on two ranks. FSDP2 is used as
torchtitan's recipe does (every block and the root, bf16 with sums in fp32, resharded after forward, fused AdamW, the
norm clipped); isograd at zero3 and zero1 has bf16 parameters and fp32 masters; DDP has fp32 parameters and autocast.

The timeline: each stream is a clock. A launch takes the longest of the machine file's time per operator, its products
at the rate of bf16, and its bytes; a collective its latency and its bytes; events make one clock wait for another.
Sizes are those of the full width and of 8,192 tokens a rank. "Exposed" is by how much the model's stream has waited.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks import tables
from benchmarks.model import Decoder
from benchmarks.task import Sizes
from tests.imagined_cuda import Result, device, run

WIDTH, TOKENS = 16, 96  # the blocks are so many times narrower; a rank has so many tokens: no other size is 96
SIZES = Sizes(vocab=2048, hidden=256, layers=4, heads=2, mlp=896, seq=TOKENS, batch=2)
FULL_TOKENS = 8192
WEIGHTS, BOTH, ROWS = WIDTH**2, WIDTH**2 * FULL_TOKENS / TOKENS, WIDTH * FULL_TOKENS / TOKENS  # how much larger
WARMUP, LR, CLIP = 2, 3e-4, 1.0
FROM_HOST = 1  # wait of a step, in which its batch is copied from pageable memory
COPIES = ("copy", "clone", "cat", "contiguous", "to_copy", "pack")


class Timeline(TorchDispatchMode):
    """One clock a stream, in microseconds; and what was launched, by where."""

    def __init__(self, machine: Any) -> None:
        super().__init__()
        self.machine, self.clocks, self.exposed, self.copied = machine, Counter[Any](), 0.0, 0
        self.events: dict[int, float] = {}
        self.ends: list[float] = []  # of collectives
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor) and t.is_cuda]
        if tensors and not function.is_view:
            self._launch(function, tensors, args, kwargs or {}, out)
        return out

    def _launch(self, function: Any, tensors: list[Tensor], args: Any, kwargs: Any, out: Any) -> None:
        self.places[f"{function} at {device.lib.site()}"] += 1
        machine, rows = self.machine, any(TOKENS in t.shape for t in tensors)
        moved = sum(t.nbytes for t in tensors)
        if any(word in str(function) for word in COPIES):
            self.copied += moved // 2
        count = flop_registry.get(function.overloadpacket)
        flops = count(*args, **kwargs, out_val=out) * (BOTH if rows else WEIGHTS) if count else 0
        seconds = flops / (machine.tflops["bf16"] * 1e12 * machine.rates.matmul["bf16"])
        seconds = max(seconds, moved * (ROWS if rows else WEIGHTS) / (machine.memory_gb_s * 1e9 * machine.rates.memory))
        self.clocks[self.now] += max(machine.rates.operator_us, seconds * 1e6)

    @property
    def now(self) -> Any:
        return torch.cuda.current_stream().stream_id

    def waits(self, stream: Any, until: float) -> None:
        late = until - self.clocks[stream]
        if late > 0:
            self.exposed += late if stream == 0 and until in self.ends else 0.0
            self.clocks[stream] = until

    def send(self, size: int, ranks: int, stream: Any) -> None:
        """A collective whose result, or input, is so large."""
        link = self.machine.inside
        bytes_moved = size * WEIGHTS * (ranks - 1) / ranks
        self.clocks[stream] += link.latency_us + bytes_moved / (link.gb_s * 1e3 * self.machine.rates.links)
        self.ends.append(self.clocks[stream])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Streams, events and collectives, as Python calls them."""
        from tests.imagined_cuda import communicator

        record, wait = torch.cuda.Event.record, torch.cuda.Event.wait
        enqueue, finished = communicator.Communicator.enqueue, communicator.Work.wait

        def recorded(event: Any, stream: Any = None) -> None:
            record(event, stream)
            self.events[id(event)] = self.clocks[(stream or torch.cuda.current_stream()).stream_id]

        def waited(event: Any, stream: Any = None) -> None:
            wait(event, stream)
            self.waits((stream or torch.cuda.current_stream()).stream_id, self.events.get(id(event), 0.0))

        def sent(communicator: Any, work: Any, asynchronous: bool) -> Any:
            caller, own = self.now, ("nccl", communicator.name)
            size = max(sum(t.nbytes for t in work.reads), sum(t.nbytes for t in work.writes))
            enqueue(communicator, work, asynchronous)
            stream = own if asynchronous else caller
            if asynchronous:
                self.clocks[own] = max(self.clocks[own], self.clocks[caller])
            self.send(size, len(communicator.ranks), stream)
            work.ends = self.clocks[stream]
            return work

        def joined(work: Any, timeout: Any = None) -> bool:
            done = finished(work, timeout)
            self.waits(self.now, work.ends)
            return done

        IN_USE.append(self)
        with (
            patch.object(torch.cuda.Event, "record", recorded),
            patch.object(torch.cuda.Event, "wait", waited),
            patch.object(communicator.Communicator, "enqueue", sent),
            patch.object(communicator.Work, "wait", joined),
            patch.object(communicator.Work, "synchronize", joined),
            self,
        ):
            yield


IN_USE: list[Timeline] = []


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def batch_of(rank: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(sizes.vocab, (1, sizes.seq + 1), generator=torch.Generator().manual_seed(rank)).cuda()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def isograd_step(layout: str, sizes: Sizes = SIZES) -> Callable[[int], None]:
    import isograd as ig

    mesh = ig.Mesh(layout)
    model = Decoder(sizes).to(mesh.device, torch.bfloat16)
    engine = ig.Engine(model, mesh, adamw, clip=CLIP)

    def step(rank: int) -> None:
        tokens, labels = batch_of(rank, sizes)
        engine.backward(model(tokens, labels), weight=sizes.seq)
        engine.step_async()  # read in the next step: the others' losses and norms are read by nobody

    return step


def fsdp2_step(sizes: Sizes = SIZES) -> Callable[[int], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Decoder(sizes).cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cuda", (torch.distributed.get_world_size(),)),
        "mp_policy": policy,
    }
    for block in model.blocks:
        fully_shard(block, **options, reshard_after_forward=True)
    fully_shard(model, **options)
    optimizer = adamw(model.parameters())

    def step(rank: int) -> None:
        model(*batch_of(rank, sizes)).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp_step() -> Callable[[int], None]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Decoder(SIZES).cuda(), gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters())

    def step(rank: int) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(*batch_of(rank, SIZES))
        loss.backward()
        for timeline in IN_USE:  # DDP's reducer waits in C++, at the end of backward
            timeline.waits(0, max(timeline.ends))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


CONTESTANTS: dict[str, Callable[[], Callable[[int], None]]] = {
    "isograd zero3": partial(isograd_step, "dp2 zero3"),
    "FSDP2": fsdp2_step,
    "isograd zero1": partial(isograd_step, "dp2 zero1"),
    "DDP": ddp_step,
}


def costs() -> Counter[str]:
    return Counter({f"{kind} at {first}": n for kind, _, first, _, n in device.lib.findings()})


def one_step(name: str) -> dict[str, Any]:
    """The numbers of one step, on this rank. Losses are not read, by nobody."""
    from isograd.plan import machine
    from tests.imagined_cuda import communicator

    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    step = CONTESTANTS[name]()
    rank = torch.distributed.get_rank()
    for _ in range(WARMUP):
        step(rank)
    before, calls, waits = Counter(device.lib.launches()), len(communicator.World.calls), costs()
    torch.cuda.reset_peak_memory_stats()
    step(rank)
    launches = Counter(device.lib.launches()) - before
    found = {
        "launches": sum(launches.values()),
        "collectives": len(communicator.World.calls) - calls,
        "waits": sum(n for place, n in (costs() - waits).items() if place.startswith("host wait")) - FROM_HOST,
        "peak": torch.cuda.max_memory_allocated(),
        "operators": dict(launches),
        "places": dict(costs() - waits),
    }
    timeline = Timeline(machine.load("h100"))
    with timeline.watching():
        step(rank)
    sites = dict(timeline.places)
    return found | {"copied": timeline.copied, "sites": sites, "exposed": timeline.exposed, "time": timeline.clocks[0]}


def table(results: dict[str, Result]) -> str:
    lines = [
        "| one step, imagined | launches | host waits | copied | collectives | exposed, of the step | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        v = result.value
        lines.append(
            f"| {name} | {v['launches']:,} | {v['waits']} | {v['copied'] / 2**20:,.0f} MiB | {v['collectives']} | "
            f"{v['exposed'] / 1e3:.1f} of {v['time'] / 1e3:.0f} ms | {v['peak'] / 2**20:,.0f} MiB |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS))
    parser.add_argument("--show", action="store_true", help="print operators and places, write no table")
    chosen, results = parser.parse_args(), {}
    for name in chosen.only:
        from benchmarks.imagined_race import one_step as of_module  # not of __main__: ranks import it

        results[name] = run(of_module, 2, name, join=not name.startswith("isograd"), limit=300)[0]
        if results[name].error:
            raise SystemExit(results[name].error)
        if chosen.show:
            value = results[name].value
            print(name, value["places"], *Counter(value["sites"]).most_common(60), sep="\n    ")
    print(table(results))
    if not chosen.show:
        tables.write("imagined-gpu", "imagined-race", table(results))


if __name__ == "__main__":
    main()
