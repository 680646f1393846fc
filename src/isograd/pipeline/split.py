"""How many layers each stage holds: chosen so that the most expensive stage is as cheap as possible.

One device: all layers. Costs may have any unit: matrix elements per token from a config, or measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, permutations

from isograd.errors import PipelineError


def balanced(
    layers: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0, ranks: int | None = None
) -> tuple[int, ...]:
    """How many consecutive layers each stage gets, at least one: the most expensive stage is as cheap as possible.

    `first` and `last`: costs of the embedding and the head, added to the first and last stage. `ranks`: how many ranks
    share the stages; stage s is on rank s % ranks. With several stages per rank, the most expensive rank is minimised
    first, then the most expensive stage.
    """
    count = len(layers)
    if stages > count:
        raise PipelineError("IG806", seen=f"{stages} stages (pp x vpp), {count} layers", count=count, stages=stages)
    before = [0.0]
    for cost in layers:
        before.append(before[-1] + cost)

    def cost_of(stage: int, start: int, stop: int) -> float:
        return before[stop] - before[start] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    # best[n], of the first n layers: (the most expensive stage, the sum of squares to prefer even cuts, sizes)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        reached: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (dearest, squares, sizes) in best.items():
            for stop in range(start + 1, count - (stages - stage - 1) + 1):
                cost = cost_of(stage, start, stop)
                found = (max(dearest, cost), squares + cost * cost, (*sizes, stop - start))
                if stop not in reached or found < reached[stop]:
                    reached[stop] = found
        best = reached
    return best[count][2] if ranks in (None, stages) else _even_out(best[count][2], cost_of, ranks or stages)


def _even_out(sizes: tuple[int, ...], cost_of: Callable[[int, int, int], float], ranks: int) -> tuple[int, ...]:
    """Move one layer at a time from one stage to another while that makes the most expensive rank cheaper."""

    def dearness(sizes: tuple[int, ...]) -> tuple[float, float, float]:
        ends = [0, *accumulate(sizes)]
        costs = [cost_of(stage, *ends[stage : stage + 2]) for stage in range(len(sizes))]
        return max(sum(costs[rank::ranks]) for rank in range(ranks)), max(costs), sum(cost * cost for cost in costs)

    while True:
        moves = [
            tuple(size - (stage == source) + (stage == target) for stage, size in enumerate(sizes))
            for source, target in permutations(range(len(sizes)), 2)
            if sizes[source] > 1
        ]
        best = min([sizes, *moves], key=dearness)
        if best == sizes:
            return sizes
        sizes = best


def ranges(split: Sequence[int], stages: int, layers: int) -> tuple[range, ...]:
    """The layer numbers of each stage of a split, which must cover all layers; only the ends may be empty."""
    inner = split[1:-1]
    if len(split) != stages or sum(split) != layers or min(split) < 0 or 0 in inner:
        raise PipelineError(
            "IG807", seen=f"{tuple(split)}: {sum(split)} layers on {len(split)} stages", layers=layers, stages=stages
        )
    starts = [sum(split[:i]) for i in range(stages + 1)]
    return tuple(range(a, b) for a, b in pairwise(starts))
