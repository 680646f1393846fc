"""What the verifier says: findings with a verdict, gathered by subject (one layout, or one watched run)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from isograd_verify.tell.catalogue import BUGS

PASS, BUG, INCONCLUSIVE, NOTE = "PASS", "BUG", "INCONCLUSIVE", "NOTE"
UNNAMED = "unnamed"  # the code of findings that fit no known bug
EXIT = {PASS: 0, INCONCLUSIVE: 4, BUG: 3}  # the worst last


@dataclass(frozen=True)
class Finding:
    """One thing found, as a sentence with its evidence. A bug of the catalogue has its usual cause and place."""

    verdict: str
    bug: str  # id in docs/bugs.md, "" when the symptom fits none
    sentence: str  # what, which tensors, which axis, how much
    tensors: tuple[str, ...] = ()
    axis: str = ""  # "tp", "ranks 0-1", "micro-batches"
    coefficients: tuple[tuple[str, float], ...] = ()  # ("rank 1, micro-batch 0", 0.0): all should be equal
    cause: str = ""  # what usually causes it
    look: str = ""  # where to look
    site: str = ""  # 'train.py:33 in step': the line of the program that it is about, or its backward's

    def __post_init__(self) -> None:
        if self.bug and not (self.cause or self.look):
            object.__setattr__(self, "cause", BUGS[self.bug].cause)
            object.__setattr__(self, "look", BUGS[self.bug].look)


@dataclass
class Subject:
    """One layout compared with a reference, or one run that was only watched."""

    name: str
    world: int
    compared: bool = False  # against a reference; else only checked for consistency
    findings: list[Finding] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)  # tensor -> worst relative error over ranks and blocks
    by_rank: dict[str, list[float | None]] = field(default_factory=dict)  # tensor -> error on each rank that holds it
    timeline: list[list[dict[str, Any]]] = field(default_factory=list)  # per rank: op, group, bytes, start, ...
    facts: dict[str, str] = field(default_factory=dict)  # "loss" -> "equal to 3e-16", "overhead" -> "12 %"
    uncompared: dict[str, str] = field(default_factory=dict)  # gradients without a comparison -> why
    schedule: dict[str, str] = field(default_factory=dict)  # of a pipeline, as measured: "text" and "svg"

    @property
    def verdict(self) -> str:
        """BUG if any finding is one, else INCONCLUSIVE if any is, else PASS."""
        return worst(finding.verdict for finding in self.findings)

    def partial(self) -> list[Finding]:
        """The first line of a comparison that is not whole: how many gradients it is about, and which it is not."""
        if not self.uncompared:
            return []
        whys = dict.fromkeys(self.uncompared.values())
        named = [f"{listed([n for n, w in self.uncompared.items() if w == why])}: {why}" for why in whys]
        total = len(self.errors.keys() | self.uncompared.keys())
        count = total - len(self.uncompared)
        sentence = f"only {count} of {total} gradients were compared; not compared: {'; '.join(named)}"
        return [Finding(INCONCLUSIVE, "", sentence, tensors=tuple(self.uncompared))]

    def verdict_of(self, tensor: str) -> str:
        """The verdict of the findings that name a tensor."""
        return worst(f.verdict for f in self.findings if tensor in f.tensors)

    def classes(self) -> dict[str, tuple[float, str, str]]:
        """Kind of parameter ('blocks.*.norm1.weight') -> (worst error, the tensor that has it, worst verdict)."""
        found: dict[str, tuple[float, str, str]] = {}
        for tensor, error in self.errors.items():
            known = found.get(kind(tensor), (-1.0, "", PASS))
            size = math.inf if math.isnan(error) else error
            largest = (error, tensor) if size > known[0] else known[:2]
            found[kind(tensor)] = (*largest, worst((self.verdict_of(tensor), known[2])))
        return found


def worst(verdicts: Iterable[str]) -> str:
    """BUG if any is one, else INCONCLUSIVE if any is, else PASS."""
    return max((v for v in verdicts if v != NOTE), key=list(EXIT).index, default=PASS)


PLACE = re.compile(r"([\w./-]+\.py):(\d+)")


def place(found: Finding) -> tuple[str, int] | None:
    """(file, line) that a finding is about; None where nothing tells it."""
    spot = PLACE.search(found.site)
    return (spot[1], int(spot[2])) if spot else None


def kind(tensor: str) -> str:
    """'blocks.3.norm1.weight' -> 'blocks.*.norm1.weight'."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", tensor)


def listed(names: tuple[str, ...] | list[str], most: int = 3) -> str:
    """'a, b, c and 4 more'."""
    names = list(names)
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
