"""Ranks that wait for each other for ever find it out by themselves, and say which message each of them waits for.

A rank that has waited a while for one message writes into the store whose it is. The rank at the other end, where it
waits too, looks whether it owes that message: whether it has sent fewer (or asked for fewer) than that. A rank that
waits sends nothing. So when these notes lead from a rank back to itself, and each in the circle owes the one before it,
none of them will ever go on: it is no matter of time. A message that is only slow is owed by nobody. The messages of
NCCL are not followed: no host waits for them.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from isograd.comm import threads
from isograd.comm.group import RankContext
from isograd.comm.world import DEADLOCK, cut, rank_and_size, store_get, store_set

LOOK_S = 0.5
LOOKS = 6  # after which a wait is written down
_NOT_THE_PROGRAM = {"isograd", "torch", "contextlib", "threading", "concurrent"}


class DeadlockWatch(threads.RankThread):
    """The thread that looks whether its rank still waits for the same message."""

    def __init__(self, context: RankContext) -> None:
        self._place, self._rank, self._thread = context, rank_and_size()[0], threading.get_ident()
        self.over = threading.Event()  # set when the rank leaves its world
        super().__init__(threads.member(), self._look_on, "isograd deadlock watch")
        self.start()

    def _awaited(self) -> Any:
        handle = self._place.wait.handle
        at = None if handle is None else handle.at
        return None if at is None or at[2] is None else at

    def _look_on(self) -> None:
        seen, looks, said, wait = None, 0, "", 0
        while not self.over.wait(LOOK_S):
            handle, now = self._place.wait.handle, self._awaited()
            if now is None or now is not seen:
                seen, looks, said, wait = now, 0, "", time.monotonic_ns()  # a store may be older than a world
            looks += 1
            if handle is not None and now is not None and looks > LOOKS:
                with suppress(RuntimeError, ValueError):  # the store may have ended with its rank
                    said = self._look(handle.group, now, wait, said)

    def _look(self, group: Any, now: Any, wait: int, said: str) -> str:
        """Write my note, follow those of the others, and end the wait where they come back to me. Returns my note."""
        member, (sends, tag, number, size) = now[1:]
        way, whose = f"to send {size} bytes to" if sends else f"for {size} bytes of", group.ranks[member]
        mine = {
            "wait": wait,
            "of": whose,
            "key": [group.purpose, group.ranks, group.index, sends, tag, number],
            "said": f"rank {self._rank}{self._program()} waits {way} rank {whose} over {group.axes!r}",
            "owes": [],  # which rank, in which of its waits
        }
        chain, ranks = [mine], [self._rank]
        while (whose := chain[-1]["of"]) not in ranks and (note := store_get(f"waits/{whose}")):
            ranks.append(whose)
            chain.append(json.loads(note))
        comes_back = chain[-1]["of"] == self._rank
        if comes_back and self._is_owed(*chain[-1]["key"]):
            mine["owes"] = [ranks[-1], chain[-1]["wait"]]
        if (text := json.dumps(mine)) != said:
            store_set(f"waits/{self._rank}", text)
        waits = [[rank, note["wait"]] for rank, note in zip(ranks, chain, strict=True)]
        if comes_back and [note["owes"] for note in chain] == waits[-1:] + waits[:-1] and self._awaited() is now:
            cut(self._place, f"{DEADLOCK}: " + "; ".join(note["said"] for note in chain))
        return text

    def _is_owed(self, purpose: str, ranks: list[int], member: int, sends: bool, tag: int, number: int) -> bool:
        """Whether this rank has not done its part of a message that another one waits for."""
        transport = self._place.made.get((purpose, tuple(ranks)))
        return transport is None or transport.counts[not sends, member, tag] < number

    def _program(self) -> str:
        """Where the program has called what waits."""
        frame, calls = sys._current_frames().get(self._thread), ""
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_PROGRAM:
            if frame.f_globals["__name__"].startswith("isograd"):
                calls = f", in {frame.f_code.co_qualname}"
            frame = frame.f_back
        return f" ({frame.f_code.co_filename}:{frame.f_lineno}{calls})" if frame is not None else ""
