"""From the hidden states of tokens to one vector per row, also where a row's tokens are on several ranks.

The mean, the first token and the last token are all weighted sums over the tokens; the weights choose between them.
Under cp every rank sums its own tokens, and an all-reduce adds the ranks' sums. The result has type I
(docs/theory.md): each rank holds the same vector, receives its full gradient and passes it on to its own tokens.
Parameters then owe the data axes, as always. With sp, the tokens are first gathered over tp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isograd.comm import ops
from isograd.core.mesh import Mesh


def pool(hidden: Tensor, weights: Tensor, mesh: Mesh) -> Tensor:
    """hidden [rows, my tokens, h], or flattened as in isograd's layers; weights [rows, my tokens] -> [rows, h].

    The weights of a row add up to 1 over the tokens of all cp ranks, and are 0 at padding.
    """
    if mesh.layout.sp:
        hidden = ops.gather_for_identical_use(hidden.flatten(0, -2), mesh.group("tp"))
    hidden = hidden.reshape(*weights.shape, hidden.shape[-1])
    mine = torch.einsum("rt,rth->rh", weights.to(hidden.dtype), hidden)
    return ops.all_reduce(mine, mesh.group("cp"))
