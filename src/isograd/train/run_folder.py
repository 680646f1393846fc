"""A run's folder: made, or refused when it belongs to something else; how a run ended, and how it goes on.

The command that starts ranks may be killed by signal 9, without a message. Its ranks notice within milliseconds, as the
pipe to it has closed (launcher/worker.py), and exit at once: the same command, given again, must not meet them in its
folder. The first of them says how the run goes on.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isograd.checkpoint.folder import checkpoints
from isograd.errors import CheckpointError, LaunchError, TrainError
from isograd.io import atomic, no_follow, untrusted
from isograd.io.store import Place

WRITTEN = "# Written by isograd: the complete config of this run"  # the first line of config.yaml
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@contextmanager
def writing() -> Iterator[None]:
    """A file of the run's folder is written: what the disk refuses is an error that says how to go on."""
    try:
        yield
    except OSError as error:
        raise TrainError(
            "IG981", f"the run's folder cannot be written: {error}", expected="a folder with room",
            fix="make room, or give another folder with --run FOLDER; the same command then resumes from the newest "
            "checkpoint",
        ) from error  # fmt: skip


def make_folder(folder: Path) -> None:
    """The run's folder, made if need be; one with links in it is refused, as a run would write through them. The
    folder in which wandb keeps links is spared: a run writes nothing into it."""
    with writing():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in FULL:
                raise
            raise TrainError(
                "IG988", f"the run's folder cannot be made: {error.strerror}", seen=str(folder),
                expected="the path of a folder that exists, or that can be made", fix="--run FOLDER",
            ) from error  # fmt: skip
    no_follow.no_links(folder, spared="wandb", closed="checkpoints")
    refuse_other_config(folder)


def refuse_other_config(folder: Path) -> None:
    """Refuse a folder whose config.yaml no run has written: a run would overwrite it."""
    file = folder / "config.yaml"
    if not file.exists() or (folder / "metrics.jsonl").exists():  # older versions wrote no first line
        return
    try:
        found = untrusted.read_text(file, untrusted.CONFIG)
    except untrusted.FileError as error:
        found = error.brief
    if not found.startswith(WRITTEN):
        raise TrainError("IG989", seen=str(file), written=WRITTEN)


def write_exit_code(folder: Path, code: int | None) -> None:
    """How the run ended, as a file: a launcher such as torchrun has exit codes of its own. None: it is under way."""
    if code is None:
        (folder / "exit-code").unlink(missing_ok=True)
    else:
        with writing():
            atomic.replace_text(folder / "exit-code", f"{code}\n")


def exit_code(folder: Path) -> int | None:
    """How the last start of the run ended; None: it was killed, or has raised an error."""
    with suppress(untrusted.FileError):
        return untrusted.read_typed(int, folder / "exit-code", 16)
    return None


def since_death(folder: Path) -> float | None:
    """Seconds since the last line of a start of this run that has left no exit code; None: there is no such start."""
    with suppress(OSError):
        if exit_code(folder) is None:
            return max(0.0, time.time() - (folder / "metrics.jsonl").stat().st_mtime)
    return None


def refuse_earlier_run(saved: Place) -> None:
    """Refuse `--resume never` where there are checkpoints, which would stand beside those of the new run."""
    found = checkpoints(saved)
    if found:
        raise TrainError("IG985", seen=str(found[-1][1]))


def how_to_resume(place: Place) -> str:
    """What the same command does, given again."""
    saved = list[int]()
    with suppress(CheckpointError):  # of a store that does not answer; another error is told here
        saved = [step for step, _ in checkpoints(place)]
    return f"the same command resumes from {f'the checkpoint of step {saved[-1]}' if saved else 'the first step'}"


def launcher_killed(place: Place, phase: Callable[[], str]) -> str:
    """place: of its checkpoints. phase: what this rank is doing."""
    return str(LaunchError("IG260", seen=phase(), fix=how_to_resume(place), where="rank 0"))
