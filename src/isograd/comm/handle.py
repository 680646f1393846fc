"""Communication in progress, and which ranks this process waits for: a watchdog names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread, get_ident
from typing import TYPE_CHECKING, Any

from isograd.comm.channel import Work
from isograd.errors import IsogradError

if TYPE_CHECKING:
    from isograd.comm.group import Group


class Handle:
    """Communication in progress. `wait` returns when received tensors are filled and sent ones may be reused."""

    def __init__(
        self,
        works: Sequence[Any] = (),
        keep: Sequence[object] = (),
        then: Any = None,
        members: Sequence[int] = (),
        group: Group | None = None,
    ) -> None:
        """`members`: for each of the works, the member of `group` at the other end, where it is known."""
        self._works, self._keep, self._then, self._members = list(works), list(keep), then, list(members)
        self._group, self._at = group, 0  # _at: which of the works is waited for
        self._waiter: Thread | None = None  # waits for gloo's messages, which cannot be asked whether they have arrived
        self._error: BaseException | None = None

    def ready(self) -> bool:
        """Whether `wait` would return at once. It never waits itself: autograd hooks ask this."""
        if all(work.is_completed() for work in self._works):
            return True
        if any(isinstance(work, Work) and not work.is_completed() for work in self._works):
            return False
        if self._waiter is None:
            self._waiter = Thread(target=self._wait_aside, daemon=True)
            self._waiter.start()
        return not self._waiter.is_alive()

    def _wait_aside(self) -> None:
        try:
            self._wait_each()
        except BaseException as error:
            self._error = error

    def _wait_each(self, only: int | None = None) -> None:
        """Wait for each of the works, or for those of one member."""
        _waiting[get_ident()] = self
        try:
            for at, work in enumerate(self._works):
                self._at = at
                if only is None or self._members[at] == only:
                    work.wait()
        except BaseException as error:
            torn(error)
            raise
        finally:
            del _waiting[get_ident()]

    def and_then(self, more: Callable[[], None]) -> Handle:
        """This handle, which also calls `more` at the end of `wait`."""
        before = self._then

        def both() -> None:
            if before is not None:
                before()
            more()

        self._then = both
        return self

    def wait_for(self, member: int) -> None:
        """Wait only for what is sent to and received from one member."""
        self._wait_each(only=member)

    def wait(self) -> None:
        """Wait until everything is sent and received."""
        if self._waiter is not None:
            self._waiter.join()
            if self._error is not None:
                raise self._error
        else:
            self._wait_each()
        self._works.clear()
        if self._then is not None:
            self._then()
        self._then = None
        self._keep.clear()


def torn(error: BaseException) -> None:
    """This rank did something with others when an exception came. One from outside, such as Ctrl-C or that of a
    signal's handler, leaves messages behind that a later receive would take for its own: the connections are closed,
    which tells the others, and the next collective of this rank is refused. Errors of the transport and of isograd
    leave none."""
    if not isinstance(error, (RuntimeError, IsogradError)):
        from isograd.comm import raw

        raw.leave(f"{type(error).__name__} came while it did something together with other ranks")


@contextmanager
def undivided() -> Iterator[None]:
    """Around what this rank does together with others."""
    try:
        yield
    except BaseException as error:
        torn(error)
        raise


_waiting: dict[int, Handle] = {}  # thread: the handle that it waits for


def awaited() -> list[int]:
    """The global ranks from which, or to which, messages are under way that threads of this process wait for."""
    at = [(handle._group, handle._members, handle._at) for handle in list(_waiting.values())]
    return sorted({group.ranks[members[i]] for group, members, i in at if group is not None and i < len(members)})
