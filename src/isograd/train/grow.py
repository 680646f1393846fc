"""Ranks that come back: a run that has become smaller grows again when a file GROW is made in its folder.

Its ranks save and end after the step that they are in. The launcher starts the missing processes, and all of them
resume under the layout that the config asked for. New processes import what they still need from the disk: when
isograd's files are no longer those that the run began with, they are refused, and the run stays as small as it is.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

FILE = "GROW"
WHY = "ranks come back"
EVENT = "grow"  # in metrics.jsonl
IN_VAIN = f"no rank joins: a file {FILE} was found, and removed, while the run has all ranks of its layout"
SHOWN = 5  # files

_HOME = Path(__file__).parents[1]


def code() -> dict[str, str]:
    """A hash of each of isograd's own files, as they are on the disk now."""
    return {str(file.relative_to(_HOME)): sha256(file.read_bytes()).hexdigest() for file in sorted(_HOME.rglob("*.py"))}


def refused(before: dict[str, str]) -> str:
    """Why no rank may join a run that began with this code, naming the files; empty: it may."""
    now = code()
    changed = sorted(file for file in before.keys() | now.keys() if before.get(file) != now.get(file))
    if not changed:
        return ""
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return f"isograd's files have changed since this run began: {', '.join(changed[:SHOWN])}{more}"
