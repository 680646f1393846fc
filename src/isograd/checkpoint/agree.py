"""What goes wrong in a folder of checkpoints, as one error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from isograd.comm import consensus
from isograd.core.mesh import Mesh
from isograd.errors import CheckpointError, IsogradError

T = TypeVar("T")
raise_alike = partial(consensus.raise_on_all_ranks, kind=CheckpointError)


def all_or_none(run: Callable[[], T], doing: str, mesh: Mesh) -> T:
    """Run something on this rank; when it fails on any, all raise its error."""
    return consensus.run_or_raise_on_all_ranks(
        run, mesh, CheckpointError, partial(_failed, doing, mesh.describe_rank())
    )


@contextmanager
def as_ours(doing: str, where: str) -> Iterator[None]:
    """What the file system refuses, and whatever else goes wrong there, as an error with a code."""
    try:
        yield
    except IsogradError:
        raise
    except Exception as error:
        raise _failed(doing, where, error) from error


def _failed(doing: str, where: str, error: Exception) -> CheckpointError:
    return CheckpointError("IG930", seen=f"{type(error).__name__}: {error}", where=where, doing=doing)
