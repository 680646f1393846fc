"""What hiding the gather of parameters (zero1, zero2) under the next forward would win, and which reads a guard sees.

    python -m benchmarks.next_forward race [BATCH] [TURNS] [DTYPE]   # a prototype beside the engine, 2 ranks
    python -m benchmarks.next_forward simulate                       # planned steps of H100s, gather hidden or not
    python -m benchmarks.next_forward reads                          # reads of a parameter that guards would see

The engine does not do it: docs/log.md of 2026-11-23 (noon) says why. The prototype starts the gathers at the end of the
step and waits for a bucket in the first forward of a module whose parameters are in it; nothing guards other reads.
"""

from __future__ import annotations

import copy
import ctypes
import io
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

import isograd as ig
from benchmarks.contestant import adamw
from benchmarks.model import Decoder
from benchmarks.task import Sizes, batch
from isograd.comm import raw
from isograd.engine import zero
from isograd.engine.plan import Bucket
from isograd.layout import Layout
from isograd.models import TransformerConfig
from isograd.plan import machine
from isograd.plan.step_time import predict
from isograd.plan.work import Habits, Work

Gathers = Sequence[tuple[Bucket, Sequence[Tensor]]]
WARM, STEPS = 2, 2  # turns; steps of a turn

# -- the prototype


class Late:
    """The gathers of one engine, waited for by the forwards that need them."""

    def __init__(self, engine: ig.Engine) -> None:
        self.pending: list[tuple[Bucket, Any, Any, Any]] = []
        self.waited = 0.0  # seconds
        homes = {id(slot.parameter): bucket for bucket in engine.plan.buckets for slot in bucket.slots}
        for module in engine.model.modules():
            mine = {homes[id(p)] for p in module.parameters(recurse=False) if id(p) in homes}
            if mine:
                module.register_forward_pre_hook(lambda *_, mine=mine: self.need(mine))

    def gather(self, work: Gathers) -> None:
        """In place of engine/zero.py's, which waits. In the order of a forward."""
        for bucket, wholes in reversed(work):
            packed = bucket.bundle.pack(wholes)
            handle = zero.gather_rows(bucket.bundle.slots, packed, bucket.owners, bucket.number + 100)
            self.pending.append((bucket, packed, wholes, handle))

    def need(self, buckets: set[Bucket]) -> None:
        """Wait for these."""
        began = time.perf_counter()
        for bucket, packed, wholes, handle in [one for one in self.pending if one[0] in buckets]:
            handle.wait()
            bucket.bundle.unpack(packed, wholes)
        self.pending = [one for one in self.pending if one[0] not in buckets]
        self.waited += time.perf_counter() - began


def steps(engine: ig.Engine, sizes: Sizes, turn: int) -> None:
    for number in range(STEPS):
        mine = batch(sizes, STEPS * turn + number).share(engine.mesh.rank, 2)
        engine.backward(engine.model(mine.tokens, mine.labels), weight=mine.count)
        engine.step()


def race(rows: int, turns: int, dtype: torch.dtype) -> tuple[dict[str, list[tuple[float, float, float]]], bool]:
    """Of each: seconds, CPU seconds and seconds in the gather or waiting for it, of each turn; the same bits?"""
    torch.set_num_threads(1)
    sizes, order, engines = Sizes(batch=rows), random.Random(1), dict[str, ig.Engine]()
    for name in ("now", "late"):
        torch.manual_seed(0)
        engines[name] = ig.Engine(Decoder(sizes).to(dtype), ig.Mesh("dp2 zero1"), adamw)
    late, plain, inside = Late(engines["late"]), zero._gather, [0.0]

    def timed(work: Gathers) -> None:
        began = time.perf_counter()
        plain(work)
        inside[0] += time.perf_counter() - began

    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    world = engines["now"].mesh.group("world")
    for turn in range(turns + WARM):
        for name in order.sample(sorted(engines), len(engines)):
            zero._gather = timed if name == "now" else late.gather
            raw.barrier(world)
            inside[0] = late.waited = 0.0
            began, worked = time.perf_counter(), time.process_time()
            steps(engines[name], sizes, turn)
            late.need({bucket for bucket, *_ in late.pending})
            raw.barrier(world)
            spent = time.perf_counter() - began, time.process_time() - worked
            found[name].append((*spent, inside[0] if name == "now" else late.waited))
    pairs = zip(engines["now"].model.parameters(), engines["late"].model.parameters(), strict=True)
    return {name: all_of[WARM:] for name, all_of in found.items()}, all(torch.equal(a, b) for a, b in pairs)


def print_race(rows: int = 2, turns: int = 30, dtype: str = "float32") -> None:
    for rank, (found, same) in enumerate(ig.launch(race, 2, rows, turns, getattr(torch, dtype))):
        print(f"rank {rank}, the same bits: {same}")
        for name, all_of in found.items():
            wall, work, inside = (1e3 / STEPS * median(column) for column in zip(*all_of, strict=True))
            print(f"  {name:5} {wall:7.1f} ms a step, CPU {work:7.1f} ms, in the gather or waiting {inside:6.1f} ms")
        for place, what in enumerate(("clock", "CPU time")):
            ratios = sorted(b[place] / a[place] for a, b in zip(found["now"], found["late"], strict=True))
            few = len(ratios) // 10
            print(f"  late / now by {what}: {median(ratios):.3f} ({ratios[few]:.3f} to {ratios[-1 - few]:.3f})")


