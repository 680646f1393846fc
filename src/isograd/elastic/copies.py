"""What a rank writes into a checkpoint, in memory that outlives it too: a death loses nothing of the state.

After each step every rank copies its rows (of parameters, optimizer, generators: what it would write into a checkpoint,
so that each row of the state is copied once) into a memory (shared_memory.py). Its partner, the rank half a world away,
holds them as well:

    on the same machine      it has the memory open, and nothing is sent
    elsewhere                the memory's bytes leave in one message, beside the next forward, for a memory of its own

There are two memories, for even and for odd steps:

    copies of step k complete  <  vote of step k + 1  <  step k + 1 changes the state  <  copies of k + 1 begin

The vote of a step is the exchange of its gradients' norm: a rank that knows the norm knows that all gradients are
reduced. `finish` comes before it. So a rank that has voted holds complete copies of the step before, nobody is ever
more than one step ahead, and the memory of step k - 1 is used again only when all ranks have theirs of step k. At any
moment at which a rank dies, one step of which all rows are held by others is left; unless its partner dies too.

Where every rank holds the whole state (replicas.py) nothing is copied at all, with `copies: none`, too.

What is held outlives the world: `offers` and `write` (emergency_checkpoint.py asks for them) need no other rank.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from isograd.checkpoint.manifest import describe_model
from isograd.checkpoint.write import Copied, SaveJob, write_own
from isograd.comm import raw
from isograd.comm.consensus import all_gather_object
from isograd.comm.group import Group
from isograd.comm.handle import Handle
from isograd.elastic.replicas import Replicas, copied
from isograd.elastic.shared_memory import HEAD, SharedMemory
from isograd.engine import Engine, state
from isograd.engine.sdc import memory as checksums
from isograd.errors import LaunchError
from isograd.io.store import Place

FIRST = 8 * HEAD  # bytes of the first message: the head alone, which says how many are to follow


@dataclass
class StateCopies:
    """What this process holds of one world's state."""

    run: str
    world: str
    ranks: int
    head: dict[str, Any]  # of a checkpoint's manifest, without step and numbers per run
    memories: dict[int, tuple[SharedMemory, SharedMemory]] = field(
        default_factory=dict
    )  # by rank: of even steps, of odd ones
    full_state: tuple[int, dict[int, tuple[list[Copied], dict[str, Any]]], dict[str, Any]] | None = None
    # the state itself: (step, by rank (tensors, numbers per parameter), numbers per run)

    def steps(self) -> dict[int, list[int]]:
        """{step: ranks whose rows of it are here}."""
        found: dict[int, list[int]] = {}
        for rank, memories in self.memories.items():
            for memory in memories:
                if memory.step is not None:
                    found.setdefault(memory.step, []).append(rank)
        if self.full_state is not None:
            found[self.full_state[0]] = list(range(self.ranks))
        return found

    def rows(self, step: int, rank: int) -> tuple[list[Copied], dict[str, Any], dict[str, Any]]:
        """(tensors, numbers per parameter, numbers per run), whole and as they were."""
        if self.full_state is not None and self.full_state[0] == step:
            return *self.full_state[1][rank], self.full_state[2]
        rows = self.memories[rank][step % 2].rows()
        if rows.damaged:
            raise LaunchError(
                "IG259", f"the copy of rank {rank} has changed in memory", seen=f"another checksum, after step {step}",
                expected="the bits that were copied", fix="the memory of this machine may be faulty",
            )  # fmt: skip
        return rows.copied(), rows.note["counts"], rows.note["run"]


_state_copies: list[
    StateCopies
] = []  # of the last two worlds, older first; one list per process, like the world itself


