"""Did two runs see the same data in their first step? What the models were given, and the labels of their losses.

Pieces are added up over ranks and micro-batches, ranks that share sequences count as copies, and elements that one run
has more of, all with one value that stands at the ends of rows, are padding.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import torch

from isograd_verify.errors import VerifyError
from isograd_verify.record.events import ForwardInputs, LabelWeight, PipelineActions
from isograd_verify.record.recording import Recording
from isograd_verify.record.sketch import content_hash
from isograd_verify.tell.findings import BUG, NOTE, Finding, listed
from isograd_verify.tell.wording import axis_over

LABELS = "labels of the loss"
MADE_BY_LAYOUTS = re.compile(r"mask|position|cu_seq|seq_?len|lengths?$|max_|num_items|cache", re.IGNORECASE)
USUAL_FILLERS = (0, 1, -100)


@dataclass
class Content:
    """What all ranks and micro-batches of a run were given under one name."""

    total: int = 0  # of their hashes, mod 2**64
    count: int = 0  # of their elements
    rows: int = 0  # of their sequences
    hashes: set[str] = field(default_factory=set)
    dtypes: set[str] = field(default_factory=set)
    fillers: set[int] = field(default_factory=set)

    def add(self, hashed: str, count: int, dtype: str, fillers: tuple[str, ...] = (), rows: int = 0) -> None:
        """Adds one tensor that a rank was given."""
        self.total = (self.total + int(hashed)) % 2**64
        self.count += count
        self.rows += rows
        self.hashes.add(hashed)
        self.dtypes.add(dtype)
        self.fillers |= {int(h) for h in fillers}


def contents(recording: Recording, reached: bool = False) -> dict[str, Content]:
    """By name, as they came; single numbers are no data. `reached`: only of calls that a backward has reached."""
    found: dict[str, Content] = {}
    for record in recording.ranks:
        for event in record.of(ForwardInputs, 1):
            for name, one in event.tensors.items() if event.reached or not reached else ():
                if one.shape:
                    size = math.prod(one.shape)
                    found.setdefault(name, Content()).add(one.hash, size, one.dtype, one.fillers, one.shape[0])
    for record in recording.ranks:
        seen = set()
        for weight in record.of(LabelWeight, 1):
            call = (weight.micro, weight.site, weight.labels, weight.low, weight.high)
            if weight.labels and not (reached and call in seen):  # a schedule calls the loss once more, for shapes
                found.setdefault(LABELS, Content()).add(weight.labels, int(weight.count), "int64")
            seen.add(call)
    return found


def same_data(reference: Recording, candidate: Recording) -> list[Finding]:
    """Refuses to compare runs that saw different data. Calls without a backward count if the runs agree with them."""
    first: VerifyError | None = None
    for only in ((False, False), (False, True), (True, True), (True, False)):
        theirs, ours = (contents(run, reached) for run, reached in zip((reference, candidate), only, strict=True))
        if any(only) and not (theirs and ours):
            continue
        try:
            return _agreed(theirs, ours, reference, candidate)
        except VerifyError as error:
            first = first or error
    assert first is not None
    raise first


def _agreed(
    theirs: dict[str, Content], ours: dict[str, Content], reference: Recording, candidate: Recording
) -> list[Finding]:
    pairs = {name: name for name in theirs if name in ours}
    first, second = (next((n for n in found if n != LABELS), "") for found in (theirs, ours))
    if first and second and first not in ours and second not in theirs:
        pairs = {first: second, **pairs}  # two programs, two names: what is given first is what is looked at first
    different: list[tuple[str, Content, Content]] = []
    said: list[str] = []
    for name, other in pairs.items():
        a, b = theirs[name], ours[other]
        spelled = name if name == other else f"{name} (here {other})"
        if _floats(a) and _floats(b) and a.dtypes != b.dtypes:
            said.append(f"{spelled}: in {_kinds(a)} there and in {_kinds(b)} here, so they cannot be compared")
            continue
        extra = _extra(a, b, _copies(reference), _copies(candidate))
        if extra is None and MADE_BY_LAYOUTS.search(name):
            said.append(f"{spelled}: differs between the runs, as what a layout makes for itself may")
        elif extra is None:
            different.append((spelled, a, b))
        elif extra:
            where = "here" if extra > 0 else "there"
            said.append(f"{spelled}: the same but for padding ({abs(extra)} elements more {where})")
    notes = [Finding(NOTE, "", f"data: {sentence}") for sentence in said]
    lost = lost_at_borders(theirs, ours, pairs, candidate.world) if len(different) == 1 else 0
    if lost and different[0][0] == LABELS:
        count, ranks = theirs[LABELS].count, tuple(range(candidate.world))
        sentence = f"{lost} of {count} labels never reach the loss, one or none at each place where a sequence is cut"
        axis = axis_over(candidate, ranks)
        return [Finding(BUG, "border-labels-lost", sentence, axis=axis), *notes]
    if different:
        names, (_, a, b) = [name for name, _, _ in different], different[0]
        raise VerifyError(
            "IG722",
            "the two runs saw different data in their first step",
            seen=f"{listed(names)}: hashes {a.total:016x} of {a.count} elements and {b.total:016x} of {b.count}",
            expected="the same elements, however they are spread over ranks and micro-batches",
            fix="use the same seed, order and batch; pad in the same way; --ignore-data compares anyway",
        )
    return notes


def _copies(recording: Recording) -> int:
    """How often a run may see a sample: once on each rank, and there once for each stage of a pipeline."""
    pipelines = [event for rank in recording.ranks for event in rank.of(PipelineActions, 1)]
    stages = [len({stage for _, stage, *_ in event.actions}) for event in pipelines]
    return recording.world * max(stages, default=1)


def lost_at_borders(theirs: dict[str, Content], ours: dict[str, Content], pairs: dict[str, str], world: int) -> int:
    """How many labels we lack, when all else is the same and every cut of a sequence can have cost one; else 0."""
    first = next((name for name in pairs if name != LABELS), "")
    if not first or LABELS not in theirs or LABELS not in ours:
        return 0
    a, b, tokens = theirs[LABELS], ours[LABELS], theirs[first]
    copies, odd = divmod(ours[pairs[first]].count, tokens.count)
    lost = 0 if odd or not copies or b.count % copies else a.count - b.count // copies
    return lost if 0 < lost <= tokens.rows * (world - 1) else 0


def _extra(a: Content, b: Content, most_a: int, most_b: int) -> int | None:
    """How many elements of padding `b` has more than `a`; None when they are not the same data."""
    if a.hashes == b.hashes and len(a.hashes) == 1:
        return 0  # the same at every call of both: a table, say
    usual = {content_hash(torch.tensor([value])) for value in USUAL_FILLERS}
    fillers = a.fillers | b.fillers | usual | {content_hash(torch.tensor([float(v)])) for v in USUAL_FILLERS}
    padded = None
    for copies_a in range(1, most_a + 1):
        for copies_b in range(1, most_b + 1):
            apart = (b.total * copies_a - a.total * copies_b) % 2**64
            more = b.count * copies_a - a.count * copies_b
            if apart == 0 and more == 0:
                return 0
            if padded is None and more and any((more * h - apart) % 2**64 == 0 for h in fillers):
                padded = more
    return padded


def _floats(content: Content) -> bool:
    return any(d.startswith(("float", "bfloat")) for d in content.dtypes)


def _kinds(content: Content) -> str:
    return " and ".join(sorted(content.dtypes))
