"""What a rank writes into a checkpoint, kept in the memory of a partner too: a death loses nothing of the state.

After each step, beside the next forward, every rank sends its rows (of parameters, optimizer, generators: what it would
write into a checkpoint, so that each row of the state is sent once) to the rank half a world away, and keeps what the
rank half a world behind it sends. The copies of two steps are kept:

    copies of step k complete  <  vote of step k + 1  <  step k + 1 changes the state  <  copies of k + 1 begin

The vote of a step is the exchange of its gradients' norm: a rank that knows the norm knows that all gradients are
reduced. `finish` comes before it. So whoever has voted holds complete copies of the step before, nobody is ever more
than one step ahead, and the memory of step k - 1 is used again only when all ranks have those of step k. At any moment
at which a rank dies, one step of which all rows are held by others is left; unless its partner dies too.

What is held outlives the world: `offers` and `write` (rescue.py asks for them) need no other rank.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd.checkpoint.files import DTYPES, TORCH
from isograd.checkpoint.hugging import describe
from isograd.checkpoint.write import Copied, Job, write_own
from isograd.comm import raw
from isograd.comm.agree import told
from isograd.comm.handle import Handle
from isograd.engine import Engine, state
from isograd.errors import LaunchError

ALIGNED = 16  # bytes: rows of any dtype begin at a multiple of it


@dataclass(frozen=True)
class Rows:
    """What one rank writes of a step: a note that says what lies where, and the bytes."""

    note: dict[str, Any]
    flat: Tensor

    def copied(self) -> list[Copied]:
        """The rows as a checkpoint's writer takes them."""
        found = []
        for key, shape, box, dtype, rows, start in self.note["rows"]:
            kind = TORCH[dtype]
            count = torch.Size(rows).numel() * kind.itemsize
            tensor = self.flat[start : start + count].view(kind).view(rows)
            found.append(Copied(key, tuple(shape), tuple((a, b) for a, b in box), tensor))
        return found


@dataclass
class Held:
    """The copies of one step in this process."""

    run: str
    world: str  # in which they were made
    step: int
    ranks: int
    head: dict[str, Any]  # of a checkpoint's manifest
    rows: dict[int, Rows] = field(default_factory=dict)  # by rank of that world


_held: list[Held] = []  # of the last two steps, older first; one list per process, like the world itself


class Copies:
    """One rank's part: its own rows, and its partner's."""

    def __init__(self, engine: Engine, run: str, extra: Mapping[str, Any]) -> None:
        """All ranks make it together. `run`: its name. `extra`: of the checkpoint that the copies may become."""
        self.engine, self.mesh, self.run, self.extra = engine, engine.mesh, run, dict(extra)
        self._group = self.mesh.group("world", "copies")
        if raw.native(self._group):
            raise LaunchError(
                "IG258", "copies are kept in host memory, which NCCL does not send", seen="resilience.copies partner",
                expected="ranks that talk through gloo", fix="--resilience.copies none", where=self.mesh.where(),
            )  # fmt: skip
        self._by = max(1, self._group.size // 2)
        self._world = str(told(secrets.token_hex(8), self.mesh)[0])
        self._arriving: tuple[Held, int, Tensor, Tensor, Handle] | None = None
        self._spare: list[Tensor] = []

    def start(self, step: int) -> None:
        """After a step that all ranks have voted for, on all of them: copy this rank's rows, and let them leave."""
        declared = state.declare(self.engine)
        found = state.parts(self.engine, state.elementwise(self.engine, declared)) + state.generators(self.mesh)
        while _held and (len(_held) > 1 or _held[0].world != self._world):
            self._spare += [rows.flat for rows in _held.pop(0).rows.values()]
        layout, config = self.mesh.layout, describe(self.engine.model)
        head = {"step": step, "layout": str(layout), "model": config, "extra": self.extra, "run": declared.run}
        held = Held(self.run, self._world, step, layout.world_size, head)
        own = self._copy([part for part in found if part.written[1].numel()], state.counts(self.engine, declared))
        held.rows[self.mesh.rank] = own
        _held.append(held)
        text = torch.frombuffer(bytearray(json.dumps(own.note).encode()), dtype=torch.uint8)
        sizes = torch.tensor([len(text), len(own.flat)])
        theirs = raw.shift(sizes, self._group, self._by).tolist()
        note, flat = self._room(theirs[0]), self._room(theirs[1])
        members = self._group.size
        to, source = (self._group.index + self._by) % members, (self._group.index - self._by) % members
        out: list[list[Tensor]] = [[] for _ in range(members)]
        into: list[list[Tensor]] = [[] for _ in range(members)]
        out[to], into[source] = [text, own.flat], [note, flat]
        self._arriving = held, self._group.ranks[source], note, flat, raw.exchange(out, into, self._group)

    def finish(self) -> None:
        """Before the next vote: the partner's rows have arrived."""
        if self._arriving is None:
            return
        held, source, note, flat, handle = self._arriving
        handle.wait()
        held.rows[source] = Rows(json.loads(bytes(note.numpy())), flat)
        self._arriving = None

    def close(self) -> None:
        """At the end of a world, however it ends: keep what has arrived, and nothing that waits for other ranks."""
        with suppress(Exception):  # the partner has died before its rows were sent
            self.finish()
        self._arriving = None

    @torch.no_grad()
    def _copy(self, parts: list[state.Part], counts: dict[str, Any]) -> Rows:
        listed, total = [], 0
        for part in parts:
            box, tensor = part.written
            listed.append((part.key, part.shape, box, DTYPES[tensor.dtype], tuple(tensor.shape), total))
            total += -(-tensor.numel() * tensor.itemsize // ALIGNED) * ALIGNED
        rows = Rows({"rows": listed, "counts": counts}, self._room(total))
        for copy, part in zip(rows.copied(), parts, strict=True):
            copy.tensor.copy_(part.written[1])
        return rows

    def _room(self, size: int) -> Tensor:
        """Host memory; that of copies which are no longer needed, if one has this size."""
        for number, tensor in enumerate(self._spare):
            if len(tensor) == size:
                return self._spare.pop(number)
        return torch.empty(size, dtype=torch.uint8)


@dataclass(frozen=True)
class Offer:
    """Copies that a process holds."""

    world: str
    step: int
    ranks: int
    of: tuple[int, ...]  # the ranks of that world whose rows they are


def offers(run: str) -> list[Offer]:
    """What this process holds of each step of a run."""
    return [Offer(held.world, held.step, held.ranks, tuple(held.rows)) for held in _held if held.run == run]


def write(world: str, step: int, ranks: list[int], folder: Path, place: Path) -> dict[str, Any]:
    """Write the rows of these ranks into a partial checkpoint, as those ranks would have; the manifest's head."""
    held = next(held for held in _held if (held.world, held.step) == (world, step))
    for rank in ranks:
        rows = held.rows[rank]
        job = Job(
            folder,
            place,
            step,
            rank,
            held.ranks,
            held.head,
            rows.copied(),
            rows.note["counts"],
            1,
            None,
            lambda _: None,
        )
        write_own(job, lambda: None)
    return held.head