class Copies:
    """One rank's part: its own rows, and its partner's."""

    def __init__(self, engine: Engine, run: str, extra: Mapping[str, Any], *, partner: bool = True) -> None:
        """All ranks make it together. `run`: its name. `extra`: of the checkpoint that the copies may become.

        partner: whether rows are copied that no other rank holds.
        """
        self.engine, self.mesh, mesh = engine, engine.mesh, engine.mesh
        world = str(all_gather_object(secrets.token_hex(8), mesh)[0])
        self.extra = dict(extra)  # the same on all ranks, also when they change it
        head = {"layout": str(mesh.layout), "model": describe_model(engine.model), "extra": self.extra}
        self._mine = StateCopies(run, world, mesh.layout.world_size, head)
        _state_copies.append(self._mine)
        self._replicas, self._partner = Replicas(engine), partner
        self._lives = self._replicas.equal  # whether any rank that is left has it all; asked again after the first step
        self._step = 0
        self._declared: state.Declared | None = None
        self._parts: tuple[tuple[int, ...], list[state.Part]] = (), []
        self._link: Group | None = None
        self._sends = self._receives = False
        by = max(1, mesh.layout.world_size // 2)
        self._to, self._source = ((mesh.rank + way) % mesh.layout.world_size for way in (by, -by))
        self._sent = self._received = FIRST  # bytes that both ends of a message take for granted
        self._under_way: tuple[int, Handle | None, Handle | None] | None = None

    def start(self, step: int) -> None:
        """After a step that all ranks have voted for, on all of them: copy this rank's rows, and let them leave."""
        self._replicas.mark()
        if self._declared is None or not self._declared.entries:  # after the first step, on all ranks
            self._lives = all(all_gather_object(self._replicas.usable(), self.mesh))
            self._declared = state.declare(self.engine)
            if self._partner and not self._lives and not self._mine.memories:
                self._meet()
        self._step = step
        if self._mine.memories:
            declared = state.renew(self.engine, self._declared)
            memory = self._mine.memories[self.mesh.rank][step % 2]
            note = {"counts": state.counts(self.engine, declared), "run": declared.run}
            memory.fill(step, self._written(declared), note)
            self._send(memory, step)
        del _state_copies[:-1]

    def finish(self) -> None:
        """Before the next vote: the partner's rows have arrived."""
        if self._under_way is None:
            return
        (step, arriving, leaving), self._under_way = self._under_way, None
        if arriving is not None and self._link is not None:
            arriving.wait()
            memory = self._mine.memories[self._source][step % 2]
            size = memory.size
            if size > self._received:
                memory.grow(size)
                raw.receive_start([memory.bytes[self._received : size]], self._link, self._source).wait()
                self._received = size
            memory.filled(step)
        if leaving is not None:  # last: its receiver may have to learn first how much there is
            leaving.wait()

    def restore(self, keys: Iterable[str]) -> None:
        """Bring back rows of this rank's tensors (the keys of checkpoints) from its own copy of the last step."""
        memories = self._mine.memories.get(self.mesh.rank)
        if memories is None or memories[self._step % 2].step != self._step:
            return
        rows = memories[self._step % 2].rows()
        if rows.damaged:
            return
        copied = {copy.key: copy.tensor for copy in rows.copied()}
        for part in self._parts[1]:
            if part.key in keys and part.key in copied:
                part.written[1].copy_(copied[part.key])
        held = checksums.tensors(self.engine)
        for entry, values in rows.note["counts"].items():
            for name, (value, _) in values.items():
                key = f"optimizer/{entry}/{name}"
                if key in keys and key in held:
                    held[key].fill_(value)

    def close(self, failed: bool) -> None:
        """At the end of a world: keep what has arrived, and nothing that waits for other ranks."""
        with suppress(Exception):  # the partner has died before its rows were sent
            self.finish()
        self._under_way = None
        if failed and self._lives and self._declared is not None and self._replicas.usable():
            declared = state.renew(self.engine, self._declared)
            rows = self._replicas.rows(declared)
            self._mine.full_state = self._step, {r: (copied(parts), n) for r, (parts, n) in rows.items()}, declared.run

    def _meet(self) -> None:
        """Make this rank's memories, and open those of the rank half a world behind, or make some for its messages."""
        mesh = self.mesh
        own = SharedMemory(), SharedMemory()
        mine = [(memory.fd, memory.token) for memory in own]
        said = all_gather_object([socket.gethostname(), os.getpid(), mine], mesh)
        host, process, theirs = said[self._source]
        found = [
            SharedMemory.of(process, fd, token) for fd, token in theirs if fd is not None and host == said[mesh.rank][0]
        ]
        memories = [memory for memory in found if memory is not None]
        opened = all_gather_object(len(memories) == 2, mesh)
        self._receives, self._sends = not opened[mesh.rank], not opened[self._to]
        partner = (SharedMemory(), SharedMemory()) if self._receives else (memories[0], memories[1])
        self._mine.memories = {mesh.rank: own, self._source: partner}
        if not all(opened):
            self._link = mesh.group("world", "copies")  # from host memory, by gloo beside NCCL, too

    def _send(self, memory: SharedMemory, step: int) -> None:
        """All but the first number, which says of which step the receiver has a whole copy. Beyond the size of the
        step before it leaves as a second message: its receiver learns from the head of the first one that there is one.
        """
        if self._link is None:
            return
        arriving = leaving = None
        if self._receives:
            into = self._mine.memories[self._source][step % 2]
            into.grow(self._received)
            into.filling()
            arriving = raw.receive_start([into.bytes[8 : self._received]], self._link, self._source)
        if self._sends:
            memory.grow(self._sent)
            messages = [memory.bytes[8 : self._sent]]
            if memory.size > self._sent:
                messages.append(memory.bytes[self._sent : memory.size])
                self._sent = memory.size
            leaving = raw.send_start(messages, self._link, self._to)
        self._under_way = step, arriving, leaving

    def _written(self, declared: state.Declared) -> list[state.Part]:
        """What this rank writes. Found again when a tensor lies elsewhere than a step before."""
        places = checksums.places(self.engine)
        if places != self._parts[0]:
            found = state.parts(self.engine, state.elementwise(self.engine, declared))
            self._parts = places, [part for part in found if part.written[1].numel()]
        return self._parts[1] + state.generators(self.mesh)


@dataclass(frozen=True)
class Offer:
    """Copies that a process holds."""

    world: str
    step: int
    ranks: int
    of: tuple[int, ...]  # the ranks of that world whose rows they are


def offers(run: str) -> list[Offer]:
    """What this process holds of each step of a run."""
    return [
        Offer(held.world, step, held.ranks, tuple(of))
        for held in _state_copies
        if held.run == run
        for step, of in held.steps().items()
    ]


def write(world: str, step: int, ranks: list[int], folder: Place, place: Place) -> dict[str, Any]:
    """Write the rows of these ranks into a partial checkpoint, as those ranks would have; what `joined` puts together
    to the manifest's head."""
    held = next(held for held in _state_copies if held.world == world)
    head, runs = {"step": step, **held.head}, {}
    for rank in ranks:
        tensors, counts, runs[rank] = held.rows(step, rank)
        job = SaveJob(folder, place, step, rank, held.ranks, head, tensors, counts, 1, None, lambda _: None)
        write_own(job, lambda: None)
    return {"head": head, "runs": runs}


def joined(written: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The head of the manifest, from what `write` said on each process."""
    said = list(written)
    runs = {rank: run for one in said for rank, run in one["runs"].items()}
    head: dict[str, Any] = said[0]["head"]
    return head | {"run": state.merge_runs(runs[rank] for rank in sorted(runs))}
