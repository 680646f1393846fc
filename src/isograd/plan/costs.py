"""How long things take on a machine: matrix products, attention, operations on elements, messages, the optimizer.

A product takes its arithmetic at the rate for its sizes (kernels.py), or the reading and writing of its matrices if
that takes longer, and the start of an operator. In 8 bits its operands are cast before. A device cannot be faster than
the host that starts its operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from isograd.core.layout import Layout
from isograd.plan import comm_volume
from isograd.plan.comm_volume import Transfer
from isograd.plan.kernels import BLOCK, attention_share, product_share
from isograd.plan.machine import Machine
from isograd.plan.work import BlockKind, Work, of_block, params_on_rank
from isograd.sequence import band
from isograd.sequence.token_layout import block_masks, lay_out_tokens

_PART = {"dp cp": "dp", "edp": "dp"}  # of a step: the others are called as their axis
OPERATORS = (
    34  # that the host starts for the forward of a block of isograd's Transformer, as counted; views start nothing
)
ROUTING = 93  # in a block with experts, without their products
SENDING = 3  # for each message: its parts are put together, sent, and awaited
SCORES = {"F": 5, "B": 8}  # how often attention that is not fused reads or writes a matrix of scores
BLOCK_STARTS = {"F": 25, "B": 30}  # operators that isograd's attention in a window starts for a block, on CPUs


@dataclass(frozen=True)
class Cost:
    """Seconds of compute, and of messages by axes."""

    compute: float
    messages: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds, if nothing is hidden."""
        return self.compute + sum(self.messages.values())


