"""Communication in progress, and which ranks this process waits for: a watchdog names them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread, get_ident
from typing import Any

from isograd.comm.group import Group
from isograd.comm.world import abort_group_on_interrupt, process


class Handle:
    """Communication in progress. `wait` returns when received tensors are filled and sent ones may be reused: on CUDA,
    for the stream that is current where `wait` is called, and the host goes on."""

    def __init__(self, group: Group | None = None, keep: object = None) -> None:
        """`keep`: tensors that have to live until then."""
        self._group, self._keep = group, keep
        self._works: list[tuple[Any, int]] = []  # and the member of the group at the other end
        self._at = 0  # which of the works is waited for
        self._then: list[Callable[[], None]] = []
        self._waiter: Thread | None = None  # of `arrived_within`
        self._error: BaseException | None = None
        process.unfinished.add(self)

    def add(self, work: Any, member: int = -1) -> None:
        """By a transport: one message has been started. From here on `forget` reaches it. -1: of several members."""
        self._works.append((work, member))

    def and_then(self, more: Callable[[], None]) -> Handle:
        """This handle, which also calls `more` at the end of `wait`."""
        self._then.append(more)
        return self

    def _wait_each(self, only: int | None = None) -> None:
        """Wait for each of the works, or for those of one member."""
        _waiting[get_ident()] = self
        try:
            for at, (work, member) in enumerate(self._works):
                self._at = at
                if only is None or member == only:
                    work.wait()
        finally:
            _waiting.pop(get_ident(), None)

    def wait_for(self, member: int) -> None:
        """Wait only for what is sent to and received from one member."""
        with abort_group_on_interrupt():
            self._wait_each(only=member)

    def wait(self) -> None:
        """Wait until everything is sent and received."""
        with abort_group_on_interrupt():
            if self._waiter is None:
                self._wait_each()
            else:
                self._waiter.join()
                if self._error is not None:
                    raise self._error
            self.forget()
            process.unfinished.discard(self)
            for more in self._then:
                more()
        self._then, self._keep = [], None

    def arrived_within(self, seconds: float) -> bool:
        """Whether everything arrives within a while. NCCL is asked and never waited for; gloo's messages cannot be
        asked whether they have arrived, so a thread waits for them."""
        if self._group is not None and self._group.handle is not None and self._group.handle.native:
            return all(work.is_completed() for work, _ in self._works)
        if self._waiter is None and self._works:
            self._waiter = Thread(target=self._wait_in_thread, daemon=True)
            self._waiter.start()
        if self._waiter is not None:
            self._waiter.join(seconds)
        return self._waiter is None or not self._waiter.is_alive()

    def _wait_in_thread(self) -> None:
        try:
            self._wait_each()
        except BaseException as error:
            self._error = error

    def forget(self) -> None:
        """Let go of messages."""
        self._works.clear()


_waiting: dict[int, Handle] = {}  # thread: the handle that it waits for


def awaited() -> list[int]:
    """The global ranks from which, or to which, messages are under way that threads of this process wait for."""
    found = set()
    for handle in list(_waiting.values()):
        group, works = handle._group, list(handle._works)
        if group is not None and handle._at < len(works) and works[handle._at][1] >= 0:
            found.add(group.ranks[works[handle._at][1]])
    return sorted(found)
