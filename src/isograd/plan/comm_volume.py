"""Which bytes leave a rank in a step, by axes, as the engine sends them: in closed form.

A Transfer is one message or collective, with the bytes that leave this rank in it. costs.py gives it a time. The sums
over a step equal the record of a simulated rank, byte for byte, where rows and heads divide evenly
(tests/plan/test_comm_volume.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from isograd.core.layout import Layout
from isograd.plan.work import BlockKind, ParamsOnRank, Work, kinds_of, of_block, of_ends, params_on_rank
from isograd.sequence.token_layout import lay_out_tokens, visible_keys

SMALL_BYTES = 1 << 16  # comm/raw.py: a smaller all-reduce is one exchange of whole tensors


class Transfer(NamedTuple):
    """One message or collective of a rank."""

    axes: str
    kind: str  # "collective"; "exchange": to all others at once; "send": to one
    bytes: float  # that leave this rank


def reduced(axes: str, members: int, bytes: float) -> list[Transfer]:
    """An all-reduce: of small tensors in one exchange, else a reduce-scatter and a gather."""
    if members == 1 or not bytes:
        return []
    if members == 2 or bytes <= SMALL_BYTES:
        return [Transfer(axes, "collective", (members - 1) * bytes)]
    return [Transfer(axes, "collective", (members - 1) / members * bytes)] * 2


def cut(axes: str, members: int, bytes: float) -> list[Transfer]:
    """A gather of parts that make `bytes`, or a reduce-scatter of as much."""
    return [Transfer(axes, "collective", (members - 1) / members * bytes)] if members > 1 and bytes else []


def block(work: Work, layout: Layout, kind: BlockKind, cp_index: int) -> dict[str, list[Transfer]]:
    """What one block sends for one micro-batch in forward F, backward B, and when a forward is run again R."""
    tokens, hidden = work.tokens(layout), work.model.hidden
    whole = float(tokens * hidden * work.size)
    enter, leave = _around_cut(layout, whole)
    around = _attention(work, layout, tokens, cp_index, kind.window)
    routed = _routed(work, layout, tokens) if kind.sparse else []
    return {
        "F": [*(enter["F"] + leave["F"]) * 2, *around["F"], *routed],
        "B": [*(enter["B"] + leave["B"]) * 2, *around["B"], *routed],
        "R": [*enter["F"] * 2, *leave["F"], *around["F"], *routed],
    }


def _around_cut(layout: Layout, whole: float) -> tuple[dict[str, list[Transfer]], dict[str, list[Transfer]]]:
    """What enters a region that tp cuts, and what leaves it."""
    if layout.sp:
        both = dict.fromkeys("FB", cut("tp", layout.tp, whole))
        return both, both
    total = reduced("tp", layout.tp, whole)
    return {"F": [], "B": total}, {"F": total, "B": []}


def _attention(work: Work, layout: Layout, tokens: int, index: int, window: int | None) -> dict[str, list[Transfer]]:
    """Ulysses: two all-to-alls each way. A ring: keys and values, and in backward also their gradients, which are
    wide. Under a causal mask, later members are sent half a block; with a window, what some query of theirs sees."""
    found: dict[str, list[Transfer]] = {"F": [], "B": []}
    u, r, d = layout.ulysses, layout.ring, work.head_dim
    heads = work.model.heads / layout.tp
    kv = max(1.0, (work.model.kv_heads or work.model.heads) / layout.tp)
    if u > 1:
        packed = (u - 1) / u * tokens * d * work.size
        both = [Transfer(f"cp/{u}", "exchange", packed * n) for n in (heads + 2 * max(kv, u), heads)]
        found = {"F": both, "B": both}
    if r > 1:
        keys = tokens * u * 2 * max(1.0, kv / u) * d * work.size
        place, wide = index // u, keys * work.sum_bytes / work.size
        if window is None:
            there, back = place + 0.5 * (r - 1 - place), 0.5 * place + (r - 1 - place)
            out = [Transfer(f"cp%{u}", "send", keys * there / (r - 1))] * (r - 1)
            home = [Transfer(f"cp%{u}", "send", wide * back / (r - 1))] * (r - 1)
        else:
            leave, come = reaches(work.length, u, r, place, window)
            out = [Transfer(f"cp%{u}", "send", keys * share) for share in leave if share]
            home = [Transfer(f"cp%{u}", "send", wide * share) for share in come if share]
        found = {"F": found["F"] + out, "B": found["B"] + out + home}
    return found


@lru_cache(maxsize=4096)
def reaches(length: int, ulysses: int, ring: int, place: int, window: int) -> tuple[list[float], list[float]]:
    """For each further step of a ring: the share of its block's keys that a member sends, and that it receives."""
    places = lay_out_tokens(length, ulysses=ulysses, ring=ring)
    mine, whole = places.blocks[place], places.padded // ring
    others = [places.blocks[(place + step) % ring] for step in range(1, ring)]
    return [visible_keys(o, mine, window) / whole for o in others], [
        visible_keys(mine, o, window) / whole for o in others
    ]


def _routed(work: Work, layout: Layout, tokens: int) -> list[Transfer]:
    """To the experts and back, if every expert gets as many tokens as every other. Each tp rank sends its own part."""
    experts, n = work.model.experts, layout.ep
    if experts is None or n == 1:
        return []
    slots = tokens / layout.tp * experts.per_token * work.model.hidden * work.size
    return [Transfer("ep", "exchange", (n - 1) / n * slots)] * 2


