"""Inside a watched program: start the capture when the program turns out to be one that trains, and end it with it."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import mmap
import os
import signal
import sys
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from isograd.verify.record.events import Start
from isograd.verify.record.recording import STEPS

_started: list[Any] = []


def prepare(directory: str) -> None:
    """Called once, right after torch was imported: the capture itself begins with a process group or an optimizer."""
    made = torch.optim.Optimizer.__init__

    @functools.wraps(made)
    def optimizer_made(self: Any, *args: Any, **kwargs: Any) -> None:
        start(directory)
        made(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = optimizer_made  # type: ignore[method-assign]
    if not dist.is_available():
        return
    joining = dist.init_process_group

    @functools.wraps(joining)
    def joined(*args: Any, **kwargs: Any) -> Any:
        result = joining(*args, **kwargs)
        start(directory)
        return result

    for name, module in list(sys.modules.items()):  # torch's own modules hold it by name: init_device_mesh joins, too
        if name.startswith("torch.distributed") and getattr(module, "init_process_group", None) is joining:
            module.init_process_group = joined  # type: ignore[attr-defined]


def start(directory: str) -> None:
    """Begins the capture, unless it has begun; then the program has joined a process group again."""
    if _started:
        _started[0].rejoined()
        return
    try:
        capture = _capture(directory)
    except Exception as error:  # a torch too old or too new for us, say: the program runs on without
        _started.append(_Nobody())
        print(f"isograd verify: cannot watch this process: {type(error).__name__}: {error}", file=sys.stderr)
        return
    _started.append(capture)
    os.register_at_fork(after_in_child=_forked)
    atexit.register(capture.stop)
    Finalize(None, capture.stop, exitpriority=0)  # processes of multiprocessing leave without atexit


def _capture(directory: str) -> Any:
    from isograd.verify.record.projection import SMALL
    from isograd.verify.watch.capture import Capture

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

    def opened(home: Path) -> None:
        _stacks(home)
        steps.show(home)

    capture.opened = opened
    capture.start()
    capture.guarded(capture.event)(Start(*capture.now))
    if os.environ.get("ISOGRAD_VERIFY_FEED"):
        from isograd.verify.watch.feed import Feed

        Feed(capture, Path(os.environ["ISOGRAD_VERIFY_FEED"]))
    elif os.environ.get("ISOGRAD_VERIFY_CALLS") == "1":
        from isograd.verify.watch.calls import Calls

        Calls(capture)
    return capture


class _Steps:
    """The number of optimizer steps, where `verify run` can read it from outside: eight bytes of shared memory. It is
    what stays in the program after the watched steps, at one addition per step, so that a later hang is seen, too."""

    def __init__(self) -> None:
        self.count = 0
        self.shared: mmap.mmap | None = None
        register_optimizer_step_post_hook(self.stepped)

    def show(self, home: Path) -> None:
        path = home / STEPS
        path.write_bytes(bytes(8))
        with open(path, "r+b") as file:
            self.shared = mmap.mmap(file.fileno(), 8)

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.count += 1
        if self.shared is not None:
            self.shared[:] = self.count.to_bytes(8, "little")


class _Nobody:
    def rejoined(self) -> None: ...


def _forked() -> None:
    """A child is not its parent's rank; should it train by itself, it is watched by itself."""
    _started.clear()


def _stacks(home: Path) -> None:
    """On SIGUSR2, unless the program uses it itself: the main thread's stack, for the report of a hang."""
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR2, open(home / "stacks.txt", "w"), all_threads=False)  # noqa: SIM115
