"""A world without processes: one rank's program runs, and the other ranks are imagined.

Messages go nowhere. What this rank would receive is answered here:

    data      zeros. Only their shapes matter to a program that does not decide by them.
    control   (raw.py marks it: notes, counts, fingerprints, totals) what this rank says to the sender, as in a world in
              which all ranks agree. Of a sender of another pipeline stage: what it says, if it runs here, too;
              else what another rank of its stage has said; else what this rank says.

Ranks of a pipeline say different things (how many parameters they hold, what they pass on). `World.run` therefore runs
a rank of each stage together, one at a time: a rank that needs another's word lets the others run until it is said.

raw.py treats a `Line` as it treats a process group of torch. Nothing outside of comm and mesh.py knows of it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

import torch

from isograd.comm import record
from isograd.errors import CommError

T = TypeVar("T")
# The sender (a rank, or ~ a stage), the receiver's stage, axes, purpose, tag, how many words went this way before.
Key = tuple[int, int, str, str, int, int]


class World:
    """What imagined ranks of one layout have said, and the ranks that run now."""

    def __init__(self) -> None:
        self.said: dict[Key, torch.Tensor] = {}
        self.speakers: set[int] = set()  # ranks that have said something
        self._turns: dict[int, _Turn] = {}  # of the ranks that run

    def say(self, key: Key, words: torch.Tensor) -> None:
        """Remember words, in place of those of another rank of the same stage."""
        self.said[key] = words
        if key[0] >= 0:
            self.speakers.add(key[0])

    def run(self, programs: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Run the programs of several ranks, and return what each returns.

        One at a time: a rank that waits for the word of another one lets the others run until it is said, or until none
        of them can continue without such a word. The first error of any rank is raised when all have ended.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def program(rank: int) -> None:
            try:
                results[rank] = programs[rank]()
            except BaseException as error:
                errors.append(error)

        self._turns = {rank: _Turn(program, rank) for rank in programs}
        while self._turns:
            able = [turn for turn in self._turns.values() if turn.awaited is None or turn.awaited in self.said]
            for turn in able or list(self._turns.values()):  # all wait: each is answered as if that rank did not run
                turn.take()
            self._turns = {rank: turn for rank, turn in self._turns.items() if turn.is_alive()}
        if errors:
            raise errors[0]
        return results

    def await_words(self, me: int, keys: Iterable[Key]) -> None:
        """Let the ranks run that have yet to say these words."""
        for key in keys if me in self._turns else ():
            if key not in self.said and key[0] in self._turns:
                self._turns[me].give_back(key)


class _Turn(threading.Thread):
    """The program of one rank, which runs only inside `take`."""

    def __init__(self, program: Callable[[int], None], rank: int) -> None:
        super().__init__(name=f"imagined rank {rank}", daemon=True)
        self.awaited: Key | None = None  # the word without which the program does not continue
        self._ended = False
        self._program, self._rank, self._record = program, rank, record.running
        self._taken, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    def run(self) -> None:
        """What the thread does."""
        self._taken.acquire()
        self._program(self._rank)
        self._ended = True
        self._back.release()

    def take(self) -> None:
        """Let the program run until it waits for a word, or ends. It has a record of its own."""
        record.running, before = self._record, record.running
        self._taken.release()
        self._back.acquire()
        record.running, self._record = before, record.running
        if self._ended:
            self.join()

    def give_back(self, awaited: Key) -> None:
        """In the program: wait for a word."""
        self.awaited = awaited
        self._back.release()
        self._taken.acquire()
        self.awaited = None


class Member:
    """One imagined rank."""

    def __init__(self, world: World, rank: int, ranks_of_stage: int) -> None:
        self.world, self.rank, self._of_stage = world, rank, ranks_of_stage
        self.tags: Counter[tuple[int, ...]] = Counter()  # how many ranges of tags each group has given away
        self._counts: Counter[tuple[str, int, str, str, int]] = Counter()
        self._gathers: Counter[tuple[str, str, int]] = Counter()

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self._of_stage

    def number(self, way: str, peer: int, axes: str, purpose: str, tag: int) -> int:
        """How many control messages went this way between this rank and a peer before."""
        key = way, peer, axes, purpose, tag
        self._counts[key] += 1
        return self._counts[key] - 1 + self._gathers[axes, purpose, tag]

    def gathers(self, way: str, peer: int, axes: str, purpose: str) -> int:
        """The same of a message that every member of a group sends to every other; `gathered` counts it."""
        return self._counts[way, peer, axes, purpose, 0] + self._gathers[axes, purpose, 0]

    def gathered(self, axes: str, purpose: str) -> None:
        """Every member of a group has sent one control message to every other."""
        self._gathers[axes, purpose, 0] += 1


class Line:
    """What raw.py uses in place of a process group: `send` and `recv` return at once."""

    def __init__(self, member: Member, axes: str, ranks: tuple[int, ...], purpose: str) -> None:
        self.member, self.axes, self.ranks, self.purpose = member, axes, ranks, purpose
        self.control = False  # of the messages that are being started
        self._stages: dict[int, list[int]] | None = None  # the members of each stage

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Arrived:
        """Keep what this rank says; forget data."""
        if self.control:
            me, rank = self.member, self.ranks[peer]
            (tensor,) = tensors
            count = me.number("to", rank, self.axes, self.purpose, tag)
            for speaker in (me.rank, ~me.stage(me.rank)):
                me.world.say((speaker, me.stage(rank), self.axes, self.purpose, tag, count), tensor.detach())
        return ARRIVED

    def fill(self, into: Sequence[Sequence[torch.Tensor]]) -> None:
        """Data of every other member, by one call however many there are."""
        mine = self.ranks.index(self.member.rank)
        targets = [tensor for place, pieces in enumerate(into) if place != mine for tensor in pieces]
        if targets:
            torch._foreach_zero_(targets)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Arrived:
        """Zeros for data; for control a promise, because this rank may still have to say what is mirrored."""
        if not self.control:
            for tensor in tensors:
                tensor.zero_()
            return ARRIVED
        me, rank = self.member, self.ranks[peer]
        here, there = me.stage(me.rank), me.stage(rank)
        count = me.number("from", rank, self.axes, self.purpose, tag)
        (tensor,) = tensors
        names = self.axes, self.purpose, tag, count
        mine = (me.rank, there, *names)
        keys = (mine,) if here == there else ((rank, here, *names), (~there, here, *names), mine)
        return _Promised(tensor, keys, self, rank)

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """A control value of every member; `mine` for each of this stage."""
        me, said, found = self.member, self.member.world.said, list[torch.Tensor]()
        here = me.stage(me.rank)
        if self._stages is None:  # in the order of ranks, in which pp is outermost
            self._stages = {stage: list(of_it) for stage, of_it in groupby(self.ranks, me.stage)}
        names: dict[str, dict[int, tuple[str, str, int, int]]] = {
            way: {
                stage: (self.axes, self.purpose, 0, me.gathers(way, ranks[0], self.axes, self.purpose))
                for stage, ranks in self._stages.items()
            }
            for way in ("to", "from")
        }
        for stage in self._stages:
            for speaker in (me.rank, ~here):
                me.world.say((speaker, stage, *names["to"][stage]), mine.detach())
        for stage, ranks in self._stages.items():
            if stage == here:
                found += [mine] * len(ranks)
                continue
            me.world.await_words(me.rank, ((rank, here, *names["from"][stage]) for rank in ranks))
            words = said.get((~stage, here, *names["from"][stage]))
            words = mine if words is None or words.numel() != mine.numel() else words
            found += [words.view(mine.shape)] * len(ranks)
            for rank in me.world.speakers.intersection(ranks):
                words = said.get((rank, here, *names["from"][stage]))
                if words is not None and words.numel() == mine.numel():
                    found[len(found) - len(ranks) + bisect_left(ranks, rank)] = words.view(mine.shape)
        me.gathered(self.axes, self.purpose)
        return found


class Arrived:
    """A message that needs no waiting."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return True

    def wait(self) -> None:
        """Return when the message is there."""


ARRIVED = Arrived()


class _Promised(Arrived):
    """A control message, which arrives when it is waited for. `keys`: whose words, the best first."""

    def __init__(self, into: torch.Tensor, keys: tuple[Key, ...], line: Line, sender: int) -> None:
        self._into, self._keys, self._line, self._sender = into, keys, line, sender

    def wait(self) -> None:
        """Fill the memory with what the sender, its stage or else this rank has said."""
        me = self._line.member
        me.world.await_words(me.rank, self._keys[:1])
        for key in self._keys:
            words = me.world.said.get(key)
            if words is not None and words.numel() == self._into.numel():
                self._into.copy_(words.view(self._into.shape))
                return
        raise CommError(
            "IG206",
            f"imagined rank {me.rank} waits for a word of rank {self._sender} that nobody has said",
            seen=f"a control message over {self._line.axes!r}, and no rank of that pipeline stage was imagined before",
            expected="a rank of each pipeline stage, imagined in one world",
            fix="imagined.World().run with the program of a rank of each stage, or 'isograd rehearse', which does that",
        )
