"""Files inside a folder that isograd writes into, opened without following a link.

A run's folder may come out of an archive. A link in it, under the name of a file that a run writes, would have the run
overwrite what the link points to. So a run refuses a folder with links in it at its start (`no_links`), and each writer
opens its files with `open_to_write`, which follows no link and writes into no file that has a second name. A folder
that is itself a link is its owner's wish, and is followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from isograd.io.store import Place, StorePath
from isograd.io.untrusted import FileError, kind_of


def no_links(folder: Path, spared: str = "", closed: str = "") -> None:
    """Refuse a folder in which anything, at any depth, is a link of either kind, a FIFO, a socket or a device.

    spared: a folder in it, itself no link, that isograd does not write into. closed: one whose folders, once they are
    written, are only renamed or removed: files in them may have other names, as those of a backup by hard links."""
    for path, said in _foreign(folder, spared, closed):
        raise FileError("IG666", seen=said, path=path)


def _foreign(folder: Path, spared: str, closed: str) -> Iterator[tuple[str, str]]:
    for home, folders, files in os.walk(folder):
        if Path(home) == folder and spared in folders and not (folder / spared).is_symlink():
            folders.remove(spared)
        for name in (*folders, *files):
            path = os.path.join(home, name)
            try:
                about = os.lstat(path)
            except FileNotFoundError:  # of another rank, which has renamed or removed it since
                continue
            if stat.S_ISLNK(about.st_mode):
                yield path, f"a symbolic link to {os.readlink(path)!r}"
            elif stat.S_ISREG(about.st_mode):
                if about.st_nlink > 1 and not (closed and folder / closed in Path(home).parents):
                    yield path, f"a file with {about.st_nlink} names (hard links)"
            elif not stat.S_ISDIR(about.st_mode):
                yield path, kind_of(about.st_mode)


def not_there(path: Place, wanted: str = "file") -> str:
    """What stands at a path where a file or a folder was wanted, in a few words."""
    if isinstance(path, StorePath):
        return f"no such {wanted}"
    try:
        return kind_of(path.stat().st_mode)
    except FileNotFoundError:
        lost = f"a symbolic link to {os.readlink(path)!r}, which is not there" if path.is_symlink() else ""
        return lost or f"no such {wanted}"
    except OSError as error:
        return "a symbolic link that leads in a circle" if error.errno == errno.ELOOP else str(error.strerror)


def open_to_write(path: Place, mode: str, **more: Any) -> IO[Any]:
    """As open(path, mode), for a regular file that has one name and is reached by no link; or an object of a store."""
    if isinstance(path, StorePath):
        return path.open_to_write()  # type: ignore[return-value]
    return open(path, mode, opener=_without_links, **more)


def _without_links(path: str, flags: int) -> int:
    truncate = flags & os.O_TRUNC
    try:
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO or a socket
            raise FileError(
                "IG666", seen="a symbolic link" if error.errno == errno.ELOOP else "a FIFO or a socket", path=path
            ) from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FileError("IG666", seen=kind_of(found.st_mode), path=path)
        if found.st_nlink > 1:
            raise FileError(
                "IG666", seen=f"a file with {found.st_nlink} names, which would all be overwritten", path=path
            )
        if truncate:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
