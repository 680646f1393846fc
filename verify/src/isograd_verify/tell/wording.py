"""Words that every check uses: ranks spelled out, the axis along which they lie, and what a factor may come from."""

from __future__ import annotations

from collections.abc import Iterable

from isograd_verify import tolerances
from isograd_verify.record.axes import AXES, FOLDED, Axes
from isograd_verify.record.events import Collective, Key, Step, micro_of, use_of
from isograd_verify.record.recording import Recording
from isograd_verify.tell.catalogue import TWICE
from isograd_verify.tell.findings import NOTE, Finding


def left_out(recording: Recording) -> list[Finding]:
    """What was beyond the limit of a rank's file, as a note: it was judged by sketches, or not at all."""
    steps = [(record.rank, event) for record in recording.ranks for event in record.of(Step) if event.left_out]
    for rank, event in steps[:1]:
        what = ", ".join(f"{count} {kind}" for kind, count in event.left_out.items() if kind != "limit")
        sentence = (
            f"step {event.step}, rank {rank}: {what} were left out of the recording, which holds "
            f"{event.left_out['limit'] / 2**20:g} MiB per rank and step; gradients are judged by their sketches instead"
        )
        return [Finding(NOTE, "", sentence)]
    return []


def spell(ranks: tuple[int, ...] | list[int]) -> str:
    """'rank 2', 'ranks 0, 3' or 'ranks 0-3'."""
    ranks = sorted(ranks)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def axis_over(recording: Recording, ranks: tuple[int, ...], own: int | None = None) -> str:
    """The axis along which these ranks lie, seen from `own` (else the first): 'tp'; 'ranks 0, 1' without a layout."""
    own = min(ranks) if own is None else own
    others = set(ranks) - {own}
    text = str(recording.about.get("layout", ""))
    if text and others:
        layout = Axes.parse(text, recording.world)
        axes: tuple[str, ...] = ("dp", "cp", "tp", "pp", "dp cp", *(FOLDED if layout.size("ep") > 1 else ()))
        lines = {axis: layout.ranks(axis, own) - {own} for axis in axes}
        for axis, along in lines.items():
            if others == along:
                return axis
        for axis, along in lines.items():
            if along and (others <= along or (along <= others and len(along) + 1 < layout.world_size)):
                return axis
    return spell(tuple({own, *others}))


def spread(values: Iterable[float]) -> float:
    """The range of some numbers relative to the largest."""
    values = list(values)
    top = max(map(abs, values), default=0.0)
    return (max(values) - min(values)) / top if top else 0.0


def labelled(found: dict[Key, float]) -> tuple[tuple[str, float], ...]:
    """Coefficients with their names, for bars; micro-batches and ranks that are alike are one."""
    ranks, micros = {k for k, _ in found}, {m for _, m in found}
    several = len(micros) > 1
    if several and all(equal(c for (k, _), c in found.items() if k == rank) for rank in ranks):
        found, several = {(k, 0): c for (k, _), c in found.items()}, False
    elif several and len(ranks) > 1 and all(equal(c for (_, j), c in found.items() if j == m) for m in micros):
        return tuple((_micro(m), c) for m, c in sorted({m: c for (_, m), c in found.items()}.items()))
    return tuple((f"rank {k}, {_micro(m)}" if several else f"rank {k}", c) for (k, m), c in sorted(found.items()))


def equal(values: Iterable[float]) -> bool:
    """Whether numbers are one number, to the precision of a factor."""
    return spread(values) <= tolerances.FACTOR


def _micro(m: int) -> str:
    use, micro = use_of(m), micro_of(m)
    return f"micro-batch {micro}, use {use + 1}" if use else f"micro-batch {micro}"


def group_sizes(recording: Recording) -> set[int]:
    """The sizes of all groups that collectives ran over, and of the world."""
    found = {len(event.group) for record in recording.ranks for event in record.of(Collective)} - {0, 1}
    return found | {recording.world}


def meanings(recording: Recording, micros: int, factor: float) -> dict[str, str]:
    """What a factor may have come from, by axis: {'tp': 'the size of tp', 'micro-batches': '1 / their number'}."""
    text = str(recording.about.get("layout", ""))
    sizes = {"micro-batches": (micros, "the number of micro-batches")}
    if text:
        layout = Axes.parse(text, recording.world)
        sizes |= {axis: (layout.size(axis), f"the size of {axis}") for axis in (*AXES, "ep")}
        sizes["all ranks"] = (layout.world_size, "the number of ranks")
    else:
        groups = {e.group for record in recording.ranks for e in record.of(Collective)}
        for group in sorted(groups | {tuple(range(recording.world))}, reverse=True):  # of equal sizes the first is kept
            sizes = {axis: one for axis, one in sizes.items() if axis == "micro-batches" or one[0] != len(group)}
            sizes[spell(group)] = (len(group), f"the size of the group of {spell(group)}")
    found: dict[str, str] = {}
    for axis, (size, words) in sizes.items():
        if size < 2 or (axis == "all ranks" and set(found) - {"micro-batches"}):
            continue
        for value, spelled in ((size, words), (1 / size, f"1 / {words}")):
            if abs(factor - value) <= tolerances.FACTOR * value:
                found[axis] = spelled
    if not found:
        for axis, (size, words) in sizes.items():
            if size > 1 and axis != "micro-batches" and abs(factor * size**2 - 1) <= tolerances.FACTOR:
                return {TWICE: f"1 / {words}, twice"}
    return found
