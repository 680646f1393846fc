"""Inside a watched program: start the capture when the program turns out to be one that trains, and end it with it."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import inspect
import mmap
import os
import re
import signal
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from isograd_verify.record.events import Start
from isograd_verify.record.recording import STEPS

_started: list[Any] = []
_ends: list[Callable[[], None]] = []
_left: set[Any] = set()  # process groups of worlds that the program has ended, wholly or in part


def prepare(directory: str, end: Callable[[], None] | None = None) -> None:
    """Called right after torch was imported. `end`: called behind the capture's end."""
    if end is not None:
        _ends.append(end)
    made = torch.optim.Optimizer.__init__

    @functools.wraps(made)
    def optimizer_made(self: Any, *args: Any, **kwargs: Any) -> None:
        start(directory)
        made(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = optimizer_made  # type: ignore[method-assign]
    if not dist.is_available():
        return
    joining, leaving = dist.init_process_group, dist.destroy_process_group
    join = _as_one() if os.environ.get("ISOGRAD_VERIFY_FEED") else joining

    @functools.wraps(joining)
    def joined(*args: Any, **kwargs: Any) -> Any:
        result = join(*args, **kwargs)
        start(directory)
        return result

    @functools.wraps(leaving)
    def left(*args: Any, **kwargs: Any) -> None:
        """Keeps the groups: DDP's reducer, else their last holder, has the GIL while it waits for a group's thread to
        end, and a message that was sent under a dispatch mode, as ours are, needs the GIL in that thread."""
        _left.update(dist.distributed_c10d._world.pg_map)
        leaving(*args, **kwargs)

    for name, module in list(sys.modules.items()):  # torch's own modules hold them by name: init_device_mesh joins, too
        if name.startswith("torch.distributed"):
            for plain, ours in ((joining, joined), (leaving, left)):
                if getattr(module, plain.__name__, None) is plain:
                    setattr(module, plain.__name__, ours)


def _as_one() -> Callable[..., Any]:
    """Beside one device: whatever number of ranks is asked for, there is one. Returns how a process group is joined."""
    from torch.distributed import device_mesh

    package: Any = torch.multiprocessing
    spawn: Any = sys.modules[package.spawn.__module__]  # the package has a function of this name
    if int(os.environ.get("RANK", "0")) > 0:
        os._exit(0)
    os.environ |= {name: "1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if name in os.environ}
    joining, several, mesh = dist.init_process_group, spawn.start_processes, device_mesh.init_device_mesh

    @functools.wraps(several)
    def one(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **kwargs: Any) -> Any:
        names = [*inspect.signature(fn).parameters][1:]  # of what fn gets behind the rank
        for place, (name, value) in enumerate(zip(names, args, strict=False)):
            if type(value) is int and value == nprocs and re.search("world|proc|gpu|rank", name):
                args = tuple(1 if i == place else other for i, other in enumerate(args))
        return several(fn, args, 1, *more, **kwargs)

    @functools.wraps(mesh)
    def small(device_type: str, mesh_shape: tuple[int, ...], *more: Any, **kwargs: Any) -> Any:
        return mesh(device_type, (1,) * len(mesh_shape), *more, **kwargs)

    @functools.wraps(joining)
    def join(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(joining).bind(*args, **kwargs)
        if int(call.arguments.get("rank", os.environ.get("RANK", "-1"))) > 0:
            os._exit(0)
        os.environ |= {"WORLD_SIZE": "1"} if "WORLD_SIZE" in os.environ else {}
        if int(call.arguments.get("world_size", -1)) > 0:
            call.arguments["world_size"] = 1
        return joining(*call.args, **call.kwargs)

    package.start_processes = spawn.start_processes = one
    for home in (dist, device_mesh):
        home.init_device_mesh = small  # type: ignore[attr-defined]
    return join


def start(directory: str) -> None:
    """Begins the capture, unless it has begun; then the program has joined a process group again."""
    if _started:
        _left.clear()
        if _started[0] is not None:
            _started[0].rejoined()
        return
    try:
        capture = _capture(directory)
    except Exception as error:  # a torch too old or too new for us, say: the program runs on without
        _started.append(None)
        print(f"isograd-verify: cannot watch this process: {type(error).__name__}: {error}", file=sys.stderr)
        return
    _started.append(capture)
    os.register_at_fork(after_in_child=_started.clear)  # a child that trains by itself is watched by itself
    atexit.register(capture.stop)
    Finalize(None, capture.stop, exitpriority=0)  # processes of multiprocessing leave without atexit
    for end in _ends:
        Finalize(None, end, exitpriority=-5)


def _capture(directory: str) -> Any:
    from isograd_verify.record.sketch import SMALL
    from isograd_verify.watch.capture import Capture

    capture = Capture(
        directory,
        steps=os.environ.get("ISOGRAD_VERIFY_STEPS", "3"),
        activations=os.environ.get("ISOGRAD_VERIFY_ACTIVATIONS") == "1",
        parameters=os.environ.get("ISOGRAD_VERIFY_PARAMETERS") == "1",
        lenient=True,
        replay=Path(other) if (other := os.environ.get("ISOGRAD_VERIFY_REPLAY")) else None,
        beyond=SMALL if os.environ.get("ISOGRAD_VERIFY_SKETCH") == "1" else None,
    )
    steps = _Steps()  # its hook goes first: the capture's own can then be taken out from behind it
    capture.opened = steps.show
    capture.start()
    capture.guarded(capture.event)(Start(*capture.now))
    if os.environ.get("ISOGRAD_VERIFY_FEED"):
        from isograd_verify.watch.feed import Feed

        Feed(capture, Path(os.environ["ISOGRAD_VERIFY_FEED"]))
    elif os.environ.get("ISOGRAD_VERIFY_CALLS") == "1":
        from isograd_verify.watch.calls import Calls

        Calls(capture)
    return capture


class _Steps:
    """The number of optimizer steps, where `verify run` reads it from outside: a later hang is seen, too."""

    def __init__(self) -> None:
        self.count = 0
        self.shared: mmap.mmap | None = None
        register_optimizer_step_post_hook(self.stepped)

    def show(self, home: Path) -> None:
        if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:  # the main thread's stack, for the report of a hang
            faulthandler.register(signal.SIGUSR2, open(home / "stacks.txt", "w"), all_threads=False)  # noqa: SIM115
        path = home / STEPS
        path.write_bytes(bytes(8))
        with open(path, "r+b") as file:
            self.shared = mmap.mmap(file.fileno(), 8)

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.count += 1
        if self.shared is not None:
            self.shared[:] = self.count.to_bytes(8, "little")