# -- the simulation

LLAMAS = {
    "1b": {"hidden": 2048, "layers": 16, "heads": 32, "mlp": 8192},
    "8b": {"hidden": 4096, "layers": 32, "heads": 32, "mlp": 14336},
    "70b": {"hidden": 8192, "layers": 80, "heads": 64, "mlp": 28672},
}
RUNS = [  # model, layout, sequences, tokens of each, micro-batches
    ("1b", "dp8 zero1", 8, 4096, 1), ("1b", "dp8 zero1", 32, 4096, 4), ("1b", "dp64 zero1", 64, 4096, 1),
    ("8b", "dp8 zero1", 8, 8192, 1), ("8b", "dp8 tp8 sp zero1", 8, 8192, 1), ("8b", "dp64 zero1", 64, 8192, 1),
    ("8b", "dp64 zero1", 512, 8192, 8), ("8b", "dp256 zero1", 256, 8192, 1), ("8b", "dp32 tp8 sp zero1", 64, 8192, 2),
    ("70b", "dp16 tp8 sp pp4 zero1", 1024, 8192, 64), ("70b", "dp32 tp8 sp zero1", 32, 8192, 1),
]  # fmt: skip


def simulate() -> None:
    """As plan/step_time.py counts it: the gather after the optimizer, alone or beside 0.8 of a forward."""
    cards = machine.load("h100")
    for name, layout, rows, length, micro in RUNS:
        config = TransformerConfig.from_dict({"vocab": 128256, "kv_heads": 8, **LLAMAS[name]})
        work = Work(model=config, length=length, batch=rows, micro_batches=micro)
        hiding = replace(work, habits=replace(Habits(), hides_parameters=0.8))
        now, hidden = (predict(one, Layout.parse(layout), cards).seconds for one in (work, hiding))
        told = f"{name:4}{layout:24}{rows:5} x {length} in {micro:2}"
        print(f"{told}: {now * 1e3:9.1f} ms, gather hidden {hidden * 1e3:9.1f} ms: {hidden / now:.3f}")


# -- the guards


class Watching:
    """Notes that a call was given memory of the parameter."""

    seen = False

    def look(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves = tree.tree_leaves((args, kwargs or {}))
        Watching.seen |= any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() == ADDRESS[0] for t in leaves)
        return func(*args, **(kwargs or {}))


class Functions(Watching, TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.look(func, args, kwargs)


class Dispatched(Watching, TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.look(func, args, kwargs)


class Noticing(dict[str, Any]):
    """In place of a module's `_parameters`."""

    def __getitem__(self, key: str) -> Any:
        Watching.seen = True
        return super().__getitem__(key)

    def items(self) -> Any:
        Watching.seen = True
        return super().items()


ADDRESS = [0]


@torch.jit.script
def compiled(x: Tensor) -> Tensor:
    return x.sum() * 2


def reads() -> None:
    """Ways to read a parameter, and which guards would know of it: a dict, a function mode, a dispatch mode."""
    model = nn.Linear(4, 4)
    held, view, array = model.weight, model.weight.data, model.weight.detach().numpy()
    ADDRESS[0] = held.untyped_storage().data_ptr()
    saved = [held.sum()]

    def in_thread() -> None:
        thread = threading.Thread(target=held.sum)
        thread.start()
        thread.join()

    ways: dict[str, Callable[[], Any]] = {
        "model.weight.sum()": lambda: torch.sum(model.weight),
        "model.state_dict(), copy.deepcopy(model)": lambda: (model.state_dict(), copy.deepcopy(model)),
        "a reference kept from before: p.sum()": lambda: torch.sum(held),
        "functional.linear(x, p) in another module's forward": lambda: nn.functional.linear(torch.ones(1, 4), held),
        "a view kept from before: view.sum()": lambda: torch.sum(view),
        "torch.save(p)": lambda: torch.save(held, io.BytesIO()),
        "p.tolist(), repr(p)": lambda: (held.tolist(), repr(held)),
        "a function of torch.jit, given p": lambda: compiled(held),
        "a backward of a graph that p is saved in": lambda: torch.autograd.backward(saved[0]),
        "another thread: p.sum()": in_thread,
        "a numpy array kept from before": array.sum,
        "an address kept from before": lambda: ctypes.string_at(ADDRESS[0], 4),
    }
    print(f"{'':54}dict   function mode   dispatch mode")
    for name, read in ways.items():
        told = []
        for guard in (None, Functions, Dispatched):
            saved[0] = held @ torch.ones(4, 1, requires_grad=True)
            saved[0] = saved[0].sum()
            plain, Watching.seen = model._parameters, False
            if guard is None:
                model.__dict__["_parameters"] = Noticing(plain)
                read()
                model.__dict__["_parameters"] = plain
            else:
                with guard():
                    read()
            told.append("yes" if Watching.seen else "NO")
        print(f"{name:54}{told[0]:7}{told[1]:16}{told[2]}")


if __name__ == "__main__":
    what, *rest = sys.argv[1:] or ["race"]
    if what == "race":
        numbers = [int(word) for word in rest[:2]]
        print_race(*numbers, **({"dtype": rest[2]} if len(rest) > 2 else {}))
    else:
        {"simulate": simulate, "reads": reads}[what]()
