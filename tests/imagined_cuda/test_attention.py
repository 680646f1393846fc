"""Attention by torch's flash kernels for cards (imagined: kernels.py) is its definition, also around a ring.

Output and gradients against the definition in fp64 of the same bf16 numbers, by the norm of what is true.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.nn.test_grouped_products import error

from . import right, run

LENGTH, HEADS, KEY_HEADS = 24, 4, 2  # a length without padding, whose rows are nobody's
LIMIT = 6 * 2.0**-9  # of bf16's roundings, at most six lie behind each other: of blocks, their sums, the result


def inputs(dim: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the cotangent of the output, and documents."""
    generator = torch.Generator().manual_seed(3)
    made = [
        torch.randn(2, LENGTH, heads, dim, generator=generator).bfloat16()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]
    documents = torch.zeros(2, LENGTH, dtype=torch.long)
    documents[0, 5:], documents[0, 6:], documents[0, 17:], documents[1, 11:] = 4, 1, 2, 3
    return made, documents


def on_cards(
    layout: str, window: int | None, packed: bool, softcap: float | None, dim: int
) -> tuple[list[float], dict[str, int]]:
    """The errors of the output, dq, dk and dv of this rank's tokens, and how often each kernel was called."""
    from isograd.core.mesh import Mesh
    from isograd.sequence import attend, document_starts, naive, token_layout_for, whole

    from . import kernels

    mesh = Mesh(layout)
    (*qkv, seed), documents = inputs(dim)
    places, rank = token_layout_for(LENGTH, 2, mesh), mesh.index("cp")
    starts = document_starts(places.pad(documents, -1)).to(mesh.device) if packed else None
    bounds = whole.document_bounds(starts)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return whole.attention(q, k, v, window=window, softcap=softcap, starts=starts, bounds=bounds).transpose(1, 2)

    mine = [places.shard(t, rank).to(mesh.device).requires_grad_() for t in qkv]
    cut = mesh.size("cp") > 1
    y = attend(attention, *mine, mesh, places, starts, window=window, softcap=softcap) if cut else attention(*mine)
    y.backward(places.shard(seed, rank).to(mesh.device))
    leaves = [t.double().requires_grad_() for t in qkv]
    true = naive.attention(*leaves, documents if packed else None, window=window, softcap=softcap)
    true.backward(seed.double())
    pairs = zip((y, *(t.grad for t in mine)), (true, *(t.grad for t in leaves)), strict=True)
    errors = [error(found.detach().cpu().double(), places.shard(value.detach(), rank)) for found, value in pairs]
    return errors, dict(kernels.used)


@pytest.mark.parametrize(
    ("layout", "window", "packed", "softcap", "kernel"),
    [
        ("1", 6, False, None, "varlen"),
        ("1", None, True, None, "varlen"),
        ("1", 6, True, None, "varlen"),
        ("1", 6, True, 5.0, ""),
        ("cp2 ulysses", 6, True, None, "varlen"),
        ("cp2 ring", None, False, None, "dense"),
        ("cp3 ring", None, False, None, "dense"),
        ("cp2 ring", None, True, 5.0, ""),
        pytest.param("cp2 ring", 6, True, 5.0, "flex", marks=pytest.mark.slow),
        pytest.param("cp2 ulysses", 6, True, 5.0, "flex", marks=pytest.mark.slow),
        pytest.param("cp3 ring", None, False, 5.0, "flex", marks=pytest.mark.slow),
        pytest.param("cp2 ring", 6, True, None, "flex", marks=pytest.mark.slow),
    ],
)
def test_attention_on_cards_is_its_definition(
    layout: str, window: int | None, packed: bool, softcap: float | None, kernel: str
) -> None:
    """FlexAttention is for heads of 16 and more; smaller ones take blocks of scores. (Each rank compiles its graphs,
    which takes a while; tests/sequence/test_band.py compiles one on every push.)"""
    ranks = 3 if "3" in layout else 2 if "2" in layout else 1
    dim = 16 if kernel == "flex" else 8
    for errors, used in right(run(on_cards, ranks, layout, window, packed, softcap, dim, join=False, limit=600)):
        assert max(errors) < LIMIT, errors
        assert kernel in used if kernel else not used
