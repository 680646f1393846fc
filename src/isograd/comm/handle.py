"""Communication in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

from isograd.comm.deadlock import DeadlockWatch
from isograd.comm.group import Group, Wait
from isograd.comm.world import abort_group_on_interrupt, process


class Handle:
    """Communication in progress. `wait` returns when received tensors are filled and sent ones may be reused: on CUDA,
    for the stream that is current where `wait` is called, and the host goes on."""

    def __init__(self, group: Group | None = None, keep: object = None) -> None:
        """`keep`: tensors that have to live until then."""
        self.group, self._keep = group, [keep]
        # Under way: works, the member of the group at the other end, and which message (of deadlock.py) it is.
        self._works: list[tuple[Any, int, Any]] = []
        self._then: list[Callable[[], None]] = []
        self._arrival: futures.Future[None] | None = None  # of the thread of `arrived_within`
        process.unfinished.add(self)

    def add(self, work: Any, member: int = -1, message: Any = None) -> None:
        """By a transport: one message has been started. From here on `forget` reaches it. -1: of several members."""
        self._works.append((work, member, message))

    def and_then(self, more: Callable[[], None]) -> Handle:
        """This handle, which also calls `more` at the end of `wait`."""
        self._then.append(more)
        return self

    @property
    def at(self) -> tuple[Any, int, Any] | None:
        """What is waited for, while there is a wait."""
        return next(iter(self._works), None)  # another thread may wait for them, and let go of them

    def _wait_each(self, only: int | None = None) -> None:
        """Wait for each of the works, or for those of one member, which come first then."""
        if self.group is not None:
            self.group.refuse_closed()  # `forget` has ended them: what they were to fill is not filled
        self._works.sort(key=lambda each: only is not None and each[1] != only)
        while (each := self.at) and only in (None, each[1]):
            each[0].wait()
            with suppress(ValueError):  # `forget` has ended it
                self._works.remove(each)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Where this rank goes on only when the messages have arrived."""
        context = process if self.group is None else self.group.context
        watch, at = context.wait.watch, self.at
        over = watch is None or watch.over.is_set() or not watch.is_alive()  # dead in a process that was forked
        if over and at is not None and at[2] is not None:
            watch = DeadlockWatch(context)
        context.wait = Wait(self, watch)
        try:
            yield
        finally:
            context.wait = Wait(None, watch)

    def wait_for(self, member: int) -> None:
        """Wait only for what is sent to and received from one member."""
        with self._watched(), abort_group_on_interrupt():
            self._wait_each(only=member)

    def wait(self) -> None:
        """Wait until everything is sent and received."""
        with self._watched(), abort_group_on_interrupt():
            if self._arrival is None:
                self._wait_each()
            else:
                self._arrival.result()
            self.forget()
            process.unfinished.discard(self)
            for more in self._then:
                more()
        self._then.clear()
        self._keep.clear()

    def arrived_within(self, seconds: float) -> bool:
        """Whether everything arrives within a while. NCCL is asked and never waited for; gloo's messages cannot be
        asked whether they have arrived, so a thread waits for them."""
        if self.group is not None and self.group.is_nccl:
            return all(work.is_completed() for work, *_ in self._works)
        if self._arrival is None and self._works:
            self._arrival = futures.Future()
            Thread(target=self._wait_in_thread, args=(self._arrival,), daemon=True).start()
        return self._arrival is None or bool(futures.wait([self._arrival], seconds).done)

    def _wait_in_thread(self, arrival: futures.Future[None]) -> None:
        try:
            self._wait_each()
            arrival.set_result(None)
        except BaseException as error:
            arrival.set_exception(error)

    def forget(self) -> None:
        """Let go of messages."""
        self._works.clear()
