"""GradientCache: contrastive training at any batch size, in the memory of one chunk, with the full batch's gradient.

A step's backward has four parts (Gao et al. 2021, arXiv 2101.06983):

1. Every tower's rows are encoded chunk by chunk without a graph. The vectors are kept and, for each chunk, the state
   of the random generators and a fingerprint of its vectors.
2. The loss is computed from the vectors of all data ranks; its backward gives the gradient of each of my vectors.
   Under cp, the ranks that share rows each take a part of them into the loss, and the gradients are gathered over cp.
3. Chunk by chunk, the last one first, the encoder runs again from the same random state, now with a graph, and goes
   backward from its vectors' gradients. IG965 is raised when the vectors do not have the bits of the first pass.
4. The engine sees one backward: each gradient is reduced once, for any number of chunks and towers, at any ZeRO stage.

The very last chunk of part 1 keeps its graph and has no second forward: it is the first of part 3, so its activations
are gone before another chunk's are made. With `keep_mb`, the first chunks keep theirs, too. Gradients have the same
bits with any budget: chunks go backward in the same order.

All data ranks call `backward` together. A rank may have no rows (inputs of length 0): its encoder then runs once, and
its result is not used. At ZeRO 3, and where experts are cut over ep, a forward is a collective, so ranks with fewer
chunks run such extra forwards until all ranks are done. Layers of experts do not count them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import raw
from isograd.comm.fingerprint import fingerprint
from isograd.comm.group import even_sizes
from isograd.core.loss_terms import Terms
from isograd.core.mesh import DATA
from isograd.core.rng import random_state, set_random_state
from isograd.core.step_counters import StepCounters
from isograd.engine import Engine
from isograd.engine.grad_placeholder import take_grad
from isograd.engine.step import StepState
from isograd.errors import ContrastiveError
from isograd.losses.contrastive.chunks import Budget, Encode, cut, encode_chunk, one_kernel, place_rows, rows_of, upcast
from isograd.losses.contrastive.first_pass import join_first_pass
from isograd.losses.contrastive.losses import NegativesScope, PairLoss
from isograd.nn import MoE


@dataclass(frozen=True)
class AuxiliaryLoss:
    """Another loss beside the contrastive one: share * (its mean over all ranks' tokens, or rows).

    parts: for each of this rank's micro-batches, a function that computes the mean loss, and the number of tokens or
        rows that it is the mean of.
    """

    parts: Sequence[tuple[Callable[[], Tensor], float | Tensor]]
    share: float = 1.0

    @property
    def weight(self) -> float:
        """Of all parts on this rank."""
        return sum(float(weight) for _, weight in self.parts)


@dataclass(frozen=True)
class _Tower:
    encode: Encode
    inputs: Any
    rows: int
    chunks: int
    last: int  # the number of the last chunk with rows
    keeps_last: bool  # that chunk keeps its graph, whatever the budget
    states: list[list[Tensor]] = field(default_factory=list)  # of each chunk, as the one below
    prints: list[int] = field(default_factory=list)
    kept: list[Tensor | None] = field(default_factory=list)  # vectors with their graphs; None: not kept


class GradientCache:
    """The contrastive gradient of all data ranks' rows in the memory of one chunk; see the head of this file."""

    def __init__(
        self,
        engine: Engine,
        loss: nn.Module,
        *,
        encode: Encode | Sequence[Encode] | None = None,
        chunk: int = 64,
        keep_mb: float = 0.0,
    ) -> None:
        """loss: InfoNCE, SigLIP, FullBatchLoss, or a module with their interface; a part of the engine's model.
        encode: a function from a chunk to vectors [rows, d]: one for all towers, or a list with one for each. Default:
            the engine's model.
        chunk: the number of rows that are encoded at once.
        keep_mb: MiB of activations that chunks may keep between their two passes, so that they need no second forward.
            Not at ZeRO 3 and under ep, where a forward is a collective.
        """
        self.engine, self.loss = engine, loss
        self.encode: Encode | list[Encode] = engine.model if encode is None else encode  # type: ignore[assignment]
        if not callable(self.encode):
            self.encode = list(self.encode)
        self.chunk, self.keep_mb = chunk, keep_mb
        self._alike = engine.mesh.layout.zero == 3 or engine.mesh.layout.ep > 1  # a forward is a collective there
        self._tallies = StepCounters(engine.model, engine.mesh)
        self._refuse()

    def backward(
        self,
        *towers: Any,
        ids: Sequence[Tensor] | None = None,
        guides: Sequence[Tensor] | None = None,
        second: AuxiliaryLoss | None = None,
    ) -> Tensor:
        """Add the gradient of the contrastive loss of all data ranks' rows to the step; returns my rows' mean loss.

        towers: this rank's rows of queries, documents, negatives, ...
        ids, guides: for the masks of the loss, one tensor per tower with one entry per row (losses.py).
        second: a second loss beside the contrastive one. The step then has two terms, "contrastive" and "second": call
            `engine.begin(contrastive=rows, second=tokens)` before a step of several such backwards.
        """
        engine, mesh = self.engine, self.engine.mesh
        _refuse_batch_norm(engine.model)
        pairs = self._pairs(towers)
        rows, problem = self._rows(towers)
        counted, most = self._count(rows, problem)
        work = [
            _Tower(*pair, n, chunks, -(-n // self.chunk) - 1, i == len(rows) and not self._alike)
            for i, (pair, n, chunks) in enumerate(zip(pairs, rows, most, strict=True), 1)
        ]
        with one_kernel():
            # The first pass and the loss come before the step's backward begins: what they raise leaves the step as it
            # was, while an exception inside `together` makes the whole step unusable.
            budget, vectors = Budget.of(self.keep_mb, engine.model, towers), list[Tensor]()
            try:
                for tower in work:
                    found, budget = self._represent(tower, budget)
                    vectors.append(found)
            except Exception as error:
                if not self._alike:
                    join_first_pass(error, mesh)
                raise
            if not self._alike:
                join_first_pass(None, mesh)
            work = self._keep_alike(work)
            loss, leaves = self._loss(work, vectors, counted, ids, guides)
            if second is not None:
                engine.begin_single_backward(contrastive=_my_rows(counted), second=second.weight)
            with engine.backward_context() as step_state:
                gradients = self._loss_gradients(step_state, loss, leaves, work, counted)
                after = random_state(mesh.device)
                torch.clear_autocast_cache()  # it holds weights that were cast without a graph
                for tower, gradient in reversed(list(zip(work, gradients, strict=True))):
                    self._replay(step_state, tower, gradient, last=tower is work[0] and second is None)
                set_random_state(after, mesh.device)
                if second is not None:
                    for number, (run, weight) in enumerate(second.parts, 1):
                        terms = Terms(second=(run(), weight, second.share))
                        step_state.backward_terms(terms, last=number == len(second.parts))
        return loss.detach()

    def _rows(self, towers: Sequence[Any]) -> tuple[list[int], ContrastiveError | None]:
        """Of each tower; where one has no number of rows, -1 and the error, which waits until the other ranks know."""
        rows, problem = [], None
        for inputs in towers:
            try:
                rows.append(rows_of(inputs))
            except ContrastiveError as error:
                rows.append(-1)
                problem = ContrastiveError("IG961", seen=error.seen, where=self.engine.mesh.describe_rank())
        return rows, problem

    def _pairs(self, towers: Sequence[Any]) -> list[tuple[Encode, Any]]:
        encoders = self.encode if isinstance(self.encode, list) else [self.encode] * len(towers)
        if len(encoders) != len(towers) or not towers:
            seen = f"{len(encoders)} encoders for {len(towers)} towers"
            raise ContrastiveError("IG963", seen=seen, where=self.engine.mesh.describe_rank())
        return list(zip(encoders, towers, strict=True))

    def _count(self, own: Sequence[int], problem: ContrastiveError | None) -> tuple[NegativesScope, list[int]]:
        """How many rows each rank has, and how many chunks each tower has here. The only gather of counts.

        Rows that do not pair up on any rank are refused on all of them."""
        mesh = self.engine.mesh
        group = mesh.group(DATA)
        mine = torch.tensor(own, device=mesh.device)
        table = raw.gather(mine, group).tolist()
        for rank, counts in zip(group.ranks, table, strict=True):
            if min(counts) < 0:
                seen = f"tower {counts.index(-1)} of rank {rank}"
                raise problem or ContrastiveError("IG961", seen=seen, where=mesh.describe_rank())
            if isinstance(self.loss, PairLoss) and (len(counts) < 2 or counts[0] != counts[1]):
                seen = f"{len(counts)} tower(s) of {counts} rows on rank {rank}"
                raise ContrastiveError("IG960", seen=seen, where=mesh.describe_rank())
        spots = [mesh.layout.coordinates(rank) for rank in group.ranks]
        by_dp: dict[int, list[int]] = {}
        for rank, spot, rows in zip(group.ranks, spots, table, strict=True):
            if by_dp.setdefault(spot["dp"], rows) != rows:
                raise ContrastiveError(
                    "IG964", where=mesh.describe_rank(), rows=rows, rank=rank, first=by_dp[spot["dp"]]
                )
        shares = [
            [even_sizes(n, mesh.size("cp"))[spot["cp"]] for n in rows] for spot, rows in zip(spots, table, strict=True)
        ]
        chunks = [
            max(1, -(-(max(rows[i] for rows in table) if self._alike else n) // self.chunk)) for i, n in enumerate(own)
        ]
        return NegativesScope(group, tuple(zip(*shares, strict=True))), chunks

    def _parts(self, tower: _Tower) -> Iterable[tuple[int, Any]]:
        """(number of a chunk, its inputs)"""
        return ((i, cut(tower.inputs, i * self.chunk, self.chunk)) for i in range(tower.chunks))

    @torch.no_grad()
    def _represent(self, tower: _Tower, budget: Budget) -> tuple[Tensor, Budget]:
        """The first pass over a tower: its vectors, and what is left of the budget."""
        device, found = self.engine.mesh.device, torch.empty(0)
        for number, inputs in self._parts(tower):
            tower.states.append(random_state(device))
            if tower.keeps_last and number == tower.last:
                torch.clear_autocast_cache()  # it holds weights that were cast without a graph
                with torch.enable_grad():
                    vectors, keeps = encode_chunk(tower.encode, inputs), True
            elif budget.left and rows_of(inputs):
                vectors, keeps, budget = budget.encode_kept(tower.encode, inputs)
                if not keeps:
                    torch.clear_autocast_cache()  # it holds weights that were cast with a graph
            else:
                vectors, keeps = encode_chunk(tower.encode, inputs), False
            tower.kept.append(vectors if keeps else None)
            vectors = vectors.detach()
            tower.prints.append(int(fingerprint(vectors)))
            if number == 0:  # joined at the end, they would be there twice
                found = vectors.new_empty((tower.rows, vectors.shape[1]))
            place_rows(found, number * self.chunk, vectors)
        return found, budget

    def _keep_alike(self, work: list[_Tower]) -> list[_Tower]:
        """Ranks that encode rows together keep the same chunks: those that fit on all of them."""
        group = self.engine.mesh.group("cp tp")
        if not self.keep_mb or group.size == 1:
            return work
        # Fitting chunks are the first ones. The very last chunk, kept on every rank, is at most one more.
        fitting = [next((n for n, x in enumerate(tower.kept) if x is None), tower.chunks) for tower in work]
        mine, found = torch.tensor(fitting, device=self.engine.mesh.device), []
        for tower, most in zip(work, raw.gather(mine, group).amin(0).tolist(), strict=True):
            very_last = tower.chunks - 1 if tower is work[-1] else None
            kept = [x if n < most or n == very_last else None for n, x in enumerate(tower.kept)]
            found.append(replace(tower, kept=kept))
        return found

    def _loss(
        self,
        work: Sequence[_Tower],
        vectors: list[Tensor],
        across: NegativesScope,
        ids: Sequence[Tensor] | None,
        guides: Sequence[Tensor] | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss, and the vectors that it is a function of. Under cp they are this cp rank's part of the rows."""

        def share(per_tower: Sequence[Tensor]) -> list[Tensor]:
            index = self.engine.mesh.group("cp").index
            starts = [sum(sizes[:index]) for sizes in self._cp_sizes(work)]
            return [
                x[a : a + sizes[index]] for x, a, sizes in zip(per_tower, starts, self._cp_sizes(work), strict=True)
            ]

        leaves = [upcast(x).detach().requires_grad_() for x in share(vectors)]
        more: dict[str, Any] = {}
        if ids is not None:
            more["ids"] = share(ids)
        if guides is not None:
            more["guides"] = [upcast(g) for g in share(guides)]
        vectors.clear()  # the loss decides how long their memory is needed
        with torch.autocast(self.engine.mesh.device.type, enabled=False):
            return self.loss(leaves, across, **more), leaves

    def _loss_gradients(
        self, step_state: StepState, loss: Tensor, leaves: list[Tensor], work: Sequence[_Tower], across: NegativesScope
    ) -> list[Tensor]:
        """Go backward from the loss to the vectors: the gradients of each tower's."""
        with torch.autocast(self.engine.mesh.device.type, enabled=False):
            if step_state.now.term_weights.expected is None:
                step_state.backward_loss(loss, _my_rows(across), last=False)
            else:
                step_state.backward_terms(Terms(contrastive=(loss, _my_rows(across))), last=False)
        found = []
        for leaf, sizes in zip(leaves, self._cp_sizes(work), strict=True):
            gradient = take_grad(leaf)
            gradient = torch.zeros_like(leaf) if gradient is None else gradient
            found.append(raw.all_gather(gradient, self.engine.mesh.group("cp"), sizes))
        return found

    def _cp_sizes(self, work: Sequence[_Tower]) -> list[list[int]]:
        """For each tower, how many of its rows each cp rank takes into the loss."""
        return [list(even_sizes(tower.rows, self.engine.mesh.size("cp"))) for tower in work]

    def _replay(self, step_state: StepState, tower: _Tower, gradients: Tensor, last: bool) -> None:
        """Encode again with a graph and go backward, chunk by chunk, the last one first. The last backward of a step
        may communicate."""
        device, learns = self.engine.mesh.device, True
        for number, inputs in reversed(list(self._parts(tower))):
            here = slice(number * self.chunk, min((number + 1) * self.chunk, tower.rows))
            if (kept := tower.kept.pop()) is not None:
                vectors = kept
            else:
                set_random_state(tower.states[number], device)
                with nullcontext() if rows_of(inputs) else self._tallies.ignoring():
                    vectors = encode_chunk(tower.encode, inputs)
                if int(fingerprint(vectors)) != tower.prints[number]:
                    raise ContrastiveError("IG965", seen=f"chunk {number}", where=self.engine.mesh.describe_rank())
            learns = vectors.requires_grad  # a frozen tower ends here
            if learns:
                gradient = gradients[here].to(vectors.dtype)
                step_state.run_backward([vectors], [gradient], last=last and number == 0)

    def _refuse(self) -> None:
        known = {id(record.parameter) for record in self.engine.table}
        strange = [n for n, p in self.loss.named_parameters() if p.requires_grad and id(p) not in known]
        if strange:
            raise ContrastiveError(
                "IG966", where=self.engine.mesh.describe_rank(), names=", ".join(strange), name=type(self.loss).__name__
            )
        if self.chunk < 1 or self.engine.mesh.size("pp") > 1:
            raise ContrastiveError(
                "IG967", where=self.engine.mesh.describe_rank(), chunk=self.chunk, layout=str(self.engine.mesh.layout)
            )
        amount = isinstance(self.keep_mb, Real) and 0 <= self.keep_mb < math.inf
        if not amount or (self.keep_mb and self._alike):
            seen = f"keep_mb={self.keep_mb!r} under {str(self.engine.mesh.layout)!r}"
            raise ContrastiveError("IG973", seen=seen, where=self.engine.mesh.describe_rank())
        _refuse_batch_norm(self.engine.model)
        layers = [(name, layer.options) for name, layer in self.engine.model.named_modules() if isinstance(layer, MoE)]
        losing = [name for name, options in layers if options.balance != "none" or options.z_weight]
        if losing:
            where = self.engine.mesh.describe_rank()
            raise ContrastiveError("IG971", where=where, layers=", ".join(losing[:6]), count=len(losing))


def _my_rows(across: NegativesScope) -> int:
    return across.counts[0][across.group.index]


def _refuse_batch_norm(model: nn.Module) -> None:
    kinds = (nn.modules.batchnorm._BatchNorm,)
    found = [n for n, m in model.named_modules() if isinstance(m, kinds) and (m.training or not m.track_running_stats)]
    if found:
        raise ContrastiveError(
            "IG968", seen=f"{len(found)} batch norm module(s) in training mode", names=", ".join(found[:6])
        )
