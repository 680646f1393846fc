"""Tensors of recordings, whole or by sketches (record/sketch.py), and the one form in which two can be compared.

A rank that holds some rows (or columns) of a tensor is compared with those of the reference, each by its own sums. Of a
part that is cut in several dimensions, or inside of rows, the parts of all ranks are added up first.

Which part a rank holds is told by its declared box, else by values: before the first step both runs hold the same
weights, so each local row (or column) is found among the reference's. Tensors that are constant (biases of zeros)
follow the weight of the same module, then their shape alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import overload

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.events import Key, Parameter
from isograd_verify.record.sketch import COUNT, Projected, project, project_row, sketch

Value = Tensor | Projected


@dataclass(frozen=True)
class Place:
    """Indices along the dimensions that are cut, or [start, stop] of elements in a row; else all of a whole."""

    cuts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    row: tuple[int, int] | None = None

    @overload
    def of(self, whole: Tensor) -> Tensor: ...
    @overload
    def of(self, whole: Value) -> Value: ...

    def of(self, whole: Value) -> Value:
        """This part of a whole tensor."""
        if isinstance(whole, Projected):
            if self.row is not None or len(self.cuts) > 1:
                return Projected(whole.shape, {})  # its sums tell of all of it, or of one cut
            return whole.select(*self.cuts[0]) if self.cuts else whole
        if self.row is not None:
            return whole.reshape(-1)[slice(*self.row)]
        for dim, indices in self.cuts:
            whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.long))
        return whole


def projected(value: Value) -> Projected:
    """A tensor as a recording by sketches would tell it."""
    return value if isinstance(value, Projected) else project(value)


def place(local: Value, whole: Value, info: Parameter, index: int, holders: int) -> Place | None:
    """None when it cannot be told. `index` of `holders`: the rank's place among those that hold the name."""
    if info.box is not None and info.whole == tuple(whole.shape):
        if info.in_a_row:
            return Place(row=info.box[0])
        cuts = [(d, tuple(range(a, b))) for d, (a, b) in enumerate(info.box) if (a, b) != (0, whole.shape[d])]
        return Place(tuple(cuts))
    if tuple(local.shape) == tuple(whole.shape):
        return Place()
    if len(local.shape) != len(whole.shape):
        return None
    differing = [d for d in range(len(local.shape)) if local.shape[d] != whole.shape[d]]
    if len(differing) != 1:
        return None
    dim, even = differing[0], None
    size, of = local.shape[dim], whole.shape[dim]
    if size and of % size == 0:  # by shape alone; neighbours hold copies when there are more ranks than parts
        part = index * (of // size) // holders
        even = Place(((dim, tuple(range(part * size, (part + 1) * size))),))
    if isinstance(local, Projected) or isinstance(whole, Projected):
        local, whole = projected(local), projected(whole)
    flat = local.reshape(-1) if isinstance(local, Tensor) else torch.tensor([])
    constant = not bool((flat != flat[:1]).any()) if len(flat) else isinstance(local, Tensor) or info.constant
    if local.numel() and not constant:
        if even is not None and bool(_close(rows_of(local, dim), rows_of(even.of(whole), dim)).all()):
            return even  # equal rows elsewhere do not matter
        found = _match(rows_of(local, dim), rows_of(whole, dim))
        if found is not None:
            return None if -1 in found else Place(((dim, found),))
    return even


def rows_of(t: Value, dim: int) -> Tensor:
    """[size of a dimension, numbers of each]."""
    if isinstance(t, Projected):
        return t.along[dim].T
    return t.movedim(dim, 0).reshape(t.shape[dim], -1).double()


def _close(rows: Tensor, others: Tensor) -> Tensor:
    close: Tensor = (rows - others).norm(dim=-1) <= tolerances.STORED * rows.norm(dim=-1).clamp_min(1e-30)
    return close


def _match(rows: Tensor, among: Tensor) -> tuple[int, ...] | None:
    """For each row, which of `among` it is: of several equal ones the one beside its neighbour's, else -1."""
    if rows.shape[1] != among.shape[1] or rows.shape[0] > among.shape[0]:
        return None
    found = []
    for chunk in rows.split(64):
        near = torch.cdist(chunk, among) <= tolerances.STORED * chunk.norm(dim=1, keepdim=True).clamp_min(1e-30)
        if not bool(near.any(1).all()):
            return None
        found += torch.where(near.sum(1) == 1, near.int().argmax(1), -1).tolist()
    for turn, order in ((1, range(1, len(found))), (-1, range(len(found) - 2, -1, -1))):
        for i in order:
            beside = found[i - turn] + turn
            known = found[i] == -1 and found[i - turn] != -1 and 0 <= beside < len(among)
            if known and bool(_close(rows[i], among[beside])):
                found[i] = beside
    return tuple(found)


def of_rank(analysis: Analysis, rank: int, kind: str, name: str) -> Value | None:
    """What a rank's file has of a parameter ('parameter', 'after') or its gradient ('final'), whole or by sketches."""
    tensors = analysis.recording.ranks[rank].tensors(analysis.step)
    if f"{kind}/{name}" in tensors:
        return tensors[f"{kind}/{name}"]
    paths = takewhile(tensors.__contains__, (f"along/{kind}/{d}/{name}" for d in count()))
    found = {d: tensors[path].double() for d, path in enumerate(paths)}
    return Projected(tuple(t.shape[1] for t in found.values()), found) if found else None


def whole_values(analysis: Analysis, kind: str) -> dict[str, Value]:
    """Full tensors of a reference that ran on one device, or whose shards say where they sit."""
    found: dict[str, Value] = {}
    for name in analysis.names:
        infos = {r: analysis.about[r][name] for r in analysis.holders(name)}
        parts = {r: of_rank(analysis, r, kind, name) for r in infos}
        first = next(iter(infos))
        start = parts[first]
        if start is None:
            continue
        if all(i.box is None for i in infos.values()) or infos[first].shape == infos[first].whole:
            flat = analysis.sums[first].get(name) if kind == "final" and analysis.world == 1 else None
            found[name] = Projected(start.shape, start.along, flat) if isinstance(start, Projected) else start
            continue
        held_by = {r: part for r, part in parts.items() if part is not None and infos[r].box is not None}
        if any(isinstance(part, Projected) for part in held_by.values()):
            whole = _joined(infos, held_by)
            if whole is not None:
                found[name] = whole
            continue
        tensor = torch.zeros(infos[first].whole, dtype=start.dtype)  # type: ignore[union-attr]
        for rank, part in held_by.items():
            into = tensor.view(-1) if infos[rank].in_a_row else tensor
            into[tuple(slice(a, b) for a, b in infos[rank].box or ())] = part  # type: ignore[assignment]
        found[name] = tensor
    return found


def _joined(infos: dict[int, Parameter], parts: dict[int, Value], own: int | None = None) -> Projected | None:
    """The sums of the whole from its parts', each box once, of equal ones `own`'s; None when some part is missing."""
    boxes: dict[str, int] = {}
    for rank in sorted(parts, key=lambda r: r != own):
        boxes.setdefault(repr(infos[rank].box), rank)
    whole = next(iter(infos.values())).whole
    elements = sum(math.prod(b - a for a, b in infos[rank].box or ()) for rank in boxes.values())
    if elements != math.prod(whole):
        return None
    along = {d: torch.zeros(COUNT, size, dtype=torch.float64) for d, size in enumerate(whole)}
    for rank in boxes.values():
        info, part = infos[rank], parts[rank]
        box = info.box or ()
        if isinstance(part, Tensor):
            starts = tuple(start for start, _ in box)
            part = project_row(part, whole, *starts) if info.in_a_row else project(part, starts)
        for d, sums in part.along.items():
            span = slice(None) if info.in_a_row else slice(*box[d])
            along[d][:, span] += sums
    return Projected(whole, along)


def sides(
    analysis: Analysis, rank: int, kind: str, name: str, truth: Value, spot: Place
) -> tuple[Value | None, Value | None]:
    """(what a rank holds, what it should hold), both in one form; None for what is not there."""
    found = of_rank(analysis, rank, kind, name)
    if found is None:
        return None, spot.of(truth)
    if tuple(found.shape) == tuple(truth.shape) and not analysis.about[rank][name].in_a_row:
        spot = Place()  # an engine gave the whole to every rank
    if isinstance(found, Tensor) and isinstance(truth, Tensor):
        part = spot.of(truth)
        return found, truth if found.shape != part.shape and found.numel() == truth.numel() else part
    if spot.row is None and len(spot.cuts) < 2:
        expected = projected(spot.of(truth))
        told = {dim for dim, _ in spot.cuts} or expected.along.keys()
        return projected(found), replace(expected, along={d: expected.along[d] for d in told})
    infos = {r: analysis.about[r][name] for r in analysis.holders(name)}
    pieces = {r: piece for r in infos if (piece := of_rank(analysis, r, kind, name)) is not None}
    return _joined(infos, pieces, rank), projected(truth)


def numbers(found: Value, expected: Value) -> tuple[Tensor, Tensor]:
    """Both as fp64 numbers in a row, whose differences are as large as the tensors'."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return found.double().flatten(), expected.double().flatten()
    ours, theirs = projected(found), projected(expected)
    both = ours.along.keys() & theirs.along.keys()
    return tuple(Projected(one.shape, {d: one.along[d] for d in both}).numbers for one in (ours, theirs))  # type: ignore[return-value]


def norm(value: Value) -> float:
    """About the Euclidean norm."""
    return float((value.double() if isinstance(value, Tensor) else value.numbers).norm())


def nothing(like: Value) -> Value:
    """Zeros in the place of a gradient that is not there."""
    return torch.zeros_like(like) if isinstance(like, Tensor) else like.minus(like)


def difference(one: Value, other: Value) -> Value:
    """One less the other, both in one form."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.double() - other.double()
    return projected(one).minus(projected(other))


def folded(value: Projected, dims: list[int]) -> Tensor:
    """A sketch of its sums: what a regression on contributions needs (watch/recorder.py keeps those of parts)."""
    return torch.cat([sketch(row) for d in dims for row in value.along[d]] or [torch.zeros(0)])


def contributions(analysis: Analysis, name: str, own: int, dims: list[int]) -> dict[Key, Tensor]:
    """What each backward added, as `folded` shows it along these dimensions; empty when some was not recorded so."""
    found = {}
    for rank, number in analysis.contributions(name, own):
        tensors = analysis.recording.ranks[rank].tensors(analysis.step)
        paths = [f"along/{number}/{d}/{name}" for d in dims]
        if not paths or not all(path in tensors for path in paths):
            return {}
        found[rank, number] = torch.cat([tensors[path].flatten() for path in paths])
    return found
