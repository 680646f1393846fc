"""CheckpointManager: saves and loads what an engine holds, beside the training, under any layout.

    keeper = ig.checkpoint.CheckpointManager("run/checkpoints", engine, keep_last=3)
    found = keeper.load("auto")                   # the newest that is whole, or None; also of another layout
    ...
    keeper.save(step, {"data": position})         # returns when the tensors are copied; a thread writes them
    keeper.close()                                # the last one is on the disk

A save is in two parts. Here, with all ranks: the one before is finished, and this rank's rows are copied into buffers
in the host's memory, which every save uses again. Then write.py, in a thread. An error of the thread is raised by the
next save, `look`, `wait` or `close`, on all ranks alike; the checkpoints before are as they were. With on_error="retry"
the same copies are written again, up to TRIES times; with "go_on" that checkpoint is left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from isograd.checkpoint import folder as folders
from isograd.checkpoint import load
from isograd.checkpoint.agree import all_or_none, as_ours, raise_alike
from isograd.checkpoint.load import Loaded
from isograd.checkpoint.manifest import describe_model
from isograd.checkpoint.write import Copied, Phase, SaveJob, Writing
from isograd.comm.consensus import all_gather_object
from isograd.comm.world import abort_group_on_interrupt
from isograd.engine import Engine, state
from isograd.engine.ema import averaged
from isograd.engine.state import Part
from isograd.errors import CheckpointError, IsogradError
from isograd.io.store import Place, StorePath, place_of

POLL_S = 0.1
SHOWN = 8  # names in an error
TRIES = 3  # of one save, with on_error="retry"
PAUSE_S = 2.0  # before the second; twice as long before each further one

OnError = Literal["retry", "go_on", "stop"]


class NotFinite(CheckpointError):
    """IG946: the state has NaN or Inf in it. Raised on all ranks by `CheckpointManager.save`."""


class CheckpointManager:
    """Saves and loads the state of one engine in one folder; see the top of this file."""

    @abort_group_on_interrupt()
    def __init__(
        self,
        folder: str | Place,
        engine: Engine,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        on_error: OnError = "stop",
        tell: Callable[[int, str], None] | None = None,
        beat: Callable[[str], None] | None = None,
        phase: Phase | None = None,
    ) -> None:
        """All ranks make it together; one job at a time writes into a folder, which may be a URL of an object store.

        keep_last: how many of the newest are kept, beside those whose step is a multiple of `keep_every`.
        on_error: what a save does that could not be written: "stop" raises its error; "retry" writes the same state
            again, and raises after the third time; "go_on" leaves that checkpoint out.
        tell: is called with a step, and what went wrong with its save, where no error is raised.
        beat: is called while this waits for a save, each time that some rank has written more: a save may take longer
            than a watchdog's limit.
        phase: is told where a save is (write.PHASES): for tests, which end the process there.
        """
        if not isinstance(engine, Engine):
            raise TypeError(f"CheckpointManager(folder, engine): the engine is of {type(engine).__name__}")
        self.folder, self.engine, self.mesh = place_of(folder), engine, engine.mesh
        self.keep_last, self.keep_every = keep_last, keep_every
        self.on_error: OnError = on_error
        self.best: int | None = None  # the step of a checkpoint that the next saves do not prune
        self.saved: int | None = None  # the step of the last save that is on the disk under its name
        self._tell, self._tries = tell or (lambda step, text: None), 1
        self._phase, self._beat = phase or (lambda _: None), beat or (lambda _: None)
        self._buffers: dict[str, Tensor] = {}
        self._writing: Writing | None = None
        self._lock: folders.Lock | None = None
        state.meet_to_save(engine, opens=True)
        self._job = str(all_gather_object(folders.job_name(), self.mesh)[0])
        self._takes = 0  # of this job: saves, and what is written again
        all_or_none(self._take_folder, f"opening the folder {folder}", self.mesh)
        all_or_none(self._check_shared, f"looking into the folder {folder}", self.mesh)

    def _take_folder(self) -> None:
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error={self.on_error!r}: one of {get_args(OnError)}")
        index(self.keep_last)  # raises a TypeError where it is no whole number
        if self.mesh.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = folders.Lock(self.folder, self._job)
            folders.sweep(self.folder)

    def _check_shared(self) -> None:
        job = folders.job_in(self.folder)
        if job != self._job:
            where = self.mesh.describe_rank()
            raise CheckpointError("IG932", where=where, folder=self.folder, job=self._job, other=job)

    @abort_group_on_interrupt()
    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Between two steps, on all ranks. `extra` comes back from `load`: JSON, rank 0's counts."""
        self.wait()
        state.meet_to_save(self.engine)
        step = index(step) if hasattr(step, "__index__") else step
        self._check_moment(step)
        with averaged(self.engine):
            declared = state.declare(self.engine)
            counts = state.counts(self.engine, declared)
            found = state.parts(self.engine, state.elementwise(self.engine, declared)) + state.generators(self.mesh)
            self._refuse_not_finite(step, state.not_finite(found, counts))
            copying = f"copying the state of step {step}"
            copies, extra = all_or_none(lambda: (self._copy(found), self._json(extra or {})), copying, self.mesh)
        self._phase("copied")
        layout = self.mesh.layout
        head = {"step": step, "layout": str(layout), "model": describe_model(self.engine.model), "extra": extra}
        head["run"] = declared.run
        job = SaveJob(
            self.folder, self._place(step), step, self.mesh.rank, layout.world_size, head,
            copies, counts, self.keep_last, self.keep_every, self._phase, self.best,
        )  # fmt: skip
        self._writing, self._tries = Writing(job), 1

    def _place(self, step: int) -> Place:
        """Where the next save is written."""
        self._takes += 1
        place: Place = folders.partial(self.folder, step, f"{self._job}_{self._takes:04d}")
        return place

    def _json(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return dict(json.loads(json.dumps(dict(extra))))
        except (TypeError, ValueError) as error:
            raise CheckpointError("IG934", seen=str(error), where=self.mesh.describe_rank()) from error

    def _refuse_not_finite(self, step: int, mine: list[str]) -> None:
        """A checkpoint with NaN would be resumed from for ever: the last good one stays the newest."""
        names = all_gather_object(mine[:SHOWN] + ["..."] * (len(mine) > SHOWN), self.mesh)
        if any(names):
            shown = [f"rank {rank}: {', '.join(keys)}" for rank, keys in enumerate(names) if keys]
            raise NotFinite("IG946", seen="; ".join(shown), step=step)

    def _check_moment(self, step: int) -> None:
        now = self.engine.step_state  # a gradient is not part of what is kept
        said = all_gather_object([step, now.empty and now.optimizer_inconsistent is None], self.mesh)
        busy = {True: "", False: ", with gradients under way, or a step failed half way"}
        unlike = {rank for rank, other in enumerate(said) if other != [step, True] or type(step) is not int or step < 0}
        if unlike:
            shown = [f"rank {r}: step {said[r][0]}{busy[said[r][1]]}" for r in sorted(unlike | {self.mesh.rank})]
            raise CheckpointError("IG933", seen="; ".join(shown), where=self.mesh.describe_rank())

    @torch.no_grad()
    def _copy(self, found: Sequence[Part]) -> list[Copied]:
        """The rows that this rank writes, in host memory that every save uses again."""
        copies, cuda = [], False
        for part in found:
            box, tensor = part.written
            if not tensor.numel():
                continue
            buffer = self._buffers.get(part.key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[part.key] = buffer
            cuda |= tensor.is_cuda
            buffer.copy_(tensor, non_blocking=True)
            copies.append(Copied(part.key, part.shape, box, buffer))
        if cuda:
            torch.cuda.current_stream().synchronize()
        return copies

    @property
    def failed(self) -> bool:
        """Whether this rank's part of the last save could not be written. Asks no other rank."""
        return self._writing is not None and self._writing.error is not None

    @abort_group_on_interrupt()
    def look(self) -> None:
        """All ranks call it when `failed` is true on one: raises the error, or goes on as `on_error` says."""
        error, writing = self._ended()
        if error is None or writing is None:
            return
        step, what = writing.job.step, f"{error.what}: {error.seen}" + (f" ({error.where})" if error.where else "")
        if self.on_error == "go_on":
            self._tell(step, what)
        elif self.on_error == "retry" and self._tries < TRIES:
            pause = PAUSE_S * 2 ** (self._tries - 1)
            self._tries += 1
            self._tell(step, f"{what}; try {self._tries} of {TRIES} in {pause:g} s")
            self._writing = Writing(replace(writing.job, place=self._place(step)), pause)
        else:
            raise error

    def wait(self) -> None:
        """Until the last save is on the disk under its name, or has failed for good. Its error is raised on all
        ranks."""
        while self._writing is not None:
            self.look()

    def _ended(self) -> tuple[IsogradError | None, Writing | None]:
        """The last save, when the writers of all ranks have ended, and its error: the same one on all ranks."""
        writing = self._writing  # and stays, until all have ended: `let_finish` may have to wait for it
        if writing is None:
            return None, None
        before: list[Any] = []
        while True:
            writing.join(POLL_S)
            said = all_gather_object([writing.is_alive(), writing.error is not None, writing.moves], self.mesh)
            failed = any(error for _, error, _ in said)
            if failed:
                writing.given_up.set()
            if not any(alive for alive, _, _ in said):
                break
            if said != before:
                self._beat(f"saving step {writing.job.step}")
            before = said
        self._writing = None
        if self.mesh.rank == 0 and failed:
            folders.discard(writing.job.place)
        try:
            raise_alike(self._error_of(writing), self.mesh)
        except IsogradError as error:
            return error, writing
        self.saved = writing.job.step
        return None, writing

    def let_finish(self) -> None:
        """After an error, when ranks can no longer ask each other: wait for the save that is under way.

        Its writers are threads that need no collective. This returns when the checkpoint has its name, when this rank's
        writer has failed, or when nothing in the folder has grown for folders.QUIET_S.
        """
        writing, self._writing = self._writing, None
        before, now, since = None, None, time.monotonic()
        quiet, pause = folders.QUIET_S, POLL_S
        if isinstance(self.folder, StorePath):
            quiet, pause = folders.STORE_QUIET_S, folders.STORE_POLL_S
        while writing is not None and writing.error is None:
            with suppress(CheckpointError):  # a store that does not answer now
                if not writing.is_alive() and folders.is_named(writing.job.place):
                    break
                now = writing.moves, folders.moves_in(writing.job.place)
            if now != before:
                before, since = now, time.monotonic()
                self._beat(f"saving step {writing.job.step} before the end")
            elif time.monotonic() - since > quiet:
                break
            time.sleep(pause)
        if writing is not None:
            writing.given_up.set()

    def _error_of(self, writing: Writing) -> IsogradError | None:
        if writing.error is None:
            return None
        try:
            with as_ours(
                f"writing the checkpoint of step {writing.job.step} into {self.folder}", self.mesh.describe_rank()
            ):
                raise writing.error
        except IsogradError as error:
            return error

    @abort_group_on_interrupt()
    def load(self, source: str | Place = "auto") -> Loaded | None:
        """Bring the engine to a saved state, whatever layout saved it.

        "auto": the newest in this folder that is whole (None: there is none); else a checkpoint's own folder.
        """
        self.wait()
        return load.load(self.engine, self.folder, source, self._beat)

    def close(self) -> None:
        """Finish the last save, and let another job write into the folder."""
        try:
            self.wait()
        finally:
            self._leave()

    def _leave(self) -> None:
        self.let_finish()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """After an error other ranks may be gone: a save under way may finish, but no collective is called."""
        if kind is None:
            self.close()
        else:
            self._leave()
