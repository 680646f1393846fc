"""Checks of experts' routing: the bias of the choice moves once a step, and a forward that is computed once more
chooses as it did before."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.events import Changed, Choice
from isograd_verify.tell.findings import BUG, Finding, listed

BIAS = re.compile(r"(expert|choice|router|gate|score|correction)s?_(\w+_)*bias$")
COUNT = re.compile(r"expert|router|(^|[._])(moe|chosen|load|tokens_per)([._]|$)")


def choice_bias(analysis: Analysis) -> Iterator[Finding]:
    """The bias of the choice of experts is the same in all micro-batches of a step."""
    moved: dict[str, set[int]] = defaultdict(set)
    between: set[str] = set()
    for _, event, name in _changes(analysis, BIAS):
        moved[name].add(event.micro)
        between |= {name} if event.during == "between" else set()
    names = tuple(sorted(name for name, micros in moved.items() if len(micros) > 1 or name in between))
    if names:
        sentence = (
            f"step {analysis.step}: {listed(names)} changes between the micro-batches of a step: later ones are routed "
            "by another bias, and how they are cut decides what it becomes"
        )
        yield Finding(BUG, "bias-per-micro", sentence, axis="micro-batches")


def counted_once(analysis: Analysis) -> Iterator[Finding]:
    """What a forward counts of experts' tokens is not counted again when backward computes it once more."""
    during: dict[str, dict[str, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
    for rank, event, name in _changes(analysis, COUNT):
        during[name][event.during].add((rank, event.micro))
    names = tuple(sorted(name for name, seen in during.items() if seen["forward"] & seen["backward"]))
    if names:
        sentence = (
            f"step {analysis.step}: {listed(names)} changes in a forward, and again in its backward, "
            "which computes that forward once more: tokens are counted twice"
        )
        yield Finding(BUG, "bias-twice", sentence)


def _changes(analysis: Analysis, buffers: re.Pattern[str]) -> Iterator[tuple[int, Changed, str]]:
    for record in analysis.recording.ranks:
        for event in record.of(Changed, analysis.step):
            yield from ((record.rank, event, name) for name in event.names if buffers.search(name))


def same_choice(analysis: Analysis) -> Iterator[Finding]:
    """A choice that is made again in backward is one that was made in the forward."""
    places: dict[str, int] = defaultdict(int)
    for record in analysis.recording.ranks:
        events = record.of(Choice, analysis.step)
        forward = {(event.site, event.hash) for event in events if not event.again}
        for event in events:
            if event.again and any(site == event.site for site, _ in forward):
                places[event.site] += (event.site, event.hash) not in forward
    flipped = {site: count for site, count in places.items() if count}
    if flipped:
        told = ", ".join(f"{count} times at {site}" for site, count in flipped.items())
        sentence = (
            f"step {analysis.step}: a forward that backward computes once more chooses otherwise than it did before "
            f"({told}): gradients belong to other experts than the outputs"
        )
        yield Finding(BUG, "recompute-flip", sentence)
