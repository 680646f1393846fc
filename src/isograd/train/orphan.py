"""The command that started the ranks was killed: they end, too, and the first of them says how the run goes on.

A process that is killed by signal 9 has no last word of its own. Its ranks notice within milliseconds, as the pipe to
it has closed (comm/worker.py), and leave at once: whoever gives the command again must not meet them in its folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from isograd.checkpoint.folder import checkpoints
from isograd.errors import LaunchError


def how_to_resume(folder: Path) -> str:
    """What the same command does, given again."""
    saved = [step for step, _ in checkpoints(folder / "checkpoints")]
    return f"the same command resumes from {f'the checkpoint of step {saved[-1]}' if saved else 'the first step'}"


def last_words(folder: Path, phase: Callable[[], str]) -> str:
    """phase: what this rank is doing."""
    error = LaunchError(
        "IG260", "the command that started the ranks has ended without a word: it was killed, and its ranks end",
        seen=phase(), expected="a command that lives as long as its ranks; Ctrl-C, SIGTERM and STOP end both",
        fix=how_to_resume(folder), where="rank 0",
    )  # fmt: skip
    return str(error)
