"""Files inside a folder that isograd writes into, opened without following a link.

A run's folder may come out of an archive. A link in it, under the name of a file that a run writes, would have the run
overwrite what the link points to. So a run refuses a folder with links in it at its start (`no_links`), and each writer
opens its files with `opened`, which follows no link and writes into no file that has a second name. A folder that is
itself a link is its owner's wish, and is followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from isograd.outside import FileError, kind_of


def no_links(folder: Path, spared: str = "") -> None:
    """Refuse a folder in which anything, at any depth, is a symbolic link. spared: a folder in it, itself no link, that
    isograd does not write into."""
    found = next(_links(folder, spared), None)
    if found is not None:
        raise _link(found, f"a symbolic link to {os.readlink(found)!r}")


def _links(folder: Path, spared: str) -> Iterator[str]:
    for home, folders, files in os.walk(folder):
        if Path(home) == folder and spared in folders and not (folder / spared).is_symlink():
            folders.remove(spared)
        for name in (*folders, *files):
            path = os.path.join(home, name)
            if os.path.islink(path):
                yield path


def opened(path: Path, mode: str, **more: Any) -> IO[Any]:
    """As open(path, mode), for a regular file that has one name and is reached by no link."""
    return open(path, mode, opener=_without_links, **more)


def _without_links(path: str, flags: int) -> int:
    truncate = flags & os.O_TRUNC
    try:
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO or a socket
            raise _link(path, "a symbolic link" if error.errno == errno.ELOOP else "a FIFO or a socket") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _link(path, kind_of(found.st_mode))
        if found.st_nlink > 1:
            raise _link(path, f"a file with {found.st_nlink} names, which would all be overwritten")
        if truncate:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_text(path: Path, text: str) -> None:
    """The text as the whole content of a file."""
    with opened(path, "w", encoding="utf-8") as file:
        file.write(text)


def replace_text(path: Path, text: str) -> None:
    """The same, so that nobody meets half of it: not a reader, and not the next start after this process is killed."""
    partial = path.with_suffix(".partial")
    write_text(partial, text)
    os.replace(partial, path)


def _link(path: str, seen: str) -> FileError:
    return FileError(
        "IG666",
        f"{path} is in a folder that isograd writes into, and is no plain file of its own",
        seen=seen,
        expected="regular files and folders: nothing outside of the folder is written through it",
        fix="remove it; to keep a run on another disk, link the run's whole folder, or give that disk with --run",
    )
