"""Inside a watched program: start the capture when the program turns out to be one that trains, and end it with it."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_started: list[Any] = []


def prepare(directory: str) -> None:
    """Called once, right after torch was imported: the capture itself begins with a process group or an optimizer."""
    made = torch.optim.Optimizer.__init__

    def optimizer_made(self: Any, *args: Any, **kwargs: Any) -> None:
        start(directory)
        made(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = optimizer_made  # type: ignore[method-assign]
    if not dist.is_available():
        return
    joining = dist.init_process_group

    def joined(*args: Any, **kwargs: Any) -> Any:
        result = joining(*args, **kwargs)
        start(directory)
        return result

    dist.init_process_group = dist.distributed_c10d.init_process_group = joined


def start(directory: str) -> None:
    if _started:
        return
    from isograd.verify.capture import Capture

    capture = Capture(
        directory,
        steps=int(os.environ.get("ISOGRAD_VERIFY_STEPS", "3")),
        activations=os.environ.get("ISOGRAD_VERIFY_ACTIVATIONS") == "1",
    )
    _started.append(capture)
    capture.start()
    capture.event("start")
    _stacks(Path(directory) / capture.out.path.name)
    os.register_at_fork(after_in_child=capture.abandon)
    atexit.register(capture.stop)


def _stacks(home: Path) -> None:
    """On SIGUSR2, unless the program uses it itself: every thread's stack, for the report of a hang."""
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR2, open(home / "stacks.txt", "w"), all_threads=False)  # noqa: SIM115
