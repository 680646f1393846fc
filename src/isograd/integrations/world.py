"""The mesh of a script that another library started, of a layout given in code or by `--isograd` beside its options."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

from isograd.comm import world
from isograd.comm.world import clone_store, is_lost_connection, store_get, store_set
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import IntegrationError, IsogradError, headline

OPTION = "--isograd"


def require_packages(packages: Iterable[str], integration: str) -> None:
    """Raise IG850 when a package that an integration stands on is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise IntegrationError(
            "IG850",
            f"{integration} needs {' and '.join(missing)}",
            seen="no such package in this environment",
            fix=f"pip install {' '.join(missing)}",
        )


def layout_option(given: str | None) -> str | None:
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
            raise IntegrationError("IG854", f"{OPTION} stands without a layout", expected=f"{OPTION} 'dp2 zero1'")
    return None


def mesh_for(layout: str | None, axes: str = "dp") -> Mesh:
    """The mesh of the running world. A layout without dp gives dp the ranks that its other axes leave. axes: those that
    the integration has."""
    ranks = world.world()[1]
    words = layout or ""
    if not re.search(r"\bdp\d", words):
        words = f"dp{max(1, ranks // Layout.parse(words).world_size)} {words}"
    mesh = Mesh(Layout.parse(words))
    atexit.unregister(_report_at_exit)  # of another mesh: once in a process
    atexit.register(_report_at_exit, mesh.rank, ranks)
    others = [f"{axis}{mesh.size(axis)}" for axis in ("cp", "tp", "pp", "ep") if mesh.size(axis) > 1]
    missing = [axis for axis in others if axis[:2] not in axes.split()]
    if missing:
        raise IntegrationError(
            "IG855",
            f"this integration does not cut a model over {', '.join(missing)}",
            seen=str(mesh.layout),
            expected=f"{' and '.join(axes.split())} with zero0 to zero3",
            fix="cp, tp, ep: Trainer = ig.integrations.trainer(Trainer, 'dp2 cp2 ulysses zero1'), or accelerate, "
            "Lightning or DeepSpeed. pp: the Trainer or Lightning; or model = ig.hf.load(folder, mesh); "
            "engine = ig.Engine(model, mesh, optimizer); engine.train_step(batch, micro_batches=4)",
            where=mesh.describe_rank(),
        )
    return mesh


def layout_of_parallelism(config: Any, layout: str | None) -> str:
    """accelerate's ParallelismConfig in the words of a layout. FSDP2 shards over dp_shard_size and cp_size: zero3,
    unless `layout`, which may name nothing else, has another stage."""
    stage = Layout.parse(layout or "")
    replicas, shards, rings = config.dp_replicate_size, config.dp_shard_size, config.cp_size
    if stage.world_size > 1 or (replicas > 1 and shards > 1):
        raise IntegrationError(
            "IG855",
            "a ParallelismConfig that is no layout",
            seen=f"dp_replicate_size={replicas}, dp_shard_size={shards}, layout={layout!r}",
            expected="dp_replicate_size or dp_shard_size, and a layout that names a ZeRO stage only, if any",
            fix="leave parallelism_config out: ig.integrations.trainer(Trainer, 'dp4 cp2 ring zero3')",
        )
    words = [f"dp{replicas * shards}"] if replicas * shards > 1 else []  # left out: the ranks that the others leave
    words += [f"cp{rings} ring"] if rings > 1 else [f"cp{config.sp_size} ulysses"] if config.sp_size > 1 else []
    words += [f"tp{config.tp_size}"] if config.tp_size > 1 else []
    named = layout is not None and "zero" in layout
    return " ".join([*words, f"zero{stage.zero if named else 3 if shards > 1 or rings > 1 else 0}"])


def refuse(reasons: dict[str, Any], what: str, fix: str, mesh: Mesh) -> None:
    """Raise IG856 for each of these that is set."""
    found = [name for name, is_set in reasons.items() if is_set]
    if found:
        raise IntegrationError(
            "IG856", what, seen=", ".join(found), expected="none of these", fix=fix, where=mesh.describe_rank()
        )  # fmt: skip


class FailureReport:
    """A foreign loop of all ranks, until its `end`, or an exception (`fail`).

    The rank that fails notes its error in the store where the ranks met; the others, which lose their connection to
    it, read it there (`name_failed_rank`). Without torchrun's agent the store is rank 0's and ends with it: so while a
    loop runs, a thread of each other rank asks for rank 0's note twice a second, and rank 0 ends when all have it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._over = threading.Event()
        store_set(f"{ENDED}{self.mesh.rank}", "")
        _rank_0_failure.clear()
        if self.mesh.rank:
            self._thread = threading.Thread(target=_listen, args=(self.mesh.rank, self._over), daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The loop is over."""
        self._over.set()
        if self.mesh.rank:  # torch's store aborts a process that ends while a thread is inside it
            self._thread.join(PATIENCE)

    def fail(self, error: BaseException, told: bool) -> None:
        """Note the error with which this rank leaves the loop; of a lost connection, raise IG870, which names the rank
        that has ended. `told`: all know it. Else others may wait anywhere: this rank's connections are closed."""
        found = failed_rank_error(error, self.mesh)
        _failed.append(self)
        if self.mesh.layout.world_size > 1 and not told:
            store_failure(self.mesh.rank, error)
            world.leave(headline(error))
        if found is not None:
            raise found from error