@dataclass(frozen=True)
class Costs:
    """What the parts of a step take on one rank of a layout on a machine."""

    work: Work
    layout: Layout
    machine: Machine

    @cached_property
    def _peaks(self) -> tuple[float, float, float]:
        """Products per second, of matrices and of attention, and bytes per second."""
        dtype = self.work.products or self.work.dtype
        rates = self.machine.rates
        plain = self.work.dtype
        return (
            self.machine.peak(dtype) * rates.matmul[dtype],
            self.machine.peak(plain) * rates.attention * self.work.profile.attention,
            self.machine.memory_gb_s * 1e9 * rates.memory,
        )

    def product(self, m: float, n: float, k: float) -> float:
        """Seconds of [m, k] times [k, n]."""
        rate, _, memory = self._peaks
        moved = (m * k + k * n + m * n) * self.work.size
        # Casts to 8 bits, of the three products of a forward and its backward on average: inputs and gradients of
        # results are read, and written as they are and transposed. A weight is cast once in a step.
        cast = (2 + 1 + 1) * (m * k + m * n + k * n / self.work.micro_batches) / 3
        cast = cast if self.work.products == "fp8" else 0.0
        share = product_share(m, n, k, self.machine.units)
        seconds = max(2 * m * n * k / (rate * share), moved / memory)
        return seconds + cast / memory + self.machine.rates.operator_us * 1e-6

    def elements(self, bytes: float, operators: int = 1) -> float:
        """Seconds of operations on elements that must read and write so many bytes."""
        return bytes * self.work.profile.passes / self._peaks[2] + operators * self.machine.rates.operator_us * 1e-6

    def block(self, kind: BlockKind) -> dict[str, float]:
        """Compute of one block for one micro-batch: F, B, and the part of F that recomputing repeats, R."""
        work, layout, c = self.work, self.layout, self.work.model
        tokens, d, size = work.tokens(layout), work.head_dim, work.size
        heads, kv = c.heads / layout.tp, max(1, (c.kv_heads or c.heads) / layout.tp)
        hidden, stream = c.hidden, tokens * c.hidden * size / (layout.tp if layout.sp else 1)
        products: list[tuple[int, float, float, float]] = [  # how many of which sizes
            (1, tokens, heads * d, hidden),
            (1, tokens, 2 * kv * d, hidden),
            (1, tokens, hidden, heads * d),
        ]
        inside = 0.0  # bytes of the inner features that the activation reads and writes
        if kind.sparse and c.experts is not None:
            here = max(1.0, c.experts.number / layout.ep)
            slots = tokens / layout.tp * c.experts.per_token
            each = slots / here
            products.append((int((work.matrices - 1) * here), each, c.experts.width, hidden))
            products.append((int(here), each, hidden, c.experts.width))
            products.append((1, tokens / layout.tp, c.experts.number, hidden))
            inside = (slots * (work.matrices * c.experts.width + 6 * hidden)) * size  # slots are made and added up
            inner = c.experts.shared / layout.tp
        else:
            inner = c.mlp / layout.tp
        if inner:
            products += [(work.matrices - 1, tokens, inner, hidden), (1, tokens, hidden, inner)]
            inside += tokens * inner * work.matrices * size
        matrices = sum(count * self.product(*sizes) for count, *sizes in products)
        attention = self._attention(tokens, heads, kind.window)
        around = 2 * tokens * (heads + kv) * d * size  # rotary positions, or the bias of queries and keys
        between = self.elements(2 * 5 * stream + around + inside, 16)  # norms read and write, sums read two
        backward = 2 * matrices + attention["B"] + 2 * between
        again = {"none": 0.0, "selective": attention["F"], "full": matrices + attention["F"] + between}
        if work.recompute == "selective" and work.profile.fused_attention:
            again["selective"] = work.profile.selective * matrices + between  # fused attention keeps no scores
        return {"F": matrices + attention["F"] + between, "B": backward, "R": again[work.recompute]}

    def _attention(self, tokens: float, heads: float, window: int | None) -> dict[str, float]:
        """Of all heads of this rank. A causal mask leaves half of the products, a window fewer; attention that takes a
        mask or has its scores in memory does all of them."""
        work, layout = self.work, self.layout
        keys = work.length
        flops = 4 * tokens * keys * heads * work.head_dim
        rate, start = self._peaks[1], self.machine.rates.operator_us * 1e-6
        if work.profile.fused_attention:
            if self._blocks_of(window):
                return {way: self._by_blocks(tokens, heads, window, way) for way in ("F", "B")}
            share = 1.0 if work.takes_mask(self.machine.units > 0) else 0.5 / attention_share(keys / layout.ring)
            if window is not None:  # and the blocks at both edges of the window
                share = min(share, (window - window**2 / (2 * keys) + BLOCK) / keys)
            steps = layout.ring
            return {"F": flops * share / rate + steps * start, "B": 2.5 * flops * share / rate + 2 * steps * start}
        scores = tokens * keys * heads * work.size / self._peaks[2]
        rows, d = tokens * heads, work.head_dim
        shares = [product_share(*sizes, self.machine.units) for sizes in ((rows, keys, d), (rows, d, keys))]
        products = sum(flops / 2 / (self._peaks[0] * share) for share in shares)
        return {
            "F": products + SCORES["F"] * scores + 5 * start,
            "B": 2 * products + SCORES["B"] * scores + 8 * start,
        }

    def _blocks_of(self, window: int | None) -> int:
        """How many blocks of queries and keys isograd's own attention computes one after the other, of a batch's row:
        in a window, on CPUs. 0: a kernel does all of it, or one does each block of a ring (sequence/block.py)."""
        work, layout = self.work, self.layout
        if window is None or self.machine.units:
            return 0
        return blocks_and_pairs(work.length, layout.ulysses, layout.ring, window)[0]

    def _by_blocks(self, tokens: float, heads: float, window: int | None, way: str) -> float:
        """Seconds of a forward or a backward."""
        work, layout = self.work, self.layout
        blocks, seen = blocks_and_pairs(work.length, layout.ulysses, layout.ring, window)
        pairs = tokens / (work.length / layout.cp) * heads / layout.ulysses * seen
        flops = 4 * pairs * work.head_dim * (1.0 if way == "F" else 2.5)
        return flops / self._peaks[1] + 2 * blocks * self.machine.rates.operator_us * 1e-6

    def head(self) -> float:
        """Logits, their loss and both gradients: all in the forward."""
        work, tokens = self.work, self.work.tokens(self.layout)
        vocab = -(-work.model.vocab // self.layout.tp)
        logits = self.elements(tokens * vocab * work.sum_bytes * 3, 12)
        return 3 * self.product(tokens, vocab, work.model.hidden) + logits

    def embedding(self) -> float:
        """Rows are read and written."""
        return self.elements(2 * self.work.tokens(self.layout) * self.work.model.hidden * self.work.size, 4)

    def optimizer(self, index: int) -> float:
        """AdamW on this rank's rows: its moments, masters and gradients are read, all but the gradients written; the
        norm reads gradients before, and the scale reads and writes them."""
        mine, data = params_on_rank(self.work, self.layout, index), self.layout.dp * self.layout.cp
        rows = mine.all if self.layout.zero == 0 else mine.dense / data + mine.routed / self.layout.edp
        wide = self.work.sum_bytes
        return rows * (6 * wide + 4 * wide + self.work.size) / self._peaks[2]

    def move(self, one: Transfer) -> float:
        """Seconds of one message or collective."""
        members, stride = self._group(one.axes)
        if one.axes == "pp":
            link, here = self.machine.link(2, stride)
        else:
            link, here = self.machine.link(members, stride)
        inside, share = self.machine.inside, self.machine.rates.links
        latency = link.latency_us * 1e-6 * max(1.0, math.log2(members))
        if link is inside:
            return one.bytes / (inside.gb_s * 1e9 * share) + latency
        if one.kind == "collective":  # a ring through the nodes enters each once, by as many links as members are there
            speed = min(inside.gb_s, link.gb_s * here)
            return one.bytes / (speed * 1e9 * share) + latency
        away = 1.0 if one.kind == "send" else (members - here) / max(1, members - 1)
        return one.bytes * away / (link.gb_s * 1e9 * share) + latency

    def _group(self, axes: str) -> tuple[int, int]:
        """(members, the distance of neighbours in ranks) of the group along some axes."""
        layout = self.layout
        whole = layout.tp * layout.cp
        if axes.startswith("cp/"):
            return layout.ulysses, layout.tp
        if axes.startswith("cp%"):
            return layout.ring, layout.tp * layout.ulysses
        if axes.startswith("tp/"):
            return int(axes[3:]), 1
        if axes.startswith("pp"):
            return 2, whole * layout.dp
        found = {
            "tp": (layout.tp, 1), "dp cp": (layout.dp * layout.cp, layout.tp), "ep": (layout.ep, 1),
            "edp": (layout.edp, layout.ep),
        }  # fmt: skip
        return found[axes]

    def messages(self, several: Iterable[Transfer]) -> dict[str, float]:
        """Seconds by parts of a step."""
        found: dict[str, float] = {}
        for one in several:
            axes = _PART.get(one.axes) or one.axes[:2]
            seconds = self.move(one)
            hidden = self.work.profile.hides_tp if axes == "tp" else 0.0
            found[axes] = found.get(axes, 0.0) + self.exposed(seconds, hidden * seconds)
        return found

    def exposed(self, seconds: float, cover: float) -> float:
        """What messages cost beside compute of `cover` seconds: what lasts longer, and what they take from it."""
        return max(0.0, seconds - cover) + self.machine.rates.contention * min(seconds, cover)

    def of_block(self, kind: BlockKind) -> dict[str, Cost]:
        """F and B of one block, with its messages; what is run again is part of B."""
        compute = self.block(kind)
        made = comm_volume.block(self.work, self.layout, kind, self.layout.cp - 1)
        back = made["B"] + (made["R"] if self.work.runs_again else [])
        forward, again = (self._started(compute[way], made[way], kind) for way in "FR")
        backward = self._started(compute["B"] + self._summed(kind.sparse), made["B"], kind, "B")
        return {
            "F": Cost(forward, self.messages(made["F"])),
            "B": Cost(backward + (again if compute["R"] else 0.0), self.messages(back)),
        }

    def _started(self, seconds: float, made: list[Transfer], kind: BlockKind, way: str = "F") -> float:
        """Seconds of a device that waits for the host, where the host starts operators more slowly than they run. A
        backward starts twice as many as its forward."""
        experts = self.work.model.experts
        operators = OPERATORS
        if kind.sparse and experts is not None:
            operators = ROUTING + self.work.matrices * max(1, experts.number // self.layout.ep)
        operators *= 2 if way == "B" else 1
        operators += self._blocks_of(kind.window) * BLOCK_STARTS[way] if self.work.profile.fused_attention else 0
        started = (operators + SENDING * len(made)) * self.machine.rates.launch_us * 1e-6
        return seconds + max(0.0, started - seconds - sum(self.messages(made).values()))

    def _summed(self, sparse: bool) -> float:
        """Gradients of a micro-batch are read, their sums read and written."""
        work = self.work
        if not work.keeps_whole or work.profile.fused_sums or not work.profile.keeps_gradients:
            return 0.0
        wide = max(work.profile.gradient_bytes, work.sum_bytes if work.dtype == "fp64" else 0)
        return of_block(work, self.layout, sparse).all * (work.size + 2 * wide) / self._peaks[2]

    def of_ends(self, first: bool, last: bool) -> dict[str, Cost]:
        """F and B of embedding and head."""
        made = comm_volume.ends(self.work, self.layout, first, last)
        compute = (self.embedding() if first else 0.0) + (self.head() if last else 0.0)
        back = self.embedding() if first else 0.0
        return {"F": Cost(compute, self.messages(made["F"])), "B": Cost(back, self.messages(made["B"]))}


@lru_cache(maxsize=4096)
def blocks_and_pairs(length: int, ulysses: int, ring: int, window: int | None) -> tuple[int, int]:
    """Of one sequence on the busiest member of a ring: how many blocks isograd's attention computes one after the
    other, and how many pairs of a query and a key are in them."""
    if ring == 1:
        starts = range(0, length, band.BLOCK)
        found = [p for start in starts for p in band.pieces(start, min(length, start + band.BLOCK), window)]
        return len(found), sum((p.stop - p.start) * (p.last - p.first) for p in found)
    blocks = lay_out_tokens(length, ulysses=ulysses, ring=ring).blocks
    seen = [[sight for theirs in blocks for sight in block_masks(mine, theirs, window)] for mine in blocks]
    return max(
        ((len(found), sum((s.stop - s.start) * s.keys for s in found)) for found in seen), key=lambda both: both[1]
    )


def left_out(work: Work) -> list[str]:
    """Operators of a step that have no cost here: with them it takes longer than is said."""
    c = work.model
    found = {
        "dropout": c.dropout > 0 or c.attention_dropout > 0,
        "norms of queries and keys": c.qk_norm,
        "the losses that balance experts": c.experts is not None,
        "Muon's products": work.muon,
    }
    return [name for name, there in found.items() if there]
