"""What the mean of a loss is over: tokens, sequences, a constant length, or prompts. As data, made with the batch.

    share = of_sequences(mask, documents)             # [b, s], of whole rows; cut it like the labels
    loss, weight = mean(losses, share)                # of the tokens that are here
    engine.backward(ig.Terms(policy=(loss, weight), kl=(*mean(kl(logp, reference), share), 0.05)))

Each of these means is a sum over tokens of factor * loss, divided by a number of things. `Share` has the factor of each
token, and how much of a thing the token stands for: 1 of the tokens; 1/T of a sequence of T tokens; 1/T of a prompt
whose completions have T tokens in all. Both lie on the tokens, so they can be cut into micro-batches, ranks and parts
of sequences (cp), and packed, as the labels are, and add up to the same numbers however they are cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.errors import EngineError
from isograd.mesh import Mesh


class Share(NamedTuple):
    """Of each token, [b, s] in float64."""

    factors: Tensor  # what its loss is multiplied with in the sum
    counts: Tensor  # its part of the number that the sum is divided by


def mean(losses: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    """(the mean over what is here, its weight): a term. losses: of each token, in the shape of the share.

    The loss of a token whose factor is 0 is not looked at, not even NaN.
    """
    if losses.shape != share.factors.shape:
        raise EngineError(
            "IG575", "the losses of tokens and their shares have different shapes",
            seen=f"losses {tuple(losses.shape)}, share {tuple(share.factors.shape)}",
            expected="one share for each token",
            fix="cut the share as the tokens are cut: by rows for micro-batches, by places under cp",
        )  # fmt: skip
    weight = share.counts.sum()
    kept = torch.where(share.factors != 0, losses, torch.zeros_like(losses))
    total = (kept * share.factors.to(losses.dtype)).sum()
    return total / torch.where(weight > 0, weight, torch.ones_like(weight)).to(losses.dtype), weight


def of_tokens(mask: Tensor) -> Share:
    """The mean over all tokens (DAPO, and language models)."""
    counts = mask.double()
    return Share(counts, counts)


def of_sequences(mask: Tensor, documents: Tensor | None = None) -> Share:
    """The mean over sequences of the mean over the tokens of each (GRPO). A sequence without tokens has no mean, and is
    not counted. mask, documents [b, s]: of whole rows; without documents a row is a sequence."""
    counts = mask.double() / _tokens(mask, numbered(mask, documents)).clamp(min=1)
    return Share(counts, counts)


def of_length(mask: Tensor, length: int, documents: Tensor | None = None) -> Share:
    """The sum over all tokens / (number of sequences * length): Dr. GRPO. A sequence without tokens is counted;
    documents below 0 are padding, and are not."""
    sequences = numbered(mask, documents)
    tokens = _tokens(mask, sequences)
    counts = mask.double() / tokens.clamp(min=1)
    first = torch.ones_like(mask, dtype=torch.bool)
    first[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    return Share(mask.double() / length, torch.where(first & (tokens == 0) & (sequences >= 0), 1.0, counts))


def of_prompts(mask: Tensor, prompts: Tensor, tokens: Tensor) -> Share:
    """The mean over prompts of the mean over the tokens of all completions of each. prompts: its number, of each row
    [b] or token [b, s]; tokens: of each prompt in the whole step, on all ranks (`tokens_of_prompts`)."""
    of_each = tokens.to(mask.device)[_on_tokens(prompts, mask)]
    counts = mask.double() / of_each.double().clamp(min=1)
    return Share(counts, counts)


def tokens_of_prompts(mask: Tensor, prompts: Tensor, number: int, mesh: Mesh) -> Tensor:
    """[number]: the tokens of each prompt in the whole step. mask, prompts: whole rows of this data rank, of all its
    micro-batches. All ranks call it, those without rows too: the completions of a prompt may be on several ranks."""
    mine = torch.bincount(_on_tokens(prompts, mask).reshape(-1), weights=mask.double().reshape(-1), minlength=number)
    return raw.all_reduce(mine.to(mesh.device), mesh.group("dp"))


def numbered(mask: Tensor, documents: Tensor | None = None) -> Tensor:
    """[b, s]: the sequences of packed rows numbered from 0, rows one after another; -1 for documents below 0."""
    rows = torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape)
    if documents is None or not mask.numel():
        return rows
    pairs = torch.stack((rows, documents), -1).reshape(-1, 2)
    inside = pairs[:, 1] >= 0
    found = torch.full((len(pairs),), -1, device=mask.device)
    found[inside] = torch.unique(pairs[inside], dim=0, return_inverse=True)[1]
    return found.view(mask.shape)


def _tokens(mask: Tensor, sequences: Tensor) -> Tensor:
    """[b, s]: how many tokens the sequence of each token has."""
    kept = sequences.clamp(min=0).reshape(-1)
    weights = (mask.double() * (sequences >= 0)).reshape(-1)
    return torch.bincount(kept, weights=weights)[kept].view(mask.shape) if mask.numel() else mask.double()


def _on_tokens(prompts: Tensor, mask: Tensor) -> Tensor:
    return prompts if prompts.dim() == 2 else prompts[:, None].expand(mask.shape)
