"""What a rank sends and receives, in the order in which its program asks for it.

    with recording() as record:
        engine.train_step(batch)
    for entry in record.entries: ...

raw.py notes every message here, in a running world and in a fake one (fake.py) in the same way: the record of
an imagined rank equals that of a running one, message for message. Outside of `recording` nothing is noted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from isograd.comm.group import Group
from isograd.comm.transport import Tensors

_PACKAGE = str(Path(__file__).parents[1])
_COMM = str(Path(__file__).parent)
_ONCE = str(Path(__file__).with_name("first_order.py"))  # stands around backwards
_RAW, _OPS = (str(Path(__file__).with_name(f"{name}.py")) for name in ("raw", "ops"))


HELPERS = {"exchange", "all_gather_start", "scatter_start", "reduce_scatter_start"}  # of other collectives
T = TypeVar("T")


class Message(NamedTuple):
    """One tensor on its way between two ranks."""

    numel: int
    dtype: torch.dtype
    content: Any = None  # what the `look` of `recording` says about the tensor

    @property
    def bytes(self) -> int:
        """The bytes on the wire."""
        return self.numel * self.dtype.itemsize


Messages = tuple[Message, ...]
Look = Callable[[torch.Tensor], Any]
Follow = Callable[[Any, Any], None]


class Entry(NamedTuple):
    """One call that starts messages."""

    operation: str  # the functions of raw.py, outermost first: "all_reduce/reduce_scatter"
    site: str  # who called, outside of comm: "engine/step_status.py:gather"
    phase: str  # "backward" inside autograd, else the phase of the record
    control: bool  # what ranks exchange to decide something, rather than data
    axes: str
    purpose: str  # of the group: connections of its own
    ranks: tuple[int, ...]  # the group's members
    place: int  # of this rank among them
    tag: int
    sent: tuple[Messages, ...]  # to each member
    received: tuple[Messages, ...]  # from each member

    @property
    def rank(self) -> int:
        """The global rank that this record is of."""
        return self.ranks[self.place]

    @property
    def bytes(self) -> int:
        """The bytes that leave this rank."""
        return sum(message.bytes for messages in self.sent for message in messages)

    def __str__(self) -> str:
        return f"{self.operation} over {self.axes!r} in {self.site}"


class Record:
    """The entries of one rank, and the order in which it starts them and waits for them."""

    def __init__(self, look: Look | None = None, follow: Follow | None = None) -> None:
        self.entries: list[Entry] = []
        self.events: list[tuple[str, int]] = []  # ("starts" or "waits", place in entries)
        self.phase = ""  # set by whoever runs the program
        self._look, self.follow = look, follow
        self._same = dict[Any, Any]()  # equal tuples are kept once

    def note(self, group: Group, out: Tensors, into: Tensors, tag: int, control: bool) -> Callable[[], None]:
        """Add an entry. Returns what is to be called when the rank has waited for its messages."""
        operation, site = _caller()
        phase = "backward" if torch._C._current_graph_task_id() != -1 else self.phase
        known: dict[int, Messages] = {}  # the same list may go to every member
        sent, received = (
            tuple(
                () if i == group.index or not pieces else self._messages(pieces, known) for i, pieces in enumerate(side)
            )
            for side in (out, into)
        )
        place = len(self.entries)
        self.entries.append(
            Entry(
                *(operation, site, phase, control, group.axes, group.purpose),
                *(group.ranks, group.index, tag, self._interned(sent), self._interned(received)),
            )
        )
        self.events.append(("starts", place))
        return lambda: self.events.append(("waits", place))

    def _messages(self, pieces: Sequence[torch.Tensor], known: dict[int, Messages]) -> Messages:
        found = known.get(id(pieces))
        if found is None:
            look = self._look
            found = known[id(pieces)] = self._interned(
                tuple(Message(t.numel(), t.dtype, None if look is None else look(t)) for t in pieces if t.numel())
            )
        return found

    def _interned(self, value: T) -> T:
        same: T = self._same.setdefault(value, value)
        return same


running: Record | None = None  # what messages are noted in


def summed(part: T, total: T) -> T:
    """A sum that came back from other ranks in pieces holds, added up, what this rank's part held."""
    if running is not None and running.follow is not None:
        running.follow(part, total)
    return total


@contextmanager
def recording(look: Look | None = None, follow: Follow | None = None) -> Iterator[Record]:
    """Note every message that this process starts in here. `look`: what to note about each tensor beside its size.
    `follow`: is told of a tensor and of the sum that was made of it."""
    with noting_in(record := Record(look, follow)):
        yield record


@contextmanager
def noting_in(own: Record | None) -> Iterator[None]:
    """Note the messages that this process starts in here in this record, or nowhere."""
    global running  # noqa: PLW0603  (as a profiler: switched on for a while by whoever looks at a program)
    before, running = running, own
    try:
        yield
    finally:
        running = before


def noted(group: Group, out: Tensors, into: Tensors, tag: int, control: bool) -> Callable[[], None]:
    """When somebody records or checks messages, they are noted. Returns what is to be called when they have been waited
    for."""
    note = _nothing if running is None else running.note(group, out, into, tag, control)
    if control or not group.context.checks:
        return note
    arrived = [check.note(group, out, into, tag) for check in group.context.checks]
    return lambda: (note(), [each() for each in arrived])[0]


def noted_to(
    group: Group, peers: Sequence[int], tensors: Sequence[torch.Tensor], sends: bool, tag: int, control: bool
) -> Callable[[], None]:
    """The same of messages to some members, or from them."""
    if running is None and not group.context.checks:
        return _nothing
    messages, none = [tensors if i in peers else [] for i in range(group.size)], [list[torch.Tensor]()] * group.size
    return noted(group, messages if sends else none, none if sends else messages, tag, control)


def _nothing() -> None:
    pass


def _caller() -> tuple[str, str]:
    """(operation, site) of the message that is being noted: the frames of raw.py, and the first one outside of comm."""
    frame, steps, pair = sys._getframe(1), list[str](), ""
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file == _RAW:
            steps.append(code.co_name)
        elif file == _OPS:
            name = code.co_qualname.partition(".")[0]  # of a lambda in `all_gather`: all_gather
            pair = pair if name.startswith("_") else name
        elif file.startswith(_PACKAGE) and not file.startswith(_COMM) and file != _ONCE:
            place = f"{file[len(_PACKAGE) + 1 :].replace(chr(92), '/')}:{code.co_name}"
            return _operation(steps), place + (f" ({pair})" if pair else "")
        frame = frame.f_back  # type: ignore[assignment]
    return _operation(steps), pair


def _operation(steps: list[str]) -> str:
    """Outermost first, without the helpers of raw.py."""
    named = [step for step in reversed(steps) if not step.startswith("_")]
    return "/".join([step for step in named if step not in HELPERS] or named[:1])
