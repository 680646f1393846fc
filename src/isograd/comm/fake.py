"""A fake world: one rank's program runs, and the other ranks are simulated.

Messages go nowhere. What this rank would receive is answered here:

    data      zeros. Only their shapes matter to a program that does not decide by them.
    control   (raw.py marks it: notes, counts, fingerprints, totals) what this rank says to the sender, as in a world in
              which all ranks agree. Of a sender of another pipeline stage: what it says, if it runs here, too;
              else what another rank of its stage has said; else what this rank says.

Ranks of a pipeline say different things (how many parameters they hold, what they pass on). `FakeWorld.run` therefore
runs a rank of each stage, one at a time: a rank that needs a value of another lets the others run until it is there.

raw.py treats a `FakeTransport` as it treats a process group of torch. Nothing outside of comm and mesh.py knows of it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from isograd.comm import record
from isograd.comm.group import RankContext
from isograd.comm.transport import Tensors, Transport
from isograd.errors import CommError

T = TypeVar("T")
# The sender (a rank, or ~ a stage), the receiver's stage, axes, purpose, tag, how many words went this way before.
Key = tuple[int, int, str, str, int, int]
Pause = tuple[Key | None, record.Record | None]  # of a rank: the word without which it does not continue, its record


class FakeWorld:
    """What simulated ranks of one layout have sent, and the ranks that run now."""

    def __init__(self) -> None:
        self.said: dict[Key, torch.Tensor] = {}
        self.senders: set[int] = set()  # ranks that have said something

    def put(self, rank: int, stage: int, way: tuple[int, str, str, int, int], words: torch.Tensor) -> None:
        """Remember words of a rank, and in place of those of another rank of the same stage."""
        self.said[rank, *way] = self.said[~stage, *way] = words
        self.senders.add(rank)

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

        ranks = set(programs)  # that run
        turns: dict[_Turn, Pause] = {_Turn(program, rank, ranks): (None, record.running) for rank in programs}
        while turns:
            able = [turn for turn, (awaited, _) in turns.items() if awaited is None or awaited in self.said]
            for turn in able or list(turns):  # all wait: each is answered as if that rank did not run
                turns[turn] = turn.take(*turns[turn][1:])
            turns = {turn: pause for turn, pause in turns.items() if turn.is_alive()}
            ranks &= {turn.rank for turn in turns}
        if errors:
            raise errors[0]
        return {rank: results[rank] for rank in programs}

    def wait_for_values(self, keys: Iterable[Key]) -> None:
        """Let the ranks run that have yet to say these words."""
        turn = threading.current_thread()
        for key in keys:
            if isinstance(turn, _Turn) and key not in self.said and key[0] in turn.ranks:
                turn.give_back(key)


class _Turn(threading.Thread):
    """The program of one rank, which runs only inside `take`."""

    def __init__(self, program: Callable[[int], None], rank: int, ranks: set[int]) -> None:
        """ranks: those that run."""
        super().__init__(name=f"simulated rank {rank}", daemon=True)
        self.rank, self.ranks, self._program = rank, ranks, program
        self._taken, self._back = threading.Semaphore(0), SimpleQueue[Pause]()
        self.start()

    def run(self) -> None:
        """What the thread does."""
        self._taken.acquire()
        self._program(self.rank)
        self._back.put((None, record.running))

    def take(self, own: record.Record | None) -> Pause:
        """Let the program run, with a record of its own, until it waits for a word, or ends."""
        with record.noting_in(own):
            self._taken.release()
            awaited, own = self._back.get()
        if awaited is None:  # it has ended
            self.join()
        return awaited, own

    def give_back(self, awaited: Key) -> None:
        """In the program: wait for a word."""
        self._back.put((awaited, record.running))
        self._taken.acquire()


class FakeRank(RankContext):
    """One simulated rank."""

    def __init__(self, world: FakeWorld, rank: int, ranks_of_stage: int) -> None:
        super().__init__()
        self.world, self.rank, self._of_stage = world, rank, ranks_of_stage
        self._counts: Counter[tuple[Any, ...]] = Counter()  # of control messages to or from a peer, and of gathers

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self._of_stage

    def number(self, way: str, peer: int, axes: str, purpose: str, tag: int = 0, more: int = 1) -> int:
        """How many control messages went this way between this rank and a peer before `more`: 0 of a message that every
        member of a group sends to every other, which `gathered` counts."""
        key = way, peer, axes, purpose, tag
        self._counts[key] += more
        return self._counts[key] - more + self._counts[axes, purpose, tag]

    def gathered(self, axes: str, purpose: str) -> None:
        """Every member of a group has sent one control message to every other."""
        self._counts[axes, purpose, 0] += 1


class FakeTransport(Transport):
    """The transport of a simulated rank: nothing is sent, and nothing is waited for."""

    simulated = True

    def __init__(self, member: FakeRank, axes: str, ranks: tuple[int, ...], purpose: str) -> None:
        super().__init__(None, ranks, ranks.index(member.rank))
        self.member, self.axes, self.purpose = member, axes, purpose

    @cached_property
    def _stages(self) -> dict[int, list[int]]:
        """The members of each stage, in the order of ranks, in which pp is outermost."""
        return {stage: list(of_it) for stage, of_it in groupby(self.ranks, self.member.stage)}

    def exchange(self, handle: Any, out: Tensors, into: Tensors, tag: int, control: bool) -> None:
        """Zeros for data, of every other member by one call; for control as `send` and `receive`."""
        if control:
            super().exchange(handle, out, into, tag, control)
        elif targets := [tensor for member, pieces in enumerate(into) if member != self.index for tensor in pieces]:
            torch._foreach_zero_(targets)

    def send(self, handle: Any, tensors: Sequence[torch.Tensor], peer: int, tag: int, control: bool) -> None:
        """Keep what this rank says; forget data."""
        if control and tensors:
            me, rank = self.member, self.ranks[peer]
            (tensor,) = tensors
            count = me.number("to", rank, self.axes, self.purpose, tag)
            way = me.stage(rank), self.axes, self.purpose, tag, count
            me.world.put(me.rank, me.stage(me.rank), way, tensor.detach())

    def receive(self, handle: Any, tensors: Sequence[torch.Tensor], peer: int, tag: int, control: bool) -> None:
        """Zeros for data; for control a promise, because this rank may still have to say what is mirrored."""
        if not control or not tensors:
            for tensor in tensors:
                tensor.zero_()
            return
        me, rank = self.member, self.ranks[peer]
        here, there = me.stage(me.rank), me.stage(rank)
        count = me.number("from", rank, self.axes, self.purpose, tag)
        (tensor,) = tensors
        names = self.axes, self.purpose, tag, count
        mine = (me.rank, there, *names)
        keys = (mine,) if here == there else ((rank, here, *names), (~there, here, *names), mine)
        handle.add(_Promised(tensor, keys, self, rank), peer)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Every rank has what this rank has."""

    def gather_control(self, x: torch.Tensor) -> list[torch.Tensor]:
        """No message for each rank of a large world: mine for each of this stage."""
        mine, me, said, found = x.contiguous(), self.member, self.member.world.said, list[torch.Tensor]()
        here = me.stage(me.rank)
        names: dict[str, dict[int, tuple[str, str, int, int]]] = {
            way: {
                stage: (self.axes, self.purpose, 0, me.number(way, ranks[0], self.axes, self.purpose, more=0))
                for stage, ranks in self._stages.items()
            }
            for way in ("to", "from")
        }
        for stage in self._stages:
            me.world.put(me.rank, here, (stage, *names["to"][stage]), mine.detach())
        for stage, ranks in self._stages.items():
            if stage == here:
                found += [mine] * len(ranks)
                continue
            me.world.wait_for_values((rank, here, *names["from"][stage]) for rank in ranks)
            mate = ranks[self._stages[here].index(me.rank)]  # of my pipeline, which was given the same batch
            sender = mate if mate in me.world.senders else ~stage
            words = said.get((sender, here, *names["from"][stage]))
            words = mine if words is None or words.numel() != mine.numel() else words
            found += [words.view(mine.shape)] * len(ranks)
        me.gathered(self.axes, self.purpose)
        return found


class _Promised:
    """A control message, which arrives when it is waited for. `keys`: whose words, the best first."""

    def __init__(self, into: torch.Tensor, keys: tuple[Key, ...], line: FakeTransport, sender: int) -> None:
        self._into, self._keys, self._line, self._sender = into, keys, line, sender

    def wait(self) -> None:
        """Fill the memory with what the sender, its stage or else this rank has sent."""
        me = self._line.member
        me.world.wait_for_values(self._keys[:1])
        for key in self._keys:
            words = me.world.said.get(key)
            if words is not None and words.numel() == self._into.numel():
                self._into.copy_(words.view(self._into.shape))
                return
        raise CommError("IG206", rank=me.rank, sender=self._sender, axes=self._line.axes)