def ends(work: Work, layout: Layout, first: bool, last: bool) -> dict[str, list[Transfer]]:
    """What embedding and head send for one micro-batch."""
    tokens = work.tokens(layout)
    whole = float(tokens * work.model.hidden * work.size)
    found: dict[str, list[Transfer]] = {"F": [], "B": []}
    enter, leave = _around_cut(layout, whole)
    if first:
        found = {way: found[way] + moves for way, moves in leave.items()}
    if last:
        found = {way: found[way] + moves for way, moves in enter.items()}
        if layout.tp > 1:  # three numbers of each token, for one softmax over all slices of the vocabulary
            found["F"] = [*found["F"], Transfer("tp", "exchange", 12.0 * tokens * (layout.tp - 1))]
    return found


def passed(work: Work, layout: Layout) -> Transfer:
    """The stream of one micro-batch, to the next stage or back."""
    whole = float(work.tokens(layout) * work.model.hidden * work.size)
    return Transfer("pp", "send", whole / (layout.tp if layout.sp else 1))


def gradients(work: Work, layout: Layout, mine: ParamsOnRank) -> list[Transfer]:
    """Once in a step, or with each micro-batch: each owner gets its rows of all gradients."""
    wide = max(work.profile.gradient_bytes, work.sum_bytes if work.dtype == "fp64" else 0)
    return _over_copies(layout, mine, wide)


def partial_sums(work: Work, layout: Layout, mine: ParamsOnRank, index: int) -> list[Transfer]:
    """Sums over other axes than those of data, on each owner's rows."""
    data, wide = layout.dp * layout.cp, work.sum_bytes
    found = reduced("tp", layout.tp, mine.shared / data * wide)
    if mine.pairs:
        copies = layout.tp // (work.model.kv_heads or work.model.heads)
        found += reduced(f"tp/{copies}", copies, mine.pairs / data * wide)
    if work.model.tied and layout.pp > 1 and index in (0, layout.pp - 1):
        table = -(-work.model.vocab // layout.tp) * work.model.hidden
        found += reduced(f"pp:0+{layout.pp - 1}", 2, table / data * wide)
    return found


def updated(work: Work, layout: Layout, mine: ParamsOnRank) -> list[Transfer]:
    """After the reductions: at ZeRO 0 gradients are gathered, at ZeRO 1 and 2 parameters. ZeRO 3 keeps rows."""
    if layout.zero == 3:
        return []
    return _over_copies(layout, mine, work.sum_bytes if layout.zero == 0 else work.size)


def shards(work: Work, layout: Layout, mine: ParamsOnRank) -> list[Transfer]:
    """At ZeRO 3: the gather of some parameters, before they are used."""
    return _over_copies(layout, mine, work.size) if layout.zero == 3 else []


def _over_copies(layout: Layout, mine: ParamsOnRank, size: int) -> list[Transfer]:
    """Some parameters, `size` bytes an element, between the ranks that hold copies."""
    return cut("dp cp", layout.dp * layout.cp, mine.dense * size) + cut("edp", layout.edp, mine.routed * size)


def of_step(work: Work, layout: Layout, spot: Mapping[str, int]) -> Iterator[tuple[Transfer, int]]:
    """Each move of one rank in a step, and how often it is made."""
    index, cp_index, micro = spot["pp"], spot["cp"], work.micro_batches
    first, last = index == 0, index == layout.pp - 1
    ways = ("F", "B", "R") if work.runs_again else ("F", "B")
    stages = kinds_of(work, layout, index)
    for kind, count in (both for stage in stages for both in stage):
        made = block(work, layout, kind, cp_index)
        weights = shards(work, layout, of_block(work, layout, kind.sparse))
        for way in ways:
            yield from ((move, micro * count) for move in made[way])
        yield from ((move, 2 * micro * count) for move in weights)  # forward and backward
    if layout.pp == 1:  # the last block is gathered once: backward begins with it
        sparse = work.model.has_experts(work.model.layers - 1)
        yield from ((move, -micro) for move in shards(work, layout, of_block(work, layout, sparse)))
    at_ends = ends(work, layout, first, last)
    root = of_ends(work, layout, first, last)
    yield from ((move, micro) for way in ("F", "B") for move in at_ends[way])
    yield from (
        (move, micro * len(stages)) for move in shards(work, layout, root)
    )  # whole from a forward to a backward
    links = 2 * len(stages) - first - last
    if layout.pp > 1:
        yield passed(work, layout), micro * links
    mine = params_on_rank(work, layout, index)
    yield from ((move, work.reductions) for move in gradients(work, layout, mine))
    for moves in (partial_sums(work, layout, mine, index), updated(work, layout, mine)):
        yield from ((move, 1) for move in moves)


def sent(work: Work, layout: Layout, spot: Mapping[str, int]) -> dict[str, float]:
    """The bytes that leave one rank in a step, by axes."""
    found: dict[str, float] = {}
    for move, times in of_step(work, layout, spot):
        found[move.axes] = found.get(move.axes, 0.0) + move.bytes * times
    return found
