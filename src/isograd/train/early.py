"""Mistakes in a run that can be found before its ranks are started: one error, exit code 2, and nothing was started.

Ranks find the same mistakes by themselves, since torchrun starts them without a launcher of ours; but then every rank
prints the error, and torchrun its own.
"""

from __future__ import annotations

from pathlib import Path

from isograd.checkpoint import folder as checkpoints
from isograd.checkpoint.read import open_whole
from isograd.data import read_tokenizer
from isograd.errors import TrainError
from isograd.train import journal, texts
from isograd.train.config import Config


def refuse_early(config: Config, resume: str) -> None:
    """Raise what the ranks would raise: about the folder, the place to resume from, and the tokenizer."""
    journal.make_folder(config.folder)
    if resume == "never":
        refuse_earlier_run(config.folder)
    elif resume != "auto":
        open_whole(Path(resume))
    if config.data is not None and config.log.sample and texts.is_ready(config):
        read_tokenizer(texts.trained(config))  # whose package may be missing: said now, not after the last step


def refuse_earlier_run(folder: Path) -> None:
    """Refuse `--resume never` in a folder with checkpoints, which would stand beside those of the new run."""
    found = checkpoints.checkpoints(folder / "checkpoints")
    if found:
        raise TrainError(
            "IG985", "this run's folder holds checkpoints of an earlier run", seen=str(found[-1][1]),
            expected="--resume auto to resume it, or another folder",
            fix="--run FOLDER, or delete the folder",
        )  # fmt: skip
