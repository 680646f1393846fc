"""What ranks of a run must agree on: one config at the start, equal copies of parameters all the way."""

from __future__ import annotations

import difflib
import socket
from hashlib import sha256

from isograd.comm.fingerprint import first_unlike
from isograd.comm.notes import gather_notes
from isograd.contract import Contract
from isograd.engine import Engine
from isograd.errors import TrainError
from isograd.mesh import Mesh


def hosts(mesh: Mesh) -> list[str]:
    """The name of the machine of every rank."""
    found: list[str] = gather_notes(socket.gethostname(), mesh.group("world"), mesh.device)
    return found


def same_config(text: str, mesh: Mesh) -> None:
    """Refuse to start when ranks were given different configs; the first rank's is what others are compared with."""
    world = mesh.group("world")
    hashes = gather_notes(sha256(text.encode()).hexdigest(), world, mesh.device)
    different = [rank for rank, other in enumerate(hashes) if other != hashes[0]]
    if not different:
        return
    texts = gather_notes(text.splitlines(), world, mesh.device)
    diff = difflib.unified_diff(texts[0], texts[different[0]], "rank 0", f"rank {different[0]}", n=0, lineterm="")
    lines = [line for line in diff if not line.startswith("@@")]
    raise TrainError(
        "IG983",
        "the ranks of this run were given different configs",
        seen=f"ranks {different} differ from rank 0:\n    " + "\n    ".join(lines[:40]),
        expected="one config",
        fix="copy the same file to every machine, and start every rank with the same options",
        where=mesh.where(),
    )


def equal_copies(engine: Engine, step: int) -> None:
    """Refuse to continue when ranks hold different bits of a parameter of which they hold copies.

    Called in a step, before the optimizer writes: at ZeRO 1 and 2 what it writes makes the copies equal again, since
    all of them come from the owners of the rows.
    """
    mesh = engine.mesh
    copied = {record.name: _copied_over(record.contract, mesh) for record in engine.table}
    mine = None
    for axes in sorted({axes for over in copied.values() for axes in over}):
        names = sorted(name for name, over in copied.items() if axes in over)
        found = first_unlike({name: engine.held(name) for name in names}, mesh.group(axes))
        if found is not None and mine is None:
            mine = [found[0], found[1][:8] + ["..."] * (len(found[1]) > 8), axes]
    said = gather_notes(mine, mesh.group("world"), mesh.device)
    rank = next((rank for rank, note in enumerate(said) if note), None)
    if rank is not None:
        other, unlike, axes = said[rank]
        raise TrainError(
            "IG984",
            f"copies of parameters are no longer equal in step {step}",
            seen=f"rank {rank} and rank {other} differ in {', '.join(unlike)}",
            expected=f"equal bytes on every rank of {axes!r}",
            fix="a rank computed or stored something wrong: check its memory, and resume from a checkpoint "
            "before it; 'isograd verify' says whether the layout's gradients are right",
        )


def _copied_over(contract: Contract, mesh: Mesh) -> list[str]:
    """The axes over which other ranks hold the same values as this one."""
    axes = [] if mesh.layout.zero == 3 else [contract.data]
    axes += list(contract.owes) if contract.cut else [contract.beside, *contract.ties]
    return [a for a in dict.fromkeys(axes) if mesh.size(a) > 1]
