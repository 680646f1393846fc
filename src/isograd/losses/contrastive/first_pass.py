"""After GradientCache's first pass, all data ranks continue to the loss, or all raise.

The loss is made of the vectors of all ranks. A rank whose encoder has raised would leave the others waiting there, and
the next message that it sends, of another step, would be taken for its vectors. Not at ZeRO 3 and under ep, where each
forward is a collective: there the others wait for this rank in a forward, and ZeRO 3's notes tell them of its end.
"""

from __future__ import annotations

import torch

from isograd.comm import raw
from isograd.core.mesh import DATA, Mesh
from isograd.errors import ContrastiveError, headline

WORDS = 256  # bytes of what a rank says


def join_first_pass(error: Exception | None, mesh: Mesh) -> None:
    """One gather. `error`: that of this rank, which continues with it; the others raise one that names the rank."""
    group = mesh.group(DATA)
    if group.size == 1:
        return
    said = b"" if error is None else headline(error).encode()[:WORDS]
    mine = torch.frombuffer(bytearray(said.ljust(WORDS, b"\0")), dtype=torch.uint8).to(mesh.device)
    table = raw.gather(mine, group).cpu()
    if error is not None or not table.any():
        return
    failed = {rank: bytes(words.numpy()).rstrip(b"\0") for rank, words in zip(group.ranks, table, strict=True)}
    seen = "; ".join(f"rank {rank}: {words.decode(errors='ignore')}" for rank, words in failed.items() if words)
    raise ContrastiveError("IG974", seen=seen, where=mesh.describe_rank())
