"""What a rank sends and receives, in the order in which its program asks for it.

    with raw.recording() as record:
        engine.train_step(batch)
    for entry in record.entries: ...

raw.py notes every message here, in a running world and in an imagined one (imagined.py) in the same way: the record of
an imagined rank equals that of a running one, message for message; only where gloo lets half-precision gradients leave
as they are (halves.py), imagined ranks send fp32, as on NCCL. Outside of `recording` nothing is noted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from isograd.comm import halves
from isograd.comm.handle import Handle

if TYPE_CHECKING:
    from isograd.comm.raw import Group

_PACKAGE = str(Path(__file__).parents[1])
_COMM = str(Path(__file__).parent)
_ONCE = str(Path(__file__).parents[1] / "once.py")  # stands around backwards
_RAW, _OPS, _HERE = (str(Path(__file__).with_name(f"{name}.py")) for name in ("raw", "ops", "record"))


T = TypeVar("T")
Tensors = Sequence[Sequence[torch.Tensor]]  # for each member of a group


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
    site: str  # who called, outside of comm: "engine/totals.py:gather"
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

    def note(
        self,
        group: Group,
        out: Sequence[Sequence[torch.Tensor]],
        into: Sequence[Sequence[torch.Tensor]],
        tag: int,
        control: bool,
    ) -> Callable[[], None]:
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
                *(group.ranks, group.index, tag, self._once(sent), self._once(received)),
            )
        )
        self.events.append(("starts", place))
        return lambda: self._waited(group, into, place)

    def _waited(self, group: Group, into: Sequence[Sequence[torch.Tensor]], place: int) -> None:
        """The messages have arrived, some of them perhaps in half precision."""
        self.events.append(("waits", place))
        came = [[halves.arrived(t) for t in p] if i != group.index else [] for i, p in enumerate(into)]
        if any(t.dtype in halves.HALVES for pieces in came for t in pieces):
            seen = self._once(tuple(self._messages(pieces, {}) for pieces in came))
            self.entries[place] = self.entries[place]._replace(received=seen)

    def _messages(self, pieces: Sequence[torch.Tensor], known: dict[int, Messages]) -> Messages:
        found = known.get(id(pieces))
        if found is None:
            look = self._look
            found = known[id(pieces)] = self._once(
                tuple(Message(t.numel(), t.dtype, None if look is None else look(t)) for t in pieces if t.numel())
            )
        return found

    def _once(self, value: T) -> T:
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
    global running  # noqa: PLW0603  (as a profiler: switched on for a while by whoever looks at a program)
    before, running = running, Record(look, follow)
    try:
        yield running
    finally:
        running = before


def noted(
    handle: Handle,
    group: Group,
    out: Tensors,
    into: Tensors,
    tag: int = 0,
    control: bool = False,
    beside: tuple[Tensors, Tensors] | None = None,
) -> Handle:
    """The handle; when somebody records, its messages are noted, and when it is waited for. `beside`: pieces that
    travel at the same time in messages that others send, as one message more."""
    if running is None:
        return handle
    for_each, from_each = beside or (((),) * group.size, ((),) * group.size)
    return handle.and_then(running.note(group, _joined(out, for_each), _joined(into, from_each), tag, control))


def _joined(messages: Tensors, pieces: Tensors) -> Tensors:
    return [
        [*several, torch.cat([piece.reshape(-1) for piece in more])] if more else several
        for several, more in zip(messages, pieces, strict=True)
    ]


def noted_to_one(
    handle: Handle, group: Group, tensors: Sequence[torch.Tensor], peer: int, tag: int, control: bool, sending: bool
) -> Handle:
    """The same of messages between two members."""
    if running is None:
        return handle
    messages = [tensors if i == peer else [] for i in range(group.size)]
    none: Tensors = [[]] * group.size
    out, into = (messages, none) if sending else (none, messages)
    return noted(handle, group, out, into, tag, control)


def noted_broadcast(x: torch.Tensor, group: Group, source: int) -> None:
    """Note what the source of a broadcast sends to each, and what the others receive."""
    if running is not None:
        sends, nobody = group.index == source, [list[torch.Tensor]()] * group.size
        messages = [[x] if (i != source) == sends else [] for i in range(group.size)]
        noted(Handle(), group, *((messages, nobody) if sends else (nobody, messages))).wait()


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
    return "/".join([step for step in named if step != "exchange"] or named[:1])
