"""A worker of a pool takes part in a world, and leaves it without dying when another rank has died."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from typing import Any

from isograd.comm import world
from isograd.elastic.progress import process_progress
from isograd.launcher.worker import RAISED_AT, Seat, sit


def in_world(seat: Seat, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """fn(*args) as a rank of a new world. However it ends, this process has left the world afterwards.

    After an error the connections must close at once, since other ranks may wait for this one; and they stay open as
    long as a frame of the error, or a cycle of objects, holds a message that has not arrived.
    """
    if not gc.get_freeze_count():
        gc.freeze()  # `collect` below then looks at this world's objects, and not at all of torch's (a second or two)
    try:
        process_progress.enter(seat.directory, seat.rank)
        sit(seat)
        return fn(*args)
    except BaseException as error:
        vars(error)[RAISED_AT] = time.monotonic()  # before the others feel it, whose errors are consequences
        before: BaseException | None = error
        seen: set[int] = set()
        while before is not None and id(before) not in seen:  # free what the frames of these errors hold
            seen.add(id(before))
            traceback.clear_frames(before.__traceback__)
            before = before.__cause__ or before.__context__
        raise
    finally:
        world.leave()
        gc.collect()
