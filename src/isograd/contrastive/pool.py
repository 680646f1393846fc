"""From hidden states of tokens to one vector per row, also where a row's tokens lie on several ranks.

    vectors = ig.contrastive.pool(hidden, weights, mesh)

A mean, the first token, the last token: each is a weighted sum over tokens, and the weights say which. Under cp every
rank adds up its own tokens, and their sum is I: each rank holds the one representation, whose gradient it is given
whole and hands on to its own tokens. Parameters then owe the data axes, as always. With sp, tokens are gathered over tp
first, for one identical use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isograd.comm import ops
from isograd.mesh import Mesh


def pool(hidden: Tensor, weights: Tensor, mesh: Mesh) -> Tensor:
    """hidden [rows, my tokens, h], or flat as isograd's layers have it; weights [rows, my tokens] -> [rows, h].

    Weights of a row add up to 1 over all cp ranks' tokens, and are 0 at pads.
    """
    if mesh.layout.sp:
        hidden = ops.gather_for_identical_use(hidden.flatten(0, -2), mesh.group("tp"))
    hidden = hidden.reshape(*weights.shape, hidden.shape[-1])
    mine = torch.einsum("rt,rth->rh", weights.to(hidden.dtype), hidden)
    return ops.all_reduce(mine, mesh.group("cp"))
