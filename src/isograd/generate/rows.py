"""Several texts written at once, as the rows of a batch: by one device, and by a model that is cut over ranks.

A row's tokens stand at the places that they have alone: nothing is filled up. The rows are read together as far as the
shortest prompt goes, and then token by token; a longer prompt is read on while the others are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.core import rng
from isograd.core.mesh import Mesh
from isograd.generate.sampling import Sampling, draw


@torch.no_grad()
def drawn_rows(
    following: Callable[[], Callable[[Tensor], Tensor]], prompts: Sequence[Sequence[int]], ends: Collection[int],
    how: Sampling, samples: Sequence[int], room: int, mesh: Mesh,
) -> Iterator[list[int | None]]:  # fmt: skip
    """What follows each prompt: at each place a token of each row, None of those that are read or have ended. A row
    ends with a token of `ends`, or with `room` tokens. What `following` makes is given all rows' tokens bit by bit, and
    gives the logits behind them, [b, vocab]. All ranks call it equally often, as ZeRO 3 needs; those of a tp or cp
    group have the same rows."""
    keys = [rng.key(how.seed, "generate", sample) for sample in samples]
    stops = [max(len(prompt) + 1, min(len(prompt) + how.max_new_tokens, room)) for prompt in prompts]
    text = torch.zeros(len(prompts), max(stops), dtype=torch.long, device=mesh.device)
    for row, prompt in zip(text, prompts, strict=True):
        row[: len(prompt)] = row.new_tensor(prompt)
    model, done, at, open_rows = following(), 0, min(map(len, prompts)), set(range(len(prompts)))
    while raw.all_max(torch.tensor([float(bool(open_rows))], device=mesh.device), mesh.group("world")).item():
        if not open_rows:  # of this rank, and others call the model
            following()(text[:, :1])
            continue
        last, done = model(text[:, done:at]), at
        drawn: list[int | None] = [None] * len(prompts)
        for row in [row for row in open_rows if at >= len(prompts[row])]:
            drawn[row] = token = draw(last[row], keys[row], at - len(prompts[row]), how)
            text[row, at] = token
            open_rows -= {row} if token in ends or at + 1 == stops[row] else set()
        yield drawn
        at += 1


def write_rows(prompts: Sequence[Sequence[int]], rows: Iterator[list[int | None]]) -> list[list[int]]:
    """The tokens of each row of `drawn_rows`."""
    found: list[list[int]] = [[] for _ in prompts]
    for drawn in rows:
        for row, token in enumerate(drawn):
            found[row] += [] if token is None else [token]
    return found
