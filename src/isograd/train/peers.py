"""What ranks of a run must agree on: one config at the start, equal copies of parameters all the way."""

from __future__ import annotations

import difflib

import torch

from isograd.comm import raw
from isograd.comm.fingerprint import fingerprint
from isograd.contract import Table
from isograd.engine import Engine
from isograd.errors import TrainError
from isograd.mesh import DATA, Mesh

MAX_TEXT = 1 << 20


def same_config(text: str, mesh: Mesh) -> None:
    """Refuse to start when ranks were given different configs; the first rank's is what others are compared with."""
    world = mesh.group("world")
    mine = torch.frombuffer(bytearray(text.encode()[:MAX_TEXT]), dtype=torch.uint8).to(mesh.device)
    lengths = [int(n) for n in raw.gather_list(torch.tensor([len(mine)], device=mesh.device), world)]
    first = torch.zeros(lengths[0], dtype=torch.uint8, device=mesh.device)
    if mesh.rank == 0:
        first.copy_(mine)
    raw.broadcast_(first, world)
    unlike = torch.tensor([len(first) != len(mine) or not torch.equal(first, mine)], device=mesh.device)
    different = [rank for rank, flag in enumerate(raw.gather_list(unlike, world)) if bool(flag)]
    if not different:
        return
    # One of those that differ shows what to everybody.
    theirs = torch.zeros(lengths[different[0]], dtype=torch.uint8, device=mesh.device)
    if mesh.rank == different[0]:
        theirs.copy_(mine)
    raw.broadcast_(theirs, world, different[0])
    one, other = (bytes(t.cpu().tolist()).decode(errors="replace").splitlines() for t in (first, theirs))
    diff = difflib.unified_diff(one, other, "rank 0", f"rank {different[0]}", n=0, lineterm="")
    lines = [line for line in diff if not line.startswith("@@")]
    raise TrainError(
        "IG983",
        "the ranks of this run were given different configs",
        seen=f"ranks {different} differ from rank 0:\n    " + "\n    ".join(lines[:40]),
        expected="one config",
        fix="copy the same file to every machine, and start every rank with the same options",
        where=mesh.where(),
    )


def equal_copies(engine: Engine, table: Table, mesh: Mesh, step: int) -> None:
    """Parameters that several ranks hold are equal, bit by bit; a difference names parameter and ranks."""
    for axes in sorted({axes for record in table for axes in _copied_over(record.name, table, mesh)}):
        group = mesh.group(axes)
        names = sorted(r.name for r in table if axes in _copied_over(r.name, table, mesh))
        prints = torch.stack([fingerprint(engine.held(name)) for name in names])
        for rank, other in zip(group.ranks, raw.gather_list(prints, group), strict=True):
            unlike = [name for name, a, b in zip(names, prints, other, strict=True) if a != b]
            if unlike:
                raise TrainError(
                    "IG984",
                    f"after step {step} copies of parameters are no longer equal",
                    seen=f"rank {mesh.rank} and rank {rank} differ in {unlike[:8]}{' ...' if len(unlike) > 8 else ''}",
                    expected=f"equal bytes on every rank of {axes!r}",
                    fix="a rank computed or stored something wrong: check its memory, and resume from a checkpoint "
                    "before this step; 'isograd verify' says whether the layout's gradients are right",
                    where=mesh.where(),
                )


def _copied_over(name: str, table: Table, mesh: Mesh) -> list[str]:
    """The axes over which other ranks hold the same values as this one."""
    contract = table[name]
    cut = any(shard.axis == "tp" for shard in contract.shards)
    axes = [] if mesh.layout.zero == 3 else [DATA]
    axes += list(contract.owes) if cut else ["tp", *contract.ties]
    return [a for a in dict.fromkeys(axes) if mesh.size(a) > 1]
