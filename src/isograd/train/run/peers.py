"""What ranks of a run tell each other: hosts and config at the start, copies of parameters, the load of experts."""

from __future__ import annotations

import difflib
import socket
from hashlib import sha256

from torch import nn

from isograd.comm.consensus import all_gather_object
from isograd.comm.fingerprint import first_unlike
from isograd.core.contract import Contract
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import TrainError
from isograd.nn import MoE


def hosts(mesh: Mesh) -> list[str]:
    """The name of the machine of every rank."""
    found: list[str] = all_gather_object(socket.gethostname(), mesh)
    return found


def same_config(text: str, mesh: Mesh) -> None:
    """Refuse to start when ranks were given different configs; the first rank's is what others are compared with."""
    hashes = all_gather_object(sha256(text.encode()).hexdigest(), mesh)
    different = [rank for rank, other in enumerate(hashes) if other != hashes[0]]
    if not different:
        return
    texts = all_gather_object(text.splitlines(), mesh)
    diff = difflib.unified_diff(texts[0], texts[different[0]], "rank 0", f"rank {different[0]}", n=0, lineterm="")
    lines = [line for line in diff if not line.startswith("@@")]
    seen = f"ranks {different} differ from rank 0:\n    " + "\n    ".join(lines[:40])
    raise TrainError("IG983", seen=seen, where=mesh.describe_rank())


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
        found = first_unlike({name: engine.local_shard(name) for name in names}, mesh.group(axes))
        if found is not None and mine is None:
            mine = [found[0], found[1][:8] + ["..."] * (len(found[1]) > 8), axes]
    said = all_gather_object(mine, mesh)
    rank = next((rank for rank, note in enumerate(said) if note), None)
    if rank is not None:
        other, unlike, axes = said[rank]
        raise TrainError(
            "IG984", seen=f"rank {rank} and rank {other} differ in {', '.join(unlike)}", step=step, axes=axes
        )


def _copied_over(contract: Contract, mesh: Mesh) -> list[str]:
    """The axes over which other ranks hold the same values as this one."""
    axes = [] if mesh.layout.zero == 3 else [contract.data]
    axes += list(contract.partial_over) if contract.cut else [contract.model_parallel_axis, *contract.ties]
    return [a for a in dict.fromkeys(axes) if mesh.size(a) > 1]


def expert_load(model: nn.Module, mesh: Mesh) -> dict[str, list[float]]:
    """The load of each expert by layer, of all pipeline stages; all ranks call this. Empty without experts."""
    if not any(isinstance(module, MoE) for module in model.modules()) and mesh.size("pp") == 1:
        return {}
    mine = {
        name: [round(share, 3) for share in found.tolist()]
        for name, module in model.named_modules()
        if isinstance(module, MoE) and (found := module.relative_load()) is not None
    }
    return {name: load for note in all_gather_object(mine, mesh, "pp") for name, load in note.items()}
