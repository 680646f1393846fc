"""What runs on the ranks. Each contestant has processes of its own, which stay alive between its turns.

`sit` builds it, after a miniature has loaded whatever it loads late, so that memory counts the contestant alone. `turn`
runs some steps between two barriers. `gradients` builds it anew and gives its full gradients of one backward.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.contestant import Contestant, Entry
from benchmarks.task import Sizes, batch
from isograd.comm.wire import sent_by_me
from isograd.pipeline.schedule import Timed

SETTLE_STEPS = 3  # buckets are rebuilt, connections opened, optimizer state is made

_held: dict[str, Any] = {}  # this rank's contestant between two turns, and the memory it started from


def sent_on_loopback() -> int:
    """The bytes that all processes have sent over `lo` since the machine started. Those of this rank's own sockets,
    which benchmarks report, leave out other jobs of the machine; on a quiet one they agree within 0.5 %."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise OSError("no loopback interface in /proc/net/dev")


@dataclass(frozen=True)
class Turn:
    seconds: float  # per step, of this rank
    cpu: float  # seconds per step that this rank's threads worked, in user mode and in the kernel
    sent: float  # bytes per step that this rank's sockets sent
    loopback: float  # bytes per step on the loopback interface: all ranks, and whoever else uses it
    timeline: list[Timed]  # of the last of these steps, in a pipeline


def sit(entry: Entry, sizes: Sizes, settle: int = SETTLE_STEPS) -> None:
    """Build and take the first steps."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rank, world = where()
    with unheard():
        _steps(entry.build(sizes.tiny(), rank, world), sizes.tiny(), settle, 0)
        gc.collect()
        base = _resident()
        contestant = entry.build(sizes, rank, world)
        _steps(contestant, sizes, settle, 0)
    _held.update(contestant=contestant, base=base)


@contextmanager
def unheard() -> Iterator[None]:
    """What peers say of themselves, and what the compilers that they start say, is no result: it is kept off the
    screen, and shown with the error where one is raised."""
    screens = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        except Exception as error:
            file.seek(0)
            error.add_note(file.read()[-4000:].decode(errors="replace"))
            raise
        finally:
            for number, screen in enumerate(screens, 1):
                os.dup2(screen, number)
                os.close(screen)


def turn(sizes: Sizes, steps: int, number: int) -> Turn:
    contestant = _held["contestant"]
    barrier()
    sent, carried = sent_by_me(), sent_on_loopback()
    barrier()
    began, worked = time.perf_counter(), time.process_time()
    _steps(contestant, sizes, steps, number * steps)
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    barrier()
    sent, carried = sent_by_me() - sent, sent_on_loopback() - carried
    return Turn(seconds / steps, cpu / steps, sent / steps, carried / steps, list(contestant.timeline()))


def peak() -> int:
    """The most resident memory (bytes) since `sit`, above what was there before the contestant was built."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - _held["base"]


def gradients(entry: Entry, sizes: Sizes, uneven: bool) -> dict[str, Tensor]:
    """Full gradients of the first step of a fresh contestant; only rank 0 keeps them."""
    _held.clear()
    gc.collect()
    rank, world = where()
    contestant = entry.build(sizes, rank, world)
    contestant.backward(batch(sizes, 0, uneven=uneven))
    found = {}
    for name, gradient in contestant.grads():
        if rank == 0:
            found[name] = gradient.detach().clone()
    return found


def where() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _steps(contestant: Contestant, sizes: Sizes, count: int, first: int) -> None:
    for number in range(first, first + count):
        contestant.step(batch(sizes, number))
    contestant.finish()


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()
