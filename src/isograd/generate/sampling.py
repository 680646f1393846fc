"""Which token comes next. A draw is a function of the seed, the number of the sample and the place in it, and of the
logits: the same on every rank, and the same whatever else is written beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.core import rng
from isograd.core.mesh import Mesh
from isograd.core.rng import Key


@dataclass(frozen=True)
class Sampling:
    """The words of transformers' GenerationConfig; the defaults are those of the command line."""

    max_new_tokens: int = 256
    temperature: float = 0.8  # 0: the most likely token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0


def draw(logits: Tensor, key: Key, place: int, how: Sampling) -> int:
    """One token of [vocab] logits."""
    if how.temperature == 0:
        return int(logits.argmax())
    ordered, tokens = logits.double().div(how.temperature).sort(descending=True, stable=True)
    if how.top_k:
        ordered = ordered[: how.top_k]
    weights = torch.softmax(ordered, -1)
    sums = weights.cumsum(-1)
    if how.top_p < 1:
        sums = sums[: int((sums - weights < how.top_p).sum())]
    point = rng.uniform(key, torch.tensor([place], device=logits.device)).double() * sums[-1]
    return int(tokens[int(torch.searchsorted(sums, point).clamp(max=len(sums) - 1))])


@torch.no_grad()
def write_rows(
    following: Callable[[], Callable[[Tensor], Tensor]], prompts: Sequence[Sequence[int]], end: int, how: Sampling,
    samples: Sequence[int], room: int, mesh: Mesh,
) -> list[list[int]]:  # fmt: skip
    """What follows each prompt, until the token `end`, which is a part of it, or until a row has `room` tokens. What
    `following` makes is given the rows' tokens bit by bit, and gives the logits behind them, [b, vocab], on all ranks.
    All ranks call the model equally often, as ZeRO 3 needs; those of a tp or cp group have the same rows."""
    keys = [rng.key(how.seed, "generate", sample) for sample in samples]
    stops = [max(len(prompt) + 1, min(len(prompt) + how.max_new_tokens, room)) for prompt in prompts]
    text = torch.zeros(len(prompts), max(stops), dtype=torch.long, device=mesh.device)
    for row, prompt in zip(text, prompts, strict=True):
        row[: len(prompt)] = row.new_tensor(prompt)
    logits, done, at, ended = following(), 0, min(map(len, prompts)), [0] * len(prompts)
    while raw.all_max(torch.tensor([float(0 in ended)], device=mesh.device), mesh.group("world")).item():
        if done == at:  # all rows of this rank have ended, and others call the model
            following()(text[:, :1])
            continue
        last, done = logits(text[:, done:at]), at
        for row, prompt in enumerate(prompts):  # prompts of other lengths: a longer one is read on
            if at >= len(prompt) and not ended[row]:
                text[row, at] = draw(last[row], keys[row], at - len(prompt), how)
                ended[row] = at + 1 if at + 1 == stops[row] or text[row, at] == end else 0
        at = min(at + 1, text.shape[1])
    return [text[row, len(prompt) : ended[row]].tolist() for row, prompt in enumerate(prompts)]
