"""Data ranks announce which block they gather, so that rows of different blocks never meet.

At ZeRO 3 every call of a block is a collective. Ranks that call different blocks (LayerDrop with a different coin on
each rank), different numbers of forwards, or a rank whose forward raised, would add up or wait for unlike rows. So
each gather has a note of 128 bytes: the epoch, the number of the group, and the sentence that an error shows.

1. `announce` sends my note to every member. The rows travel at the same time, with a tag made of the note.
2. `confirm`, before the rows are used, reads one note of each member. When one is unlike mine, every member sees it at
   the same note, and all raise the same error, with what each of them said.
3. `abort` says that an exception ended what this rank was doing. The others read it instead of the note that they wait
   for, and raise an error that names this rank.

After 2 or 3 a new epoch begins on every rank. Notes of an earlier epoch that arrive late are skipped. Rows of it arrive
if the other member had sent the same note; otherwise they never will.

On NCCL there are no tags, and reading a note would make the host wait for the GPU: nothing is checked there.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.group import Group
from isograd.comm.handle import Handle
from isograd.comm.world import TAGS, abort_group_on_interrupt, reserve_tags
from isograd.errors import CommError, EngineError

NOTE = 128  # bytes
HEAD = struct.Struct("<qq")  # epoch, number
MEETING, FAILED, GIVES_UP = -1, -2, -3  # numbers of notes that announce no gather; the last meets, to drop a step


class Note(NamedTuple):
    """What a rank does next."""

    epoch: int
    number: int  # of what is gathered
    said: str  # a sentence without its subject

    def encode(self) -> bytes:
        """NOTE bytes."""
        return (HEAD.pack(*self[:2]) + self.said.encode()).ljust(NOTE, b"\0")[:NOTE]

    def agrees(self, other: Note) -> bool:
        """Whether the ranks that say this do the same next; one may step where the other drops the step."""
        numbers = {self.number, other.number}
        return (len(numbers) == 1 or numbers == {MEETING, GIVES_UP}) and self[::2] == other[::2]

    @staticmethod
    def decode(data: bytes) -> Note:
        """The reverse; a long sentence has lost its end."""
        epoch, number = HEAD.unpack_from(data)
        return Note(epoch, number, data[HEAD.size :].rstrip(b"\0").decode(errors="ignore"))


@dataclass(eq=False)
class Announcement:
    """A note that this rank has sent, and the rows that travel with it."""

    note: Note
    unread: set[int]  # members whose note of the same place has not been read, where its epoch is over
    rows: list[tuple[Group, Handle]] = field(default_factory=list)

    def wait_for(self, rank: int) -> None:
        """Until the rows of one rank are here."""
        for group, handle in self.rows:
            if rank in group.ranks:
                handle.wait_for(group.ranks.index(rank))


class GatherOrderCheck:
    """The notes that ranks send each other with each ZeRO 3 gather."""

    def __init__(self, group: Group, rows: Sequence[Group], where: str) -> None:
        """`rows`: the groups over which rows are gathered, all within `group`."""
        self.group, self.where, self.epoch = group, where, 0
        self.is_active = group.size > 1 and not group.is_nccl
        self._tag = reserve_tags(group) if self.is_active else 0
        self._rows_tags = {of.ranks: reserve_tags(of) for of in rows} if self.is_active else {}
        self._others = [member for member in range(group.size) if member != group.index]
        # Of this epoch, not confirmed yet; of earlier ones, whose rows may still be on their way.
        self._announced: list[Announcement] = []
        self._inbox: dict[int, deque[tuple[Tensor, Handle]]] = {member: deque() for member in self._others}
        self._sent: deque[Handle] = deque()  # may not have arrived yet

    @abort_group_on_interrupt()
    def announce(self, number: int, said: str) -> Announcement:
        """Tell the others what I do next."""
        note = Note.decode(Note(self.epoch, number, said).encode())
        announcement = Announcement(note, set(self._others))
        if self.is_active:
            for member in self._others:
                self._expect(member)
            self._send(note)
            self._announced.append(announcement)
        return announcement

    def tag(self, announcement: Announcement, rows: Group) -> int:
        """For the rows of this group: another note has another tag."""
        return self._rows_tags[rows.ranks] + zlib.crc32(announcement.note.encode()) % TAGS if self.is_active else 0

    def abort(self, said: str) -> None:
        """An exception has ended what I was doing in this epoch. Waits for nobody."""
        if self.is_active:
            with suppress(RuntimeError, CommError):  # the connection to one of them may be lost, or mine are closed
                self._send(Note(self.epoch, FAILED, said))
            self.epoch += 1

    def confirm(self, announcement: Announcement) -> None:
        """Wait for the notes of the others, in the order of mine; raise when one of them is unlike mine."""
        while announcement in (ours := [each for each in self._announced if each.note.epoch == self.epoch]):
            mine = ours[0]
            notes = {member: self._read(member) for member in self._others}  # an exception may come between two
            for member, note in notes.items():
                if note.epoch == self.epoch:
                    self._inbox[member].popleft()
            self._announced.remove(mine)
            unlike = [note for note in notes.values() if not note.agrees(mine.note)]
            if not unlike:
                # A member that sent this note has asked for all of mine before it.
                while len(self._sent) > len(self._others) * len(ours):
                    self._sent.popleft().wait()
                continue
            for member, note in notes.items():
                if note.agrees(mine.note):  # its rows are on their way into memory that will be freed
                    mine.wait_for(self.group.ranks[member])
            self.epoch = max(self.epoch + 1, *(note.epoch for note in unlike))
            raise self._error({**notes, self.group.index: mine.note})

    def _read(self, member: int) -> Note:
        """The next note of a member, of this epoch or of a later one. It stays in the inbox."""
        inbox = self._inbox[member]
        while True:
            if not inbox:
                self._expect(member)
            message, handle = inbox[0]
            handle.wait()
            note = Note.decode(bytes(message.numpy()))
            last = min(note.epoch, self.epoch - 1)
            for old in [each for each in self._announced if member in each.unread and each.note.epoch <= last]:
                old.unread.discard(member)
                if old.note == note:  # its rows still arrive
                    old.wait_for(self.group.ranks[member])
                if not old.unread:
                    self._announced.remove(old)
                if old.note.epoch == note.epoch:
                    break
            if note.epoch >= self.epoch:
                return note
            inbox.popleft()

    def _expect(self, member: int) -> None:
        memory = torch.empty(NOTE, dtype=torch.uint8)
        handle = raw.receive_start([memory], self.group, member, self._tag, control=True)
        self._inbox[member].append((memory, handle))

    def _send(self, note: Note) -> None:
        message = torch.frombuffer(bytearray(note.encode()), dtype=torch.uint8)
        for member in self._others:
            self._sent.append(raw.send_start([message], self.group, member, self._tag, control=True))

    def _error(self, notes: dict[int, Note]) -> EngineError:
        ranks = self.group.ranks
        failed = [ranks[member] for member, note in sorted(notes.items()) if note.number in (FAILED, GIVES_UP)]
        words = {member: "gave up its step" if note.number == GIVES_UP else note.said for member, note in notes.items()}
        seen = "; ".join(f"rank {ranks[member]} {said}" for member, said in sorted(words.items()))
        if failed:
            return EngineError("IG571", seen=seen, where=self.where, ranks=", ".join(map(str, failed)))
        return EngineError("IG572", seen=seen, where=self.where)
