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
from isograd.comm.consensus import all_gather_object, raise_on_all_ranks
from isograd.core.mesh import Mesh
from isograd.errors import EngineError, IsogradError
from isograd.losses import given


class Share(NamedTuple):
    """Of each token, [b, s] in float64."""

    factors: Tensor  # what its loss is multiplied with in the sum
    counts: Tensor  # its part of the number that the sum is divided by


def mean(losses: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    """(the mean over what is here, its weight): a term. losses: of each token, in the shape of the share.

    The value of a token whose factor is 0 is not looked at, not even NaN. Nor are advantages, log probabilities, values
    and returns there, in `clip`, `kl` and `value`. The gradient of another loss at such a place is 0 times its
    derivative, which torch makes NaN where that is infinite.
    """
    given.same_shapes(losses=losses, share=share.factors)
    weight = share.counts.sum()
    kept = torch.where(share.factors != 0, losses, torch.zeros_like(losses)).double()
    found = (kept * share.factors).sum() / torch.where(weight > 0, weight, torch.ones_like(weight))
    return found.to(torch.promote_types(losses.dtype, torch.float32)), weight


def of_tokens(mask: Tensor) -> Share:
    """The mean over all tokens (DAPO, and language models)."""
    given.mask_of(mask)
    counts = mask.double()
    return Share(counts, counts)


def of_sequences(mask: Tensor, documents: Tensor | None = None) -> Share:
    """The mean over sequences of the mean over the tokens of each (GRPO). A sequence without tokens has no mean, and is
    not counted. mask, documents [b, s]: of whole rows; without documents a row is a sequence; documents below 0 are
    padding."""
    sequences = numbered(mask, documents)
    counts = _valid(mask, sequences) / _tokens(mask, sequences).clamp(min=1)
    return Share(counts, counts)


def of_length(mask: Tensor, length: int, documents: Tensor | None = None) -> Share:
    """The sum over all tokens / (number of sequences * length): Dr. GRPO. A sequence without tokens is counted;
    documents below 0 are padding, and are not."""
    given.option("length", length, length > 0, "a number of tokens above 0")
    sequences = numbered(mask, documents)
    tokens, inside = _tokens(mask, sequences), _valid(mask, sequences)
    counts = inside / tokens.clamp(min=1)
    return Share(inside / length, torch.where(_firsts(sequences) & (tokens == 0), 1.0, counts))


def of_prompts(mask: Tensor, prompts: Tensor, tokens: Tensor) -> Share:
    """The mean over prompts of the mean over the tokens of all completions of each. prompts: its number, of each row
    [b] or token [b, s]; tokens: of each prompt in the whole step, on all ranks (`tokens_of_prompts`)."""
    places = _on_tokens(prompts, mask, len(tokens))
    of_each = tokens.to(mask.device)[places]
    here = torch.bincount(places.reshape(-1), weights=mask.double().reshape(-1), minlength=len(tokens))
    if bool((here > tokens.to(mask.device)).any()):
        raise EngineError(
            "IG576",
            "prompts have more tokens here than in the whole step",
            seen=f"{here.tolist()[:8]} tokens here, {tokens.tolist()[:8]} in the step",
            expected="tokens of each prompt over all ranks and micro-batches",
            fix="tokens_of_prompts(mask, prompts, number, mesh) of all rows of the step",
        )
    counts = mask.double() / of_each.double().clamp(min=1)
    return Share(counts, counts)


def tokens_of_prompts(mask: Tensor, prompts: Tensor, number: int, mesh: Mesh) -> Tensor:
    """[number]: the tokens of each prompt in the whole step. mask, prompts: whole rows of this data rank, of all its
    micro-batches. All ranks call it, those without rows too: the completions of a prompt may be on several ranks."""
    wrong: IsogradError | None = None
    mine = torch.zeros(0)
    try:
        places = _on_tokens(prompts, mask, number).reshape(-1)
        mine = torch.bincount(places, weights=mask.double().reshape(-1), minlength=number)
    except EngineError as error:
        wrong = error
    numbers = all_gather_object(number, mesh)
    if wrong is None and len(set(numbers)) > 1:
        wrong = EngineError(
            "IG576", "ranks count different numbers of prompts", seen=f"{numbers}, in the order of ranks",
            expected="the number of prompts of the whole step on every rank", where=mesh.describe_rank(),
        )  # fmt: skip
    raise_on_all_ranks(wrong, mesh, EngineError)
    return raw.all_reduce(mine.to(mesh.device), mesh.group("dp"))


def numbered(mask: Tensor, documents: Tensor | None = None) -> Tensor:
    """[b, s]: the sequences of packed rows numbered from 0, rows one after another; -1 for documents below 0."""
    given.mask_of(mask)
    if documents is not None:
        given.same_shapes(mask=mask, documents=documents)
        given.numbers_of("documents", documents, least=-(2**62))
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
    weights = _valid(mask, sequences).reshape(-1)
    return torch.bincount(kept, weights=weights)[kept].view(mask.shape) if mask.numel() else mask.double()


def _firsts(sequences: Tensor) -> Tensor:
    """[b, s]: the first token of each sequence, which may stand in several pieces."""
    flat, found = sequences.reshape(-1), torch.zeros(sequences.numel(), dtype=torch.bool, device=sequences.device)
    places = torch.arange(len(flat), device=flat.device)[flat >= 0]
    if len(places):
        kept = flat[places]
        firsts = places.new_full((int(kept.max()) + 1,), len(flat)).scatter_reduce(0, kept, places, "amin")
        found[firsts[firsts < len(flat)]] = True
    return found.view(sequences.shape)


def _valid(mask: Tensor, sequences: Tensor) -> Tensor:
    """The mask without padding, as numbers."""
    return mask.double() * (sequences >= 0)


def _on_tokens(prompts: Tensor, mask: Tensor, number: int) -> Tensor:
    given.mask_of(mask)
    given.numbers_of("prompts", prompts, below=number)
    of_rows = prompts.dim() == 1 and len(prompts) == len(mask)
    on_tokens = prompts[:, None].expand(mask.shape) if of_rows else prompts
    given.same_shapes(mask=mask, prompts=on_tokens)
    return on_tokens
