"""A world without processes: one rank's program runs, and the other ranks are imagined.

Messages go nowhere. What this rank would receive is answered here:

    data      zeros. Only their shapes matter to a program that does not decide by them.
    control   (raw.py marks it: notes, counts, fingerprints, totals) what this rank says to the sender, as in a world in
              which all ranks agree. Of a sender of another pipeline stage: what it said, if it has been imagined before
              in the same `World`; else what another rank of its stage said; else what this rank says.

Ranks of a pipeline say different things (how many parameters they hold, what they pass on), so they are imagined one
after the other in one `World`, which remembers what each stage said. The first ranks of a round hear guesses of what
later stages say, and are imagined again while the world is `unsure`. A word that nobody can guess is an error.

raw.py treats a `Line` as it treats a process group of torch. Nothing outside of comm and mesh.py knows of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import torch

from isograd.errors import CommError

# The sender (a rank, or ~ a stage), the receiver's stage, axes, purpose, tag, how many words went this way before.
Key = tuple[int, int, str, str, int, int]


class World:
    """What imagined ranks of one layout have said."""

    def __init__(self) -> None:
        self.said: dict[Key, torch.Tensor] = {}
        self.speakers: set[int] = set()  # ranks that have said something
        self.unsure = False  # whether a word of another stage was guessed, or has changed its size, since it was False

    def say(self, key: Key, words: torch.Tensor) -> None:
        """Remember words, in place of those of an earlier round, or of another rank of the same stage."""
        before = self.said.get(key)
        self.unsure |= before is not None and before.numel() != words.numel()
        self.said[key] = words
        if key[0] >= 0:
            self.speakers.add(key[0])


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

    def gathers(self, peer: int, axes: str, purpose: str) -> int:
        """The same of a message that every member of a group sends to every other; `gathered` counts it."""
        return self._counts["to", peer, axes, purpose, 0] + self._gathers[axes, purpose, 0]

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
        for stage, ranks in self._stages.items():
            names = self.axes, self.purpose, 0, me.gathers(ranks[0], self.axes, self.purpose)
            for speaker in (me.rank, ~here):
                me.world.say((speaker, stage, *names), mine.detach())
            words = mine if stage == here else said.get((~stage, here, *names))
            if words is None or words.numel() != mine.numel():
                words, me.world.unsure = mine, True
            found += [words.view(mine.shape) if words is not mine else mine] * len(ranks)
            for rank in me.world.speakers.intersection(ranks) if stage != here else ():
                words = said.get((rank, here, *names))
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
        for key in self._keys:
            words = me.world.said.get(key)
            if words is not None and words.numel() == self._into.numel():
                self._into.copy_(words.view(self._into.shape))
                me.world.unsure |= key is self._keys[-1] and me.stage(self._sender) != me.stage(me.rank)
                return
        raise CommError(
            "IG206",
            f"imagined rank {me.rank} waits for a word of rank {self._sender} that nobody has said",
            seen=f"a control message over {self._line.axes!r}, and no rank of that pipeline stage was imagined before",
            expected="the ranks of a pipeline imagined in the order of their stages, in one imagined world",
            fix="Mesh.imagine(layout, rank, world) with the same `world` for each stage, or 'isograd rehearse', which "
            "does that",
        )