def rejoin() -> bool:
    """Before a further loop: whether an exception had ended one, here or on another rank. All meet in a new world."""
    if ended := store_get(world.ABORTED):
        world.leave(ended, tell=False)
        world.world()
    return bool(ended)


@contextmanager
def reports_failures(mesh: Mesh, told: Callable[[BaseException], bool]) -> Iterator[None]:
    """A foreign loop of all ranks. When an exception ends it on one of them, the others raise IG870, which names the
    rank and its error. told: whether all ranks know of an error."""
    loop = FailureReport(mesh)
    try:
        yield
    except BaseException as error:
        loop.fail(error, told(error))
        raise
    finally:
        loop.end()


ENDED, HEARD = "ended/", "heard/"  # and a rank: the error with which it has left a loop; that of rank 0 that it knows
OF_OTHERS = ("IG213", "IG215", "IG550", "IG571", "IG572", "IG870")  # the errors of a rank that is well
PATIENCE = 3.0  # seconds that rank 0 waits for the others to know its error
_failed: list[FailureReport] = []  # of this process
_rank_0_failure: list[str] = []  # of rank 0, whose store may have ended with it


def _line_to_rank_0() -> Any:
    """A connection to the store that ends with rank 0; None where a file or torchrun's agent keeps it."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else clone_store(flags=True)


def _listen(rank: int, over: threading.Event) -> None:
    with suppress(RuntimeError):  # rank 0 has ended without a word
        line = _line_to_rank_0()  # in this thread: to a store that has ended it takes long
        while line is not None and not over.wait(0.5):
            said = store_get(f"{ENDED}0", line)
            if said and said not in _rank_0_failure:
                _rank_0_failure[:] = [said]
                store_set(f"{HEARD}{rank}", said, line)


def _report_at_exit(rank: int, ranks: int) -> None:
    """Where an exception that nobody catches ends this process, the others can read which (`name_failed_rank`)."""
    error = getattr(sys, "last_value", None)  # the interpreter leaves it here behind its traceback
    if error is None:
        return
    store_failure(rank, error)
    if _failed and rank == 0 and _line_to_rank_0() is not None:
        notes = [f"{HEARD}{other}" for other in range(1, ranks)]
        said, until = store_get(f"{ENDED}0"), time.monotonic() + PATIENCE
        while said and time.monotonic() < until and any(store_get(note) != said for note in notes):
            time.sleep(0.05)


def store_failure(rank: int, error: BaseException) -> None:
    """Let the others know the error with which this rank leaves a loop, unless one of theirs is why."""
    if is_lost_connection(error) or (isinstance(error, IsogradError) and error.code in OF_OTHERS):
        return
    with suppress(RuntimeError):  # the rank that kept the store has ended
        store_set(f"{ENDED}{rank}", f"{type(error).__name__}: {error}"[:500])


@contextmanager
def name_failed_rank(mesh: Mesh) -> Iterator[None]:
    """Around a call in which this rank waits for others: where one of them has ended, IG870 names it and its error."""
    try:
        yield
    except (RuntimeError, IsogradError) as error:
        if (found := failed_rank_error(error, mesh)) is None:
            raise
        raise found from error


def name_failed_rank_in_forward(engine: Engine) -> None:
    """The same, where a forward of ZeRO 3 waits for blocks of other ranks."""
    if engine._zero3 is not None:
        engine._zero3.named = partial(failed_rank_error, mesh=engine.mesh)


def failed_rank_error(error: BaseException, mesh: Mesh) -> IntegrationError | None:
    """IG870, of a backend's error of a connection that is lost; and at ZeRO 3 of IG571 and IG572, where this rank
    has met one that has failed. None of any other error."""
    elsewhere = isinstance(error, IsogradError) and error.code in ("IG213", "IG571", "IG572")
    if not elsewhere and not is_lost_connection(error):
        return None
    said = "; ".join(f"rank 0: {words}" for words in _rank_0_failure)
    for rank in () if said else range(mesh.layout.world_size):
        note = store_get(f"{ENDED}{rank}")
        said = said or (f"rank {rank}: {note}" if note else "")
    if elsewhere and not said:
        return None
    return IntegrationError("IG870", seen=said or "no word of the rank that ended", where=mesh.describe_rank())
