"""The life of a capture, in a program that it must never disturb: it begins when the program joins a world or makes an
optimizer, rests after the watched steps, when nothing of it is left in the way, and ends with the program.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from isograd_verify.errors import ConfigError
from isograd_verify.record.events import Backward, Event, Lost, OtherWorld, Step
from isograd_verify.record.recording import RankWriter
from isograd_verify.watch import foreign

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Steps:
    """The first ones, and each `every`-th (0: none)."""

    first: int = 3
    every: int = 0

    @classmethod
    def of(cls, text: str | int) -> Steps:
        """From '3', 'first', 'every 1000', or several with commas; the first step is always one of them."""
        first, every = 1, 0
        for part in str(text).split(","):
            found = re.fullmatch(r"\s*(?:(first)|(\d+)|every\s+(\d+))\s*", part)
            if found is None or found[2] == "0" or (found[3] is not None and int(found[3]) < 1):
                raise ConfigError(
                    "IG622", "--steps does not say which steps to watch", seen=str(text),
                    expected="a number of first steps, 'first', 'every 1000', or several: 'first,every 1000'",
                    fix="--steps 3",
                )  # fmt: skip
            first = max(first, int(found[2] or 1))
            every = int(found[3] or every)
        return cls(first, every)

    def watches(self, step: int) -> bool:
        """Whether this one is watched, counted from 1."""
        return step <= self.first or (self.every > 0 and step % self.every == 0)


UNWATCHED = 12  # steps timed after the watched ones

living: weakref.WeakSet[Life] = weakref.WeakSet()  # captures of this process; weighing.py asks


def _forked() -> None:
    for capture in list(living):
        capture.abandon()


os.register_at_fork(after_in_child=_forked)


class Life:
    """`lenient`: an error of the capture's own ends the watching, and is told, instead of ending the program."""

    watch: Any  # collectives.WatchMode
    hooks: Any  # hooks.Hooks
    steps: Steps

    def __init__(self, directory: Path, lenient: bool) -> None:
        self.directory, self.lenient = directory, lenient
        self.writer: RankWriter | None = None
        self.opened: Callable[[Path], None] = lambda home: None  # told once where this rank writes
        self.pending: list[Event] = []  # events from before the rank was known
        self.active = False  # it looks, and notes what it sees
        self.installed = False  # its hooks are in the program
        self.left = True  # its dispatch mode is not
        self.compiled = False  # a module was called that torch.compile was asked for
        self.failure = ""
        self.blinded: dict[str, str] = {}  # what is no longer watched -> the error that ended it
        self.own_seconds, self.began = 0.0, time.time()
        self.step = 1  # the optimizer step now under way
        self.micro = -1  # backward calls since the last step, minus one
        self.backwards = 0  # since the start
        self.stepping = 0  # optimizers now inside their step
        self.last_step_at = -1  # `backwards` at the last step taken
        self.times: list[float] = []
        self.clock: weakref.ref[Any] | None = None  # the optimizer whose steps are timed and counted
        self.ticks = 0  # its steps

    def close_step(self) -> None:
        """Finish a step that was waiting for more optimizers."""

    def leftover(self) -> None:
        """Write what no step has used."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Puts hooks and the dispatch mode into the program."""
        living.add(self)
        self.pid = os.getpid()
        self._install()

    def _install(self) -> None:
        self.active = self.installed = True
        # A dispatch mode and torch.compile exclude each other, and what was not compiled once never will be: compiling
        # waits, by torch's own switch, until the watched steps are over.
        self.stance = torch.compiler.set_stance("force_eager")
        self.hooks.install()
        if self.left:
            self.watch.enter_below()
        self.left = False

    def tick(self, optimizer: Any) -> bool:
        """After each step. Steps are timed beyond the first watched ones, for the overhead; False when all is done."""
        if self.failure and self.installed and torch._C._current_graph_task_id() == -1:
            self.pause()  # not inside a backward: it puts the dispatch mode back that it found
        if self.stepping:
            return True
        if not self.installed and not self.left:
            self.left = self.watch.leave()
        if self.clock is None or self.clock() is None:
            self.clock = weakref.ref(optimizer)
        timed = self.steps.first + UNWATCHED
        if self.clock() is optimizer:
            self.ticks += 1
            if len(self.times) < timed:
                self.times.append(time.perf_counter())
            again = self.steps.every and self.steps.watches(self.ticks + 1) and not self.failure
            if again and not self.installed and self.writer is not None:  # the step that comes is watched, too
                self.step, self.micro, self.last_step_at = max(self.step, self.ticks + 1), -1, self.backwards
                self._install()
        return len(self.times) < timed or not self.left or bool(self.steps.every and not self.failure)

    def abandon(self) -> None:
        """In a forked child (a data loader's worker): not a rank, nothing is written from here."""
        self.active, self.writer, self.lenient = False, None, True
        if self.installed:
            self._uninstall()
        self.hooks.close()

    def pause(self) -> None:
        """Enough steps were seen: get out of the program's way."""
        if not self.installed:
            return
        self.active = False
        self._uninstall()
        self._tell(watched_seconds=time.time() - self.began, compiled=self.compiled)

    def _tell(self, **more: Any) -> None:
        """That the watching is over, and why."""
        if self.writer is not None:
            self.writer.about |= {"watching": False, **more}
            self.writer.about |= {"failed": self.failure} if self.failure else {}
            self.writer.save_about()

    def _uninstall(self) -> None:
        self.installed = False
        self.hooks.remove()
        self.left = self.watch.leave()
        self.stance.__exit__(None, None, None)

    def stop(self) -> None:
        """Write what is pending (a last backward, when no optimizer ever stepped) and close the recording."""
        if os.getpid() != self.pid:
            return
        if self.active:
            self.guarded(self.close_step)()
        died = getattr(sys, "last_value", None)
        if self.active and self.micro >= 0 and self.step == 1 and died is None:
            self.guarded(self.leftover)()
        self.pause()
        if not self.left:  # a mode of the program's was on top when the watched steps ended
            self.left = self.watch.leave()
        self.hooks.close()
        if self.writer is None and self.pending and not self.failure:
            assert self.out  # a program that never came to a backward: its rank is what it is now
        if self.writer is not None:
            self.writer.about |= {
                "own_seconds": self.own_seconds,
                "step_times": self.times,
                "backwards": self.backwards,
                "seconds": time.time() - self.began,
            }
            self.writer.about |= (
                {"died": spelled(died, (foreign.TORCH, foreign.OURS, "<"))} if isinstance(died, Exception) else {}
            )
            self.writer.close()
            self.writer = None

    def lose(self, sense: str, error: Exception) -> None:
        """An error in watching what nothing else needs: it is no longer watched, and the report says so."""
        if not self.lenient:
            raise error
        if sense not in self.blinded:
            self.blinded[sense] = spelled(error)
            self.event(Lost(*self.now, sense=sense, why=self.blinded[sense]))

    def fail(self, error: Exception) -> None:
        """An error without which nothing can be judged: the program runs on; hooks go after its next step."""
        if not self.lenient:
            raise error
        self.active, self.stepping = False, 0
        self.failure = spelled(error)
        self._tell()

    def guarded(self, what: Callable[..., Any], sense: str = "") -> Callable[..., Any]:
        """A hook of the capture: timed, called only while watching, and never the end of the program. `sense`: what is
        lost when it raises; '' when nothing can be judged without it."""

        def call(*args: Any) -> None:
            if not self.active or sense in self.blinded:
                return
            began = time.perf_counter()
            aside = self.watch.suspend()
            try:
                what(*args)
            except Exception as error:  # whatever a foreign program's tensors may do to us
                self.lose(sense, error) if sense else self.fail(error)
            finally:
                if aside:
                    self.watch.resume()
            self.own_seconds += time.perf_counter() - began

        return call

    def rejoined(self) -> None:
        """The program joined a process group again. Another world ends the watching, the same one does not."""
        foreign.forget()
        if self.writer is None or not self.installed:
            return
        rank, world = foreign.world()
        if (rank, world) != (self.writer.about["rank"], self.writer.about["world"]):
            self.event(OtherWorld(*self.now, world=world))
            self.pause()
            self.steps = Steps(self.steps.first)  # what comes is another recording's

    @property
    def out(self) -> RankWriter:
        """The writer of this rank's part, opened when the rank is known."""
        if self.writer is None:
            rank, world = foreign.world()
            if self.lenient and not claim(self.directory, rank):
                raise RuntimeError(f"another process is rank {rank} already")
            self.writer = RankWriter(self.directory, rank, world)
            self.writer.about |= {
                "torch": torch.__version__, "pid": os.getpid(), "began": self.began, "watching": self.active,
            }  # fmt: skip
            self.writer.save_about()
            self.opened(self.writer.path)
            for event in self.pending:
                self.writer.event(event)
            self.pending.clear()
        return self.writer

    @property
    def now(self) -> tuple[int, int]:
        """(step, micro-batch): when an event is seen."""
        return self.step, max(self.micro, 0)

    def event(self, event: Event) -> None:
        """Writes an event, or keeps it until the rank is known."""
        if self.writer is None and not foreign.placed() and not isinstance(event, Backward | Step):
            self.pending.append(event)
        else:
            self.out.event(event)


def spelled(error: Exception, beyond: tuple[str, ...] = ()) -> str:
    """'IndexError: tuple index out of range (means.py:65)': the last line that is not in a file of `beyond`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not (beyond and f.filename.startswith(beyond))]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{place}"


def claim(directory: Path, rank: int) -> bool:
    """Whether this process may write a rank's part. An earlier start is set aside; a second one leaves a note."""
    home = directory / f"rank-{rank:04d}"
    try:
        owner = int(json.loads((home / "rank.json").read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return True
    if owner == os.getpid():
        return True
    if alive(owner):
        (directory / f"second-{os.getpid()}-rank-{rank:04d}").touch()
        return False
    count = len(list(directory.glob(f"earlier-*-{home.name}")))
    os.replace(home, directory / f"earlier-{count}-{home.name}")
    return True


def alive(pid: int) -> bool:
    """Whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
