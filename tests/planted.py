"""Faults that ranks do to themselves at points of a run: for tests/faults.py (one or two a run) and tests/soak.py.

A `Faults` is given to the ranks as `RunOptions.before_step`. Each of its faults happens once in a run, however often
its step is done again: a file per fault says that it has happened, and when.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from isograd.checkpoint import CheckpointManager, write
from isograd.checkpoint.write import SaveJob
from isograd.comm import world
from isograd.elastic import Copies, copies
from isograd.engine import norm
from isograd.engine.reducer import Reducer
from isograd.io import plots
from isograd.train.language import LanguageTask
from isograd.train.run import peers, signals

# In the order of a step. `reading`: in the thread that reads the batch of the fault's step, during the step before it.
IN_A_STEP = (
    "forward", "backward", "first bucket", "last bucket", "before the vote", "after the vote", "copy made",
    "copies arriving",
)  # fmt: skip
# Of survivors, and only after another fault of the same step.
MEETING_AGAIN = ("joining", "meeting again", "loading")
RESCUING = "writing copies"  # of one that survived a fault of the same step, as a checkpoint
SAVING = tuple(f"saving: {phase}" for phase in ("begun", "half written", "written", "recorded"))
SAVING_FIRST = tuple(f"saving: {phase}" for phase in ("gathered", "listed", "named", "pruned"))  # on rank 0 only
POINTS = (*IN_A_STEP, "reading", "evaluation", *SAVING, *SAVING_FIRST, *MEETING_AGAIN, RESCUING)


@dataclass(frozen=True)
class Fault:
    """`step`: how many are finished when it happens; of a point after a step, such as saving, this step included."""

    point: str
    step: int
    rank: int
    does: str = "kill"


@dataclass(frozen=True)
class Faults:
    """All faults of a run. `folder`: where each leaves its file. `most`: after so many no other one happens."""

    planned: tuple[Fault, ...]
    folder: Path
    most: int | None = None

    def __call__(self, step: int, task: LanguageTask) -> None:
        """Before each step, on each rank."""
        _now.faults, _now.rank, _now.step, _now.sent = self, task.mesh.rank, step, False
        _plant()
        if getattr(task, "planted", None) is None:
            _plant_in(task)

    def happened(self) -> list[int]:
        """The numbers of those that have."""
        return [number for number in range(len(self.planned)) if (self.folder / str(number)).exists()]

    def when(self, number: int) -> float:
        """By `time.monotonic`, which all processes of a machine share."""
        return float((self.folder / str(number)).read_text())


@dataclass
class _Now:
    """Where this process is; survives the world, like the process."""

    faults: Faults | None = None
    rank: int = -1
    step: int = -1
    sent: bool = False  # whether this step's first bucket has been
    planted: bool = False


_now = _Now()


def reach(point: str, step: int | None = None) -> str | None:
    """This rank has come to a point: the fault that is planned here happens. What only the caller can do: its name."""
    if _now.faults is None:
        return None
    step = _now.step if step is None else step
    most = _now.faults.most
    if most is not None and len(list(_now.faults.folder.iterdir())) >= most:
        return None
    for number, fault in enumerate(_now.faults.planned):
        if (fault.point, fault.step, fault.rank) == (point, step, _now.rank):
            try:
                with open(_now.faults.folder / str(number), "x") as file:
                    file.write(str(time.monotonic()))
            except FileExistsError:
                continue
            return _do(fault.does)
    return None


def _do(what: str) -> str | None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "slow":
        time.sleep(1.5)
    elif what == "files":  # no file of this process may become larger than this, as on a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    elif what == "memory":
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20), resource.RLIM_INFINITY))
        torch.ones(1 << 26)
    elif what == "cgroup":  # where the kernel kills it
        group = Path("/sys/fs/cgroup/memory") / f"isograd-{os.getpid()}"
        group.mkdir()
        held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        group.joinpath("memory.limit_in_bytes").write_text(str(held + (32 << 20)))
        group.joinpath("cgroup.procs").write_text(str(os.getpid()))
        torch.ones(1 << 28)
    elif what == "not writable":
        subprocess.run(["chattr", "+i", *_now.faults.folder.parent.glob("run/checkpoints")], check=True)
    elif what == "no store":
        os.unlink(distributed_c10d._get_default_store().underlying_store.path)
    elif what == "grow":  # room for all ranks again
        _now.faults.folder.parent.joinpath("run", signals.GROW).touch()
    elif what == "raise":
        raise ValueError("planted")
    else:
        return what
    return None


def _around(home: Any, name: str, before: Callable[[], object] | None, after: Callable[[], object] | None = None):
    inner = getattr(home, name)

    def outer(*args: Any, **options: Any) -> Any:
        if before is not None:
            before()
        value = inner(*args, **options)
        if after is not None:
            after()
        return value

    setattr(home, name, outer)


def _plant() -> None:
    """Once in a process: at all points that are functions of modules and classes."""
    if _now.planted:
        return
    _now.planted = True
    plots.curves = lambda *_: False  # a second of each of hundreds of runs
    _around(norm, "global_norm", lambda: reach("before the vote"), lambda: reach("after the vote"))
    _around(Reducer, "launch", None, _first_bucket)
    _around(Reducer, "finish_all", lambda: reach("last bucket"))
    _around(Copies, "start", None, lambda: reach("copy made"))
    _around(Copies, "finish", lambda: reach("copies arriving"))
    _around(world, "join", lambda: reach("joining"))
    _around(peers, "same_config", lambda: reach("meeting again"))
    _around(CheckpointManager, "load", lambda: reach("loading"))
    _around(copies, "write", lambda: reach(RESCUING))
    for name in ("write_own", "finish"):
        setattr(write, name, _telling(getattr(write, name)))


def _first_bucket() -> None:
    if not _now.sent:
        _now.sent = True
        reach("first bucket")


def _telling(inner: Callable[..., None]) -> Callable[..., None]:
    def outer(job: SaveJob, moved: Callable[[], None]) -> None:
        phase = lambda name: reach(f"saving: {name}", job.step)  # noqa: E731
        inner(SaveJob(**{**vars(job), "phase": phase}), moved)

    return outer


def _plant_in(task: LanguageTask) -> None:
    """Once in each world's task."""
    task.planted = True  # type: ignore[attr-defined]
    layer = next(m for n, m in task.model.named_modules() if n.endswith("attention.out"))
    layer.register_forward_hook(_forward)
    evaluate, batch = task.evaluate, task.batch

    def evaluating(*args: Any) -> Any:
        reach("evaluation", _now.step + 1)
        return evaluate(*args)

    def reading(step: int) -> Any:
        reach("reading", step)
        return batch(step)

    task.evaluate, task.batch = evaluating, reading  # type: ignore[method-assign]


def _forward(module: nn.Module, given: Any, result: Any) -> Any:
    if not isinstance(result, Tensor) or not torch.is_grad_enabled():
        return None
    said = reach("forward")
    if result.requires_grad:
        result.register_hook(lambda _: reach("backward") and None)
    return result * float("nan") if said == "nan" else None
