"""The mesh of a script that another library started: from a layout given in code, or by `--isograd` beside its options.

A door needs whole models that its library has built, so it knows the axis dp and the ZeRO stages.
"""

from __future__ import annotations

import atexit
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

from isograd.comm import raw
from isograd.errors import DoorError, IsogradError
from isograd.layout import Layout
from isograd.mesh import Mesh

OPTION = "--isograd"


def need(packages: Iterable[str], door: str, extra: str) -> None:
    """Raise IG850 when a package that a door stands on is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise DoorError(
            "IG850",
            f"{door} needs {' and '.join(missing)}",
            seen="no such package in this environment",
            fix=f"pip install 'isograd[{extra}]'",
        )


def layout_said(given: str | None) -> str | None:
    """The layout of `--isograd LAYOUT` or `--isograd=LAYOUT` on this process's command line; else the one given.

    The option is taken out of sys.argv, which the script reads; sys.orig_argv keeps it for further Trainers.
    """
    found = _option_in(sys.argv)
    if found is not None:
        place, count, layout = found
        words = sys.argv[place : place + count]
        del sys.argv[place : place + count]
        if _option_in(sys.orig_argv) is None:  # a process whose sys.argv was set by the one that started it
            sys.orig_argv += words
        return layout
    found = _option_in(sys.orig_argv)
    return given if found is None else found[2]


def _option_in(words: list[str]) -> tuple[int, int, str] | None:
    """(place, how many words, layout) of the option."""
    for place, word in enumerate(words[1:], 1):
        name, equals, value = word.partition("=")
        if name == OPTION and equals:
            return place, 1, value
        if name == OPTION and place + 1 < len(words):
            return place, 2, words[place + 1]
        if name == OPTION:
            raise DoorError("IG854", f"{OPTION} stands without a layout", expected=f"{OPTION} 'dp2 zero1'")
    return None


def mesh_of(layout: str | None) -> Mesh:
    """The mesh of the running world. A layout without dp, or none, gives dp all ranks."""
    ranks = raw.world()[1]
    words = layout or ""
    parsed = Layout.parse(words if re.search(r"\bdp\d", words) else f"dp{ranks} {words}")
    mesh = Mesh(parsed)
    tells_its_end(mesh.rank)
    if mesh.size("dp") != ranks:
        raise DoorError(
            "IG855",
            "a model that another library has built is whole, and cannot be cut by this layout",
            seen=str(parsed),
            expected=f"dp{ranks} with zero0 to zero3",
            fix="tp and cp: ig.hugging.load(folder, mesh) and ig.Engine, or 'isograd train'",
            where=mesh.where(),
        )
    return mesh


def refuse(reasons: dict[str, Any], what: str, fix: str, mesh: Mesh) -> None:
    """Raise IG856 for each of these that is set."""
    found = [name for name, is_set in reasons.items() if is_set]
    if found:
        raise DoorError(
            "IG856", what, seen=", ".join(found), expected="none of these", fix=fix, where=mesh.where()
        )  # fmt: skip


ENDED = "ended/"  # and a rank: the error with which it has left a loop


@contextmanager
def ends_alike(mesh: Mesh) -> Iterator[None]:
    """A foreign loop of all ranks. When an exception ends it on one of them, and others lose their connection to that
    one, they raise IG870, which names the rank and its error, in the place of the backend's own."""
    raw.raise_flag(f"{ENDED}{mesh.rank}", "")
    try:
        with names_lost(mesh):
            yield
    except Exception as error:
        if not (isinstance(error, DoorError) and error.code == "IG870"):
            _note(mesh.rank, error)
        raise


@cache  # once in a process
def tells_its_end(rank: int) -> None:
    """Where an exception that nobody catches ends this process, the others can read which (`names_lost`)."""
    atexit.register(_tell_end, rank)


def _tell_end(rank: int) -> None:
    error = getattr(sys, "last_value", None)  # the interpreter leaves it here behind its traceback
    if error is not None:
        _note(rank, error)


def _note(rank: int, error: BaseException) -> None:
    with suppress(RuntimeError):  # the rank that kept the store has ended
        raw.raise_flag(f"{ENDED}{rank}", f"{type(error).__name__}: {error}"[:500])


@contextmanager
def names_lost(mesh: Mesh) -> Iterator[None]:
    """Around a call in which this rank waits for others: where one of them has ended, IG870 names it and its error."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, IsogradError) or not any(word in str(error).lower() for word in LOST):
            raise
        notes = [(rank, raw.note_of(f"{ENDED}{rank}")) for rank in range(mesh.layout.world_size)]
        said = next((f"rank {rank}: {note}" for rank, note in notes if note), "no word of the rank that ended")
        raise DoorError(
            "IG870",
            "another rank has left the loop",
            seen=said,
            expected="all ranks in one loop until its end",
            fix="this rank is well: see that one's error",
            where=mesh.where(),
        ) from error


LOST = ("closed by peer", "reset by peer", "broken pipe", "connection closed", "connection refused")
