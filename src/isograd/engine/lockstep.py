"""Data ranks tell each other which block they gather next, before rows of different blocks can meet.

At ZeRO 3 every call of a block is a collective. Ranks that call different blocks (LayerDrop with a different coin on
each rank), different numbers of forwards, or a rank whose forward raised, would add up or wait for unlike rows. So
each gather goes with a **note** of 128 bytes: the round, the number of the block, and the sentence that an error shows.

1. `post` sends my note to every member. Small rows travel behind it, in the same message; the others at the same time,
   with a tag made of the note: rows that go with unlike notes never meet.
2. `confirm`, before the rows are used, reads one note of each member. When one is unlike mine, every member sees it at
   the same note, and all of them raise the same error, with what each of them said. `unload` then puts the small rows
   in their places.
3. `leave` tells the others that an exception ended what this rank was doing. They read it instead of the note they wait
   for, and raise an error that names this rank.

After 2 or 3 a new **round** begins on every rank: notes of an earlier round that arrive late are skipped, so training
can continue with the next forward. Rows that were in flight in the old round arrive if the other member had posted the
same note; otherwise they never will, and are forgotten.

On NCCL there are no tags, and reading a note would make the host wait for the GPU: nothing is checked there.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.raw import Group, Handle
from isograd.engine.kept import Kept, alike
from isograd.engine.transport import most_small
from isograd.errors import EngineError

NOTE = 128  # bytes
HEAD = struct.Struct("<qqq")  # round, number, which parts
Pieces = Sequence[Tensor]
MEETING, FAILED = -1, -2  # numbers of notes that go with no rows


@dataclass(eq=False)
class Posted:
    """A note that this rank has sent, and the rows that travel with it."""

    note: bytes
    unread: set[int]  # members whose note of the same place has not been read
    rows: list[tuple[Group, Handle]] = field(default_factory=list)
    sent: bool = False
    places: Sequence[Pieces] = ()  # where the small rows of each member belong
    arrived: dict[int, Tensor] = field(default_factory=dict)  # the messages that have them, of each other member

    @property
    def tag(self) -> int:
        """Within a range of tags: another note has another one."""
        return zlib.crc32(self.note) % raw.TAGS


class Lockstep:
    """The notes that ranks send each other before each ZeRO 3 gather, and the rows that follow them."""

    def __init__(self, group: Group, rows: Sequence[Group], where: str) -> None:
        """`rows`: the groups over which rows are gathered, all within `group`."""
        self.group, self.where = group, where
        self.checked = group.size > 1 and not raw.native(group)
        self.carries = self.checked and raw.in_host_memory(group)  # small rows may travel behind notes
        self._room = 0  # bytes behind a note: no rank sends more
        self.round = 0
        self._notes_tag = raw.reserve_tags(group) if self.checked else 0  # of notes; rows have a range of their own
        self._rows_tags = {of.ranks: raw.reserve_tags(of) for of in rows} if self.checked else {}
        self._others = [member for member in range(group.size) if member != group.index]
        self._posted: deque[Posted] = deque()  # of this round, not confirmed yet
        self._old: list[Posted] = []  # of earlier rounds, whose rows may still be on their way
        self._inbox: dict[int, deque[tuple[Tensor, Handle]]] = {member: deque() for member in self._others}
        self._ahead: dict[int, Tensor] = {}  # messages of a later round, read already
        self._spare: list[Tensor] = []  # memory for messages
        self._sent: deque[tuple[Handle, Tensor | None]] = deque()  # that may not have arrived yet, with their memory

    def make_room(self, units: Sequence[Sequence[Kept]]) -> None:
        """For the small rows of what is gathered together, or of a part of that."""
        for kind in [kind for unit in units for kind in alike(unit)] if self.carries else ():
            if kind[0].slot.owners.ranks == self.group.ranks:
                shapes = [torch.empty_like(kept.whole, device="meta") for kept in kind]
                self._room = max(self._room, most_small([kept.slot for kept in kind], shapes, self.group.size))

    # -- saying

    def post(self, number: int, said: str) -> Posted:
        """Tell the others what I do next. `said`: a sentence without its subject."""
        posted = self.write(number, said)
        self.send(posted)
        return posted

    def write(self, number: int, said: str, parts: int = 0) -> Posted:
        """A note, to be sent. `parts`: anything else to compare."""
        return Posted(_note(self.round, number, parts, said), set(self._others))

    def send(self, posted: Posted, small: Pieces = (), places: Sequence[Pieces] = ()) -> None:
        """Send a note with my small rows, all of one dtype, behind it. `places`: where those of each member belong."""
        posted.sent, posted.places = True, places
        if self.checked:
            for member in self._others:
                self._expect(member)
            self._send(posted.note, small)
            self._posted.append(posted)

    def tag(self, posted: Posted, rows: Group) -> int:
        """For the rows of this group that travel with a note."""
        return self._rows_tags[rows.ranks] + posted.tag if self.checked else 0

    def leave(self, said: str) -> None:
        """An exception has ended what I was doing in this round. Waits for nobody."""
        if self.checked:
            with suppress(RuntimeError):  # the exception may be that the connection to one of them is lost
                self._send(_note(self.round, FAILED, 0, said))
            self._next_round(self.round + 1)

    # -- reading

    def confirm(self, posted: Posted) -> None:
        """Wait for the notes of the others, in the order of mine; raise when one of them is unlike mine."""
        while posted in self._posted:
            first = self._posted.popleft()
            first.arrived = {member: self._read(member) for member in self._others}
            notes = {member: _note_of(message) for member, message in first.arrived.items()}
            equal = [member for member in self._others if notes[member] == first.note]
            if len(equal) == len(self._others):
                self._tidy()
                if not first.places:
                    self.unload(first)
                continue
            for member in equal:  # their rows are on their way into memory that will be freed
                self._wait_for(first, member)
            self._next_round(max([self.round + 1, *(_round(note) for note in notes.values())]))
            raise self._unlike({**notes, self.group.index: first.note})

    def unload(self, posted: Posted) -> None:
        """Put the small rows that came behind the notes of the others in their places."""
        for member, message in posted.arrived.items():
            if places := posted.places[member] if posted.places else ():
                torch._foreach_copy_(list(places), behind(message, places))
            self._keep(message)
        posted.arrived, posted.places = {}, ()

    def _read(self, member: int) -> Tensor:
        """The message with the next note of a member, of this round or of a later one."""
        while True:
            if member in self._ahead:
                message = self._ahead[member]
            else:
                if not self._inbox[member]:
                    self._expect(member)
                message, handle = self._inbox[member].popleft()
                handle.wait()
            note = _note_of(message)
            if _round(note) >= self.round:
                for old in self._old:  # the member has left their rounds
                    old.unread.discard(member)
                self._old = [old for old in self._old if old.unread]
            if _round(note) > self.round:
                self._ahead[member] = message
                return message
            self._ahead.pop(member, None)
            if _round(note) == self.round:
                return message
            self._settle(member, note)
            self._keep(message)

    def _settle(self, member: int, note: bytes) -> None:
        """A late note of an earlier round: whether rows that I exchanged with this member in that round arrive."""
        old = next((old for old in self._old if member in old.unread and _round(old.note) == _round(note)), None)
        if old is not None:
            old.unread.discard(member)
            if old.note == note:
                self._wait_for(old, member)

    def _wait_for(self, posted: Posted, member: int) -> None:
        """Until the rows that went with my note and this member's are here."""
        rank = self.group.ranks[member]
        for group, handle in posted.rows:
            if rank in group.ranks:
                handle.wait_for(group.ranks.index(rank))

    def _next_round(self, number: int) -> None:
        self._old += self._posted
        self._posted.clear()
        self.round = number

    # -- messages

    def _expect(self, member: int) -> None:
        memory = self._memory()
        handle = raw.receive_start([memory], self.group, member, self._notes_tag, control=True, head=NOTE)
        self._inbox[member].append((memory, handle))

    def _send(self, note: bytes, small: Pieces = ()) -> None:
        memory = self._memory()
        message = memory[: NOTE + sum(piece.numel() * piece.itemsize for piece in small)]
        message[:NOTE] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
        if small:
            torch._foreach_copy_(behind(message, small), list(small))
        for member in self._others:
            sent = raw.send_start([message], self.group, member, self._notes_tag, control=True, head=NOTE)
            self._sent.append((sent, memory if member == self._others[-1] else None))

    def _memory(self) -> Tensor:
        return self._spare.pop() if self._spare else torch.empty(NOTE + self._room, dtype=torch.uint8)

    def _keep(self, memory: Tensor | None) -> None:
        """For messages to come: what four notes take, however many were under way."""
        if memory is not None and len(self._spare) < 4 * len(self._others):
            self._spare.append(memory)

    def _tidy(self) -> None:
        """Release notes that have arrived: a member that sent this note has asked for all of mine before it."""
        while len(self._sent) > len(self._others) * (1 + len(self._posted)):
            handle, memory = self._sent.popleft()
            handle.wait()
            self._keep(memory)

    def _unlike(self, notes: dict[int, bytes]) -> EngineError:
        ranks = self.group.ranks
        said = {ranks[member]: _said(note) for member, note in sorted(notes.items())}
        failed = [ranks[member] for member, note in sorted(notes.items()) if _number(note) == FAILED]
        seen = "; ".join(f"rank {rank} {words}" for rank, words in said.items())
        if failed:
            return EngineError(
                "IG571",
                f"an exception on rank {', '.join(map(str, failed))} ended what the data ranks were doing together",
                seen=seen,
                expected="every data rank to call the same blocks of the model, at ZeRO 3",
                fix="see the error of that rank; a program that catches it should catch this error, too, and continue "
                "with the next batch on all ranks",
                where=self.where,
            )
        return EngineError(
            "IG572",
            "data ranks use different parts of the model at the same time",
            seen=seen,
            expected="the same blocks in the same order on every data rank, at ZeRO 3: each call gathers parameters",
            fix="choose skipped blocks (LayerDrop) with the same random numbers on all ranks; run as many forwards and "
            "backwards on each, with weight 0 where a rank has no data; or use zero2",
            where=self.where,
        )


def _note(number_of_round: int, number: int, parts: int, said: str) -> bytes:
    return (HEAD.pack(number_of_round, number, parts) + said.encode()).ljust(NOTE, b"\0")[:NOTE]


def _note_of(message: Tensor) -> bytes:
    return bytes(message[:NOTE].numpy())


def behind(message: Tensor, like: Pieces) -> list[Tensor]:
    """Views of what stands behind a note: tensors like these, one after the other."""
    numels = [piece.numel() for piece in like]
    flat = message[NOTE : NOTE + sum(numels) * like[0].itemsize].view(like[0].dtype)
    return [part.view(piece.shape) for part, piece in zip(flat.split(numels), like, strict=True)]


def _round(note: bytes) -> int:
    return int(HEAD.unpack_from(note)[0])


def _number(note: bytes) -> int:
    return int(HEAD.unpack_from(note)[1])


def _said(note: bytes) -> str:
    return note[HEAD.size :].rstrip(b"\0").decode(errors="ignore")
