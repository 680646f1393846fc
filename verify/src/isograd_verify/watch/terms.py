"""Sees of which terms a loss is made, and with which weight each of them counts: labels, a balance loss, a z-loss.

A term is a number that was made of many numbers. The graph is walked from the loss down to the terms, and the gradient
that reaches a number on the way is the weight with which it counts: value x weight is a term's share in the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from isograd_verify.record.events import LossTerm
from isograd_verify.watch.recorder import Recorder

ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Clone", "Alias", "View", "Squeeze", "_DDPSink")
ADDS = ("Add", "Sub")
MARK = "isograd.term"  # in a node's metadata
SCALED = "isograd.scaled"  # in that of what a gradient scaler has made
MOST = 64  # numbers between a loss and its terms

Edge = tuple[Any, int]  # a node of the graph, and which of its outputs
Way = tuple[Edge, ...]  # the numbers from a loss down to a term


class TermTracker:
    """The numbers of a forward that may be terms, until backward begins."""

    def __init__(self, capture: Recorder) -> None:
        self.capture = capture
        # Numbers that operators have made of many, with the line; not yet in the graph: that follows the operator.
        self.fresh: list[tuple[Tensor, str]] = []

    def note_fresh(self) -> None:
        """One operator later: the node that made a number keeps its value and its place."""
        fresh, self.fresh = self.fresh, []
        for number, site in fresh:
            if number.grad_fn is not None:
                marks: Any = number.grad_fn.metadata
                marks[MARK] = (site, number.detach())

    def begin(self, roots: list[Tensor]) -> None:
        """A backward begins with these."""
        self.note_fresh()
        for root in roots:
            if root.numel() == 1 and root.grad_fn is not None:
                ways = list(_ways(root.grad_fn))
                if len(ways) < MOST:
                    self._watch(ways)

    def _watch(self, ways: list[Way]) -> None:
        weights: dict[Edge, float] = {}
        watched: set[Any] = set()

        def arrives(node: Any, gradients: tuple[Tensor | None, ...]) -> None:
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    weights[node, index] = float(gradient)
            for way in ways:
                if way[-1][0] is node:
                    self._tell(way, weights)

        for way in ways:
            for node, _ in way:
                if node not in watched:
                    watched.add(node)
                    node.register_prehook(partial(self.capture.guarded(arrives, "terms"), node))

    def _tell(self, way: Way, weights: dict[Edge, float]) -> None:
        site, value = way[-1][0].metadata.get(MARK, ("", None))
        chain = [edge for edge in reversed(way) if edge in weights]
        joined = next((i for i, (node, _) in enumerate(chain) if i and _kind(node) in ADDS), -1)
        if value is not None and chain and chain[0] == way[-1]:
            weighed = tuple(weights[edge] for edge in chain)
            c = self.capture
            c.event(LossTerm(*c.now, site=site, value=float(value), weights=weighed, joined=joined))


def _ways(root: Any) -> Iterator[Way]:
    """One to each term."""
    seen: set[Edge] = set()
    open_ways: list[Way] = [((root, 0),)]
    while open_ways and len(seen) < 4 * MOST:
        way = open_ways.pop()
        if way[-1] in seen:
            continue
        seen.add(way[-1])
        inside = _into(way[-1])
        if inside and MARK not in way[-1][0].metadata:
            open_ways += [(*way, edge) for edge in inside]
        elif type(way[-1][0]).__name__ != "AccumulateGrad":
            yield way


def _into(edge: Edge) -> list[Edge]:
    """The numbers of which arithmetic made this one; none of a term."""
    node, index = edge
    kind = _kind(node)
    if not kind:
        return []
    following = [following for following in node.next_functions if following[0] is not None]
    if kind == "_DDPSink":
        return [following[index]] if index < len(following) == len(node.next_functions) else []
    return following if kind in ADDS or len(following) == 1 else []


def _kind(node: Any) -> str:
    name = type(node).__name__
    return next((kind for kind in ARITHMETIC if name in (f"{kind}Backward{i}" for i in ("", 0, 1, 2))), "")


def scaled(roots: list[Tensor]) -> int:
    """1 where a backward begins with what a gradient scaler has made, -1 with another number, 0 with anything else."""
    edges: list[Edge] = [(root.grad_fn, 0) for root in roots if root.grad_fn is not None and root.numel() == 1]
    found = -1 if edges and len(edges) == len(roots) else 0
    for edge in edges:  # which grows
        if SCALED in edge[0].metadata:
            return 1
        edges += _into(edge) if len(edges) < MOST else []
    return found
