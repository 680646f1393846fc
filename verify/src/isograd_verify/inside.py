"""Watching from inside the program, where `isograd-verify run` cannot start it: three lines, or a callback
(docs/verify.md, from inside the program). Rank 0 prints the report when all ranks have written.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from isograd_verify.errors import VerifyError
from isograd_verify.record.recording import describe, ranks_so_far
from isograd_verify.run.attach import inspect
from isograd_verify.tell.report import Report
from isograd_verify.watch import foreign
from isograd_verify.watch.capture import Capture

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback  # type: ignore[import-not-found, unused-ignore]
    from transformers import TrainerCallback  # type: ignore[import-untyped, unused-ignore]
    from typing_extensions import Self

PATIENCE = 60.0  # seconds that rank 0 waits for the others' files


class watching:
    """Watches the first optimizer steps of what runs inside; `report` is set on rank 0 at the end, and printed."""

    def __init__(self, directory: str | Path, steps: int | str = 3, layout: str = "", whole: bool = False) -> None:
        self.directory, self.layout = Path(directory), layout
        self.capture = Capture(self.directory, steps, parameters=whole, lenient=True)
        self.report: Report | None = None
        self.rank = self.world = 0

    def start(self) -> None:
        """Begins to watch; optimizers that were made before are known by then."""
        self.rank, self.world = foreign.world()
        mine = self.directory / f"rank-{self.rank:04d}"
        if mine.exists():
            raise VerifyError(
                "IG702", f"{str(self.directory)!r} holds a recording", seen=mine.name,
                expected="a new directory for the recording", fix="name another one, or remove it",
            )  # fmt: skip
        self.capture.start()
        for made in gc.get_objects():
            if issubclass(type(made), Optimizer):  # isinstance would ask objects that answer with a warning
                self.capture.entrusted(made, foreign.stepped(made))

    def stop(self) -> None:
        """Ends the watching. Rank 0 waits for the other ranks' files, and tells what they show."""
        self.capture.stop()
        if self.rank:
            return
        until = time.monotonic() + PATIENCE
        while sum(bool(about.get("finished")) for about in ranks_so_far(self.directory).values()) < self.world:
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        self.directory.mkdir(parents=True, exist_ok=True)
        describe(self.directory, layout=self.layout)
        self.report = Report("isograd_verify.watching()", [inspect(self.directory)])
        print(self.report, flush=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.stop()
        else:
            self.capture.stop()


def trainer_callback(directory: str | Path, steps: int | str = 3, layout: str = "") -> TrainerCallback:
    """For `Trainer(callbacks=[...])` of transformers: watches the first steps of its training, and tells at the end."""
    from transformers import TrainerCallback

    watched = watching(directory, steps, layout)
    return _callback(TrainerCallback, "on_train_begin", "on_train_end", watched)  # type: ignore[no-any-return]


def lightning_callback(directory: str | Path, steps: int | str = 3, layout: str = "") -> Callback:
    """For `Trainer(callbacks=[...])` of Lightning: watches the first steps of `fit`, and tells at its end."""
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        from pytorch_lightning.callbacks import Callback  # the older name of the package

    return _callback(Callback, "on_fit_start", "on_fit_end", watching(directory, steps, layout))


def _callback(base: type[Any], begin: str, end: str, watched: watching) -> Any:
    calls = {begin: lambda *_, **__: watched.start(), end: lambda *_, **__: watched.stop()}
    return type("WatchingCallback", (base,), {"watching": watched, **calls})()
