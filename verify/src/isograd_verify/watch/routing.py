"""What was chosen for each token, kept for a comparison; and another run's choices in place of the program's own, where
scores are the same to rounding (docs/verify.md, where rounding decides between experts).
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd_verify.record.choices import MOST_NUMBERS, Choices, counterpart, joined, read
from isograd_verify.record.events import Choice
from isograd_verify.record.recording import Recording
from isograd_verify.record.sketch import digest
from isograd_verify.watch import foreign
from isograd_verify.watch.recorder import Recorder


class Routing:
    """`replay`: a recording whose choices are taken."""

    def __init__(self, capture: Recorder, replay: Path | None) -> None:
        self.capture, self.keeps = capture, capture.parameters
        self.recording = None if replay is None else Recording(replay)
        self.known: dict[tuple[str, tuple[int, int]], Choices] = {}
        self.of = 0  # the step of the other run that `known` is from
        self.only: int | None = None  # the step of the other run to take, whatever step this is (feed.py)
        self.numbers = count()
        self.rows: Tensor | None = None  # what the module that was called last got: a row per token
        self.narrow = ""  # the precision of its products, under autocast
        self.inside = False  # isograd's own choice, which is made of others

    def called(self, args: Any) -> None:
        """A module is called."""
        first = args[0] if isinstance(args, tuple) and args else None
        if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 1:
            self.rows, kind = first.detach(), first.device.type
            # Asked here: below the dispatcher's own switches, where choices are seen, autocast is always off.
            on = torch.is_autocast_enabled(kind)
            self.narrow = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if on else ""

    def chosen(self, scores: Tensor, indices: Tensor, site: str) -> Tensor | None:
        """Notes a choice, in a model's forward or when that is computed once more; the indices to take instead."""
        c, phase = self.capture, self.capture.phase()
        if phase not in ("forward", "backward") or not indices.numel():
            return None
        again = phase == "backward"
        micro = max(c.micro + (0 if again else 1), 0)
        c.event(Choice(c.step, micro, site=site, hash=digest(indices.sort(-1).values), again=again))
        some = scores.dim() > 1 and 0 < indices.shape[-1] < scores.shape[-1] <= MOST_NUMBERS
        if self.inside or not some or not scores.is_floating_point():
            return None
        if not self.keeps and self.recording is None:
            return None
        scores, indices = foreign.local(scores), foreign.local(indices)
        given = None if self.rows is None else foreign.local(self.rows)
        given = None if given is None or given[..., :1].numel() != scores[..., :1].numel() else given
        mine = Choices.of(c.stack[-1] if c.stack else "", given, scores, indices, self.narrow)
        if self.keeps and not again:
            c.keep(mine.path(micro, next(self.numbers)), mine.tensor())
        if self.recording is None:
            return None
        step = self.only or c.step
        if step != self.of:
            ranks = self.recording.ranks
            self.of, self.known = step, {}
            if step in self.recording.steps:
                self.known = joined(one for record in ranks for one in read(record.tensors(step)))
                for record in ranks:
                    record.forget(step)
        known = counterpart(self.known, mine)
        if known is None:
            return None
        rows = mine.find(known)
        taken = mine.same_scores(known, rows) & ~mine.same_choice(known, rows)
        if not bool(taken.any()):
            return None
        chosen = known.indices[rows.clamp(min=0)].where(taken[:, None], mine.indices)
        return chosen.view(indices.shape).to(indices)
