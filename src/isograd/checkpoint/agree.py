"""What goes wrong in a folder of checkpoints, as one error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from isograd.comm import agree
from isograd.errors import CheckpointError, IsogradError
from isograd.mesh import Mesh

T = TypeVar("T")


def raise_alike(mine: IsogradError | None, mesh: Mesh) -> None:
    """Raise the error of the first rank that has one, on all ranks."""
    agree.raise_alike(mine, mesh, CheckpointError)


def all_or_none(run: Callable[[], T], doing: str, mesh: Mesh) -> T:
    """Run something on this rank; when it fails on any, all raise its error."""
    return agree.all_or_none(run, mesh, CheckpointError, partial(_failed, doing, mesh.where()))


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
    return CheckpointError(
        "IG930",
        f"{doing} failed",
        seen=f"{type(error).__name__}: {error}",
        expected="a folder that can be written, with enough space",
        fix="free space or fix permissions; earlier checkpoints are unchanged",
        where=where,
    )
