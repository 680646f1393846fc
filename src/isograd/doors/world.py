"""The mesh of a script that another library started: from a layout given in code, or by `--isograd` beside its options.

A door needs whole models that its library has built, so it knows the axis dp and the ZeRO stages.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

from isograd.comm import raw
from isograd.engine import Engine
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
    tells_its_end(mesh.rank, ranks)
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


class Loop:
    """A foreign loop of all ranks, between `begin` and `end`, or an exception (`fail`).

    The rank that fails notes its error in the store where the ranks met; the others, which lose their connection to
    it, read it there (`names_lost`). Without torchrun's agent the store is rank 0's and ends with it: so while a loop
    runs, a thread of each other rank asks for rank 0's note twice a second, and rank 0 ends when all have it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._over = threading.Event()

    def begin(self) -> None:
        """Nothing has failed."""
        raw.raise_flag(f"{ENDED}{self.mesh.rank}", "")
        _last_words.clear()
        line = _line_to_rank_0() if self.mesh.rank else None
        if line is not None:
            threading.Thread(target=_listen, args=(line, self.mesh.rank, self._over), daemon=True).start()

    def end(self) -> None:
        """The loop is over."""
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """Note the error with which this rank leaves the loop."""
        note_end(self.mesh.rank, error)
        _failed.append(self)


@contextmanager
def ends_alike(mesh: Mesh) -> Iterator[None]:
    """A foreign loop of all ranks. When an exception ends it on one of them, and others lose their connection to that
    one, they raise IG870, which names the rank and its error, in the place of the backend's own."""
    loop = Loop(mesh)
    loop.begin()
    try:
        with names_lost(mesh):
            yield
    except Exception as error:
        loop.fail(error)
        raise
    finally:
        loop.end()


ENDED, HEARD = "ended/", "heard/"  # and a rank: the error with which it has left a loop; that of rank 0 that it knows
OF_OTHERS = ("IG550", "IG572", "IG870")  # the errors of a rank that is well
PATIENCE = 3.0  # seconds that rank 0 waits for the others to know its error
_failed: list[Loop] = []  # of this process
_last_words: list[str] = []  # of rank 0, whose store may have ended with it


def _line_to_rank_0() -> Any:
    """A connection to the store that ends with rank 0; None where a file or torchrun's agent keeps it."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else raw.store_line(flags=True)


def _listen(line: Any, rank: int, over: threading.Event) -> None:
    with suppress(RuntimeError):  # rank 0 has ended without a word
        while not over.wait(0.5):
            said = raw.note_of(f"{ENDED}0", line)
            if said and said not in _last_words:
                _last_words[:] = [said]
                raw.raise_flag(f"{HEARD}{rank}", said, line)


@cache  # once in a process
def tells_its_end(rank: int, ranks: int) -> None:
    """Where an exception that nobody catches ends this process, the others can read which (`names_lost`)."""
    atexit.register(_tell_end, rank, ranks)


def _tell_end(rank: int, ranks: int) -> None:
    error = getattr(sys, "last_value", None)  # the interpreter leaves it here behind its traceback
    if error is None:
        return
    note_end(rank, error)
    if _failed and rank == 0 and _line_to_rank_0() is not None:
        notes = [f"{HEARD}{other}" for other in range(1, ranks)]
        said, until = raw.note_of(f"{ENDED}0"), time.monotonic() + PATIENCE
        while said and time.monotonic() < until and any(raw.note_of(note) != said for note in notes):
            time.sleep(0.05)


def note_end(rank: int, error: BaseException) -> None:
    """Let the others know the error with which this rank leaves a loop, unless one of theirs is why."""
    if _of_connection(error) or (isinstance(error, IsogradError) and error.code in OF_OTHERS):
        return
    with suppress(RuntimeError):  # the rank that kept the store has ended
        raw.raise_flag(f"{ENDED}{rank}", f"{type(error).__name__}: {error}"[:500])


@contextmanager
def names_lost(mesh: Mesh) -> Iterator[None]:
    """Around a call in which this rank waits for others: where one of them has ended, IG870 names it and its error."""
    try:
        yield
    except (RuntimeError, IsogradError) as error:
        found = lost(error, mesh)
        if found is None:
            raise
        raise found from error


def names_in_forward(engine: Engine) -> None:
    """The same, where a forward of ZeRO 3 waits for blocks of other ranks."""
    if engine._units is not None:
        engine._units.named = partial(lost, mesh=engine.mesh)


def lost(error: BaseException, mesh: Mesh) -> DoorError | None:
    """IG870, of a backend's error of a connection that is lost; and of IG572, at ZeRO 3, where this rank has met one
    that has failed at another place. None of any other error."""
    elsewhere = isinstance(error, IsogradError) and error.code == "IG572"
    if not elsewhere and not _of_connection(error):
        return None
    said = "; ".join(f"rank 0: {words}" for words in _last_words)
    for rank in () if said else range(mesh.layout.world_size):
        note = raw.note_of(f"{ENDED}{rank}")
        said = said or (f"rank {rank}: {note}" if note else "")
    if elsewhere and not said:
        return None
    return DoorError(
        "IG870",
        "another rank has left the loop",
        seen=said or "no word of the rank that ended",
        expected="all ranks in one loop until its end",
        fix="this rank is well: see that one's error",
        where=mesh.where(),
    )


def _of_connection(error: BaseException) -> bool:
    """Whether a backend says that it has lost another rank."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in LOST)


LOST = ("closed by peer", "reset by peer", "broken pipe", "connection closed", "connection refused")
