"""Engine: backward, step, no_sync. The gradient of one device under every layout.

`backward` seeds the loss with its weight (the number of tokens, rows, ... that it is the mean of) and adds the weight
to a running count. Gradients are sums from there on and nothing divides them until `step` multiplies once by 1 /
(global weight). Uneven ranks, uneven micro-batches and ranks without data are exact by construction.

A step is a transaction. Its state is one object, the ledger (engine/ledger.py, which follows a gradient from autograd
to the optimizer). What every rank must know to decide alike crosses the wire once per step (engine/totals.py); then all
ranks step, skip or refuse together, and what fails leaves nothing behind. engine/norm.py counts each element once,
engine/zero.py steps. engine/naive.py is what all of this means, in twenty lines.

`train_step` does a whole step under any layout. With a pipeline it is the only way: pipeline/run.py orders forwards and
backwards, and hands each backward to the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isograd.comm import raw
from isograd.comm.notes import gather_notes
from isograd.contract import contracts
from isograd.engine import batches, evaluation, matrices, norm, start, totals
from isograd.engine.across import Across
from isograd.engine.batches import call
from isograd.engine.blame import Blame, blame
from isograd.engine.blocks import homes, repeated_blocks
from isograd.engine.dropped import is_dropped, mark, mark_handled
from isograd.engine.evaluation import Evaluation
from isograd.engine.first import FirstValues
from isograd.engine.fit import refuse_unfit
from isograd.engine.ledger import Leave, Ledger, State
from isograd.engine.plan import make_plan, slot_of
from isograd.engine.precision import LossScale
from isograd.engine.stats import Stats
from isograd.engine.totals import Status, Table, Totals, used_anywhere
from isograd.engine.tree import total
from isograd.engine.units import Units
from isograd.engine.whole import gradients as whole_gradients
from isograd.engine.zero import Factory, Optimized
from isograd.errors import EngineError, IsogradError, headline
from isograd.inputs import Inputs
from isograd.mesh import DATA, Mesh
from isograd.stored import Stored, Weights
from isograd.tallies import Tallies
from isograd.terms import Terms


class Engine:
    """Trains a model under any layout with the gradient of one device; see the head of this file."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        optimizer: Factory,
        *,
        clip: float | None = None,
        reproducible: bool = False,
        overlap: bool = True,
        loss_scale: LossScale | None = None,
        bucket_mb: float = 16.0,
        keep_gathered: bool = False,
        blocks: Iterable[nn.Module] | None = None,
        offload: bool = False,
        weights: Weights | str | Path | None = None,
        whole: Sequence[str] = (),
        accumulate: Literal["local", "sharded"] = "local",
    ) -> None:
        """`optimizer` makes a torch optimizer from the row shards it is given.

        reproducible: the same bits for every ZeRO stage and for every split of the same micro-batches into data ranks
            x accumulation steps (powers of two). Costs log2(micro-batches) + 1 full gradients and all overlap.
        overlap: False sends everything at `step`; then ranks may run different numbers of backwards, or none.
        loss_scale: made when a parameter is fp16; give one to use fp16 autocast with fp32 parameters.
        keep_gathered: at ZeRO 3, keep a block's parameters whole from its forward to its backward: a third fewer bytes.
        blocks: at ZeRO 3, what is gathered together; left out, the members of the model's lists of modules.
        offload: at ZeRO 1 to 3, master rows and optimizer state lie and step in the host's memory; at 3 all rows do.
        weights: first values, read by each rank for its own part: safetensors (a file, or a directory of them).
        whole: patterns of names; each matrix among them has one owner, for optimizers that need matrices, like Muon.
        accumulate: what `train_step` does with gradients of all but its last micro-batch. "local": kept whole here, and
            reduced once, as in no_sync. "sharded": each reduced into its owners' rows, and freed.
        """
        start.refuse_wrapped(model, mesh)
        start.take_over(model)
        self.model, self.mesh, self.clip, self.reproducible = model, mesh, clip, reproducible
        self.pipeline = start.pipeline_of(model, mesh, reproducible)
        self.table = contracts(model, mesh)
        start.refuse_idle_stage(self.table, mesh)
        refuse_unfit(model, self.table, mesh)
        stage = mesh.layout.zero
        parts = (repeated_blocks(model) if blocks is None else list(blocks)) if stage == 3 else []
        owners = matrices.owners(self.table, mesh, whole)
        self.plan = make_plan(self.table, mesh, int(bucket_mb * 2**20), homes(parts), owners)
        start.check_plan(self.plan, mesh)
        start.check_offload(offload, mesh)
        start.check_accumulation(accumulate, mesh, overlap=overlap, reproducible=reproducible)
        first = FirstValues(model, self.table, mesh, Stored(weights) if isinstance(weights, str | Path) else weights)
        first.fill_buffers(model)
        start.equal_replicas(model, self.table, mesh)
        fp16 = any(slot.parameter.dtype == torch.float16 for slot in self.plan.slots)
        self.loss_scale = loss_scale or (LossScale() if fp16 else None)
        self._units = None
        if stage == 3:
            slots = {id(slot.parameter): slot for slot in self.plan.slots}
            every = [slots.get(id(record.parameter)) or slot_of(record, mesh) for record in self.table]
            self._units = Units(model, every, mesh, first, blocks=parts, keep_gathered=keep_gathered, offload=offload)
        else:
            first.fill(self.table)
        self.ledger = Ledger(
            self.plan,
            mesh,
            reproducible=reproducible,
            keep_full=stage == 0,
            units=self._units,
            loss_scale=self.loss_scale,
        )
        across = Across(self.plan.slots, mesh, owners, stage)
        self._optimized = Optimized(self.plan, stage, optimizer, self._units, offload, across)
        self.ledger.shows(self._optimized.masters)
        self._counted = norm.counted(self.plan.slots, mesh)
        self._overlap, self._keeps_local = overlap, accumulate == "local"
        self._sync = True
        self._widest = start.most_slots(self.plan, mesh)
        self.blame: Blame | None = None  # of the last step, when it was skipped
        self._inputs = Inputs(model, mesh)
        self._tallies = Tallies(model, mesh)
        self._counts_ahead = self._tallies.ahead()
        self._watch = start.Watch(model, self.plan, moving=stage == 3)
        for slot in self.plan.slots:
            start.replace_hook(slot.parameter, self.ledger.hook(slot))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer: for learning-rate schedulers and for looking at its state."""
        return self._optimized.optimizer

    @property
    def _leave(self) -> Leave:
        """When the buckets of the next backward leave."""
        if not (self._sync and self._overlap) or self.reproducible:
            return Leave.AT_END
        if self._units is not None and self.pipeline is not None:  # blocks are left once for every micro-batch
            return Leave.AT_END
        # Ranks of a cp or ep group reach parameters at different points of backward. On NCCL a bucket that one of them
        # launches early could take the place of an exchange that the other one waits for.
        exchanging = self.mesh.size("cp") > 1 or self.mesh.size("ep") > 1
        unordered = exchanging and raw.native(self.mesh.group(DATA))
        return Leave.BY_BLOCK if self._units is not None or unordered else Leave.EAGER

    def backward(self, loss: Tensor | Terms, weight: float | Tensor = 1.0) -> None:
        """Add the gradient of loss * weight to the step. `weight`: how many tokens (rows, ...) it is the mean of.

        A loss that is a sum of means of different things is given as `ig.Terms`, whose weights over the whole step are
        announced by `begin`. Without that, the step has this one backward.
        """
        start.refuse_alone(self.pipeline, self.mesh)
        if isinstance(loss, Terms):
            self._backward_of_terms(loss)
            return
        start.check_loss(loss, weight, self.mesh)  # before the backward begins: nothing is left behind
        with self.together() as ledger:
            ledger.of_loss(loss, weight)

    def begin(self, /, **weights: float | Tensor) -> None:
        """Announce a step of several terms (`ig.Terms`): this rank's weight of each, over all backwards of the step.

        All ranks call it before the first backward, with the same names; `begin(lm=0, balance=0)`, or `begin()`, on a
        rank without data. Each term is divided by the sum of its announced weights over all ranks.
        """
        self._begin(weights, exact=True)

    def _begin(self, weights: Mapping[str, float | Tensor], exact: bool) -> None:
        ledger, shares = self.ledger, self.ledger.shares
        wrong = shares.problem(weights)
        if not ledger.empty and ledger.state is not State.FAILED:
            wrong = shares.mixed() if ledger.told.losses and shares.announced is None else shares.begun_late()
        announces = {} if wrong else {name: float(weight) for name, weight in weights.items()}
        if not exact and announces.keys() <= set(shares.names):  # the terms of the step before
            announces = {name: announces.get(name, 0.0) for name in shares.names}
        table = self._meet(Status.BEGINS, announces=announces, wrong=wrong)
        try:
            shares.agree(table.loss, self._of_terms(table), announces, exact)
        except EngineError as error:
            self._drop()
            mark(error, self.ledger)
            raise
        ledger.flights.clear()  # a rank that waited long in this gather has raised the flag of the step before

    def begin_alone(self, /, **weights: float | Tensor) -> None:
        """Before a backward of terms: unless the step was begun, its weights are the step's, which takes no other."""
        shares = self.ledger.shares
        if shares.alone:
            raise shares.not_announced("a second backward of terms: the first one's weights were taken for the step's")
        if shares.announced is None:
            self._begin(weights, exact=False)
            shares.alone = True

    def _backward_of_terms(self, terms: Terms) -> None:
        shares = self.ledger.shares
        shares.check(terms)  # before the backward begins: nothing is left behind
        self.begin_alone(**{name: term.weight for name, term in terms.items()})
        with self.together() as ledger:
            ledger.of_terms(terms)

    def check_sums(self) -> None:
        """Before a step, on all ranks: compare what its reductions send with what they add up (engine/sums.py)."""
        self.ledger.flights.begin_sums()

    def discard(self) -> None:
        """Drop all that this step has gathered, on every rank: after a backward that failed, or for a bad batch.

        Every rank calls it. A rank that calls `step` or `grads` instead raises IG558, and its step is dropped, too.
        While an exception is handled whose step is dropped already, `discard` returns at once.
        """
        if not is_dropped(self.ledger):
            self._meet(Status.DISCARDS)
            mark_handled(self.ledger)

    def train_step(self, batch: Any, micro_batches: int | None = None) -> Stats:
        """Forward, backward and step of a whole batch of this data rank, cut by rows; a list is taken as it is.

        The model is called with each micro-batch (a dict gives keywords, a tuple positions) and returns (loss, weight)
        or `ig.Terms`. The weights of terms are counted before the first backward: by the model's `term_weights`, called
        like the model, which returns {name: weight} (None: no terms); without it, by a pass without gradients.
        """
        self._refuse_failed()
        try:
            self.accumulate(batch, micro_batches)
        except Exception as error:
            # Ranks of dp all come to the gather of this step, or all have been in that of `begin`, which dropped it.
            # Ranks of other axes may wait for this one inside a layer.
            alone = self.mesh.size("dp") == self.mesh.layout.world_size and self.mesh.size("ep") == 1
            if alone and not is_dropped(self.ledger):
                self.ledger.fail(error)
                self.discard()
            raise
        return self.step()

    def accumulate(self, batch: Any, micro_batches: int | None = None) -> None:
        """What `train_step` does before `step`: in between, `grads` shows what the step will use."""
        self._refuse_failed()
        micros = batches.micro_batches(batch, micro_batches)
        if self._counts_ahead:
            self.count(micros)
        weights = None if self.ledger.shares.announced is not None else batches.said_weights(self.model, micros)
        if weights is not None:
            self.begin(**weights)
        if self.pipeline is not None:
            self.pipeline.refuse(micros)
            with self.together() as ledger:
                self.pipeline.train(micros, ledger)
            return
        for number, micro in enumerate(micros):
            keeps = self._keeps_local and number < len(micros) - 1
            with self.no_sync() if keeps else nullcontext():
                result = call(self.model, micro)
                if not isinstance(result, Terms):
                    self.backward(*result)
                    continue
                if self.ledger.shares.announced is None:
                    weights = batches.counted_weights(self.model, result, micros[1:], self.mesh.device)
                    self._begin(weights, exact=False)
                self.backward(result)

    def _refuse_failed(self) -> None:
        """After a failed backward: refuse the step together with the other ranks, which meet this one at theirs."""
        if self.ledger.state is State.FAILED:
            self._meet(Status.FINE)

    def count(self, batch: Any, micro_batches: int | None = None) -> None:
        """Before the first forward of a step, on all ranks: what layers must count in the whole step before its first
        backward (experts balanced over the batch), by a pass without gradients. `accumulate` does it by itself."""
        micros = batches.micro_batches(batch, micro_batches)
        with self._tallies.counting():
            if self.pipeline is not None:
                self.pipeline.evaluate(micros)
            for micro in micros if self.pipeline is None else ():
                call(self.model, micro)
            self._meet_units("ends its count")

    def only_looking(self) -> AbstractContextManager[None]:
        """Forwards in here are not the step's: what it was given is kept."""
        return self._inputs.evaluating()

    @torch.no_grad()
    def evaluate(self, batch: Any, micro_batches: int | None = None) -> Evaluation:
        """The mean loss of all data ranks' batches, under any layout; train or eval mode is the caller's choice."""
        micros = batches.micro_batches(batch, micro_batches)
        with self._inputs.evaluating():
            if self.pipeline is None:
                results = [call(self.model, micro) for micro in micros]
            else:
                results = self.pipeline.evaluate(micros)
            mine = torch.cat((evaluation.columns(results, self._device), self._inputs.columns().to(self._device)))
            self._meet_units("ends its evaluation")
            table = torch.stack(raw.gather_list(mine, self.mesh.group("world"))).cpu()
            self._inputs.check(table[:, evaluation.COLUMNS :])
        weight, _, terms = table[:, : evaluation.COLUMNS].unbind(1)
        if not bool(terms.any()):
            return evaluation.of_losses(self._of_data(table)[:, :2])
        if bool(weight.any()):
            raise self.ledger.shares.mixed()
        notes = gather_notes(evaluation.sums_of_terms(results), self.mesh.group("world"), self.mesh.device)
        return evaluation.of_terms(notes[rank] for rank in self._with_own_things)

    def together(self) -> AbstractContextManager[Ledger]:
        """Several runs of autograd that count as one backward: `of_loss` and `run_backward` of what this yields."""
        return self.ledger.backward(self._leave)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here accumulate locally (`accumulate="local"`); the next one outside, or the step, reduces all
        of it once. A backward outside reduces at once, and adds to what its owners have ("sharded")."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def step(self) -> Stats:
        """Settle every gradient, clip, step the optimizer. All ranks step or none does."""
        start.refuse_in_no_sync(self._sync, self.mesh)
        with raw.undivided():
            totals = self._settle(whole=True)
            scale = 1.0 / (totals.weight * totals.loss_scale)
            grad_norm = self._norm() * scale
            ledger, skipped = self.ledger, not math.isfinite(grad_norm)
            self.blame = blame(ledger.paid, totals.losses, ledger.flights.not_finite(), self.mesh) if skipped else None
            factor = min(1.0, self.clip / (grad_norm + 1e-6)) if self.clip is not None else 1.0
        if not skipped:
            try:
                self._optimized.step(ledger, scale * factor, totals.unused)
            except BaseException as error:
                self._end(committed=False)
                self.ledger.spoiled = headline(mark(error, self.ledger))
                raise
        if self.loss_scale:
            self.loss_scale.update(overflow=skipped)
        self._end(committed=not skipped)
        return Stats(totals.loss, grad_norm, totals.weight, skipped, totals.loss_scale, totals.terms)

    def _end(self, committed: bool) -> None:
        self.ledger.clear()
        self._tallies.end(committed=committed)
        self._inputs.clear()

    def held(self, name: str) -> Tensor:
        """What this rank keeps of a parameter between steps: at ZeRO 3 its rows, else all that its contract says."""
        parameter = self.table.records[name].parameter
        return parameter.data if self._units is None else self._units.kept[id(parameter)].rows

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """The model with every parameter whole, at any stage: to look at, save or edit alike on all ranks."""
        if self._units is not None:
            self._units.gather_all()
        try:
            yield self.model
        finally:
            if self._units is not None:
                self._units.take_edits()
            self._optimized.take_edits()

    @torch.no_grad()
    def grads(self) -> Iterator[tuple[str, Tensor]]:
        """Full gradients of the mean loss by name, before clipping, on every rank, one at a time. All ranks iterate."""
        totals = self._settle()
        yield from whole_gradients(self.plan, self.ledger.paid, self.mesh, 1.0 / (totals.weight * totals.loss_scale))

    def _of_data(self, table: Tensor) -> Tensor:
        """Of a row per rank, those of the data ranks whose losses are mine to know: on the last stage."""
        layout = self.mesh.layout
        last = layout.rank({**self.mesh.coordinates, "pp": layout.pp - 1})
        return table[list(layout.ranks(DATA, last))]

    @property
    def _with_own_things(self) -> list[int]:
        """The ranks whose terms are added up: those that hold other data or other stages than this one, and it."""
        return list(self.mesh.ranks(f"{DATA} pp"))

    @property
    def _device(self) -> torch.device:
        return self.plan.slots[0].parameter.device

    def _norm(self) -> float:
        paid, world = self.ledger.paid, self.mesh.group("world")
        rows = [paid[slot] for slot in self._counted if slot in paid and paid[slot].numel()]
        if self.reproducible:
            return norm.reproducible_norm(rows, world, self._device)
        return norm.global_norm(self.ledger.flights.norms.of(rows), world, self._device)

    def _settle(self, whole: bool = False) -> Totals:
        """Learn what all ranks did in this step, and pay every debt. `whole`: all that was announced has come."""
        totals = self._totals(whole)
        if self.ledger.state is not State.SETTLED or totals.unsent:  # perhaps only another rank's are unsent
            self.ledger.settle(flush=totals.unsent)
        return totals

    def _totals(self, whole: bool = False) -> Totals:
        """What the table of this step says."""
        table, shares = self._meet(Status.FINE, whole=whole), self.ledger.shares
        if shares.announced is None:
            weight, losses, terms = float(self._of_data(table.weight).sum()), self._of_data(table.loss), {}
        else:
            weight, losses = shares.weight, table.loss[self._with_own_things]
            terms = shares.means(self._of_terms(table)[self._with_own_things])
        used = used_anywhere(table, self.plan, self.mesh)
        unused = {slot.name for slot, is_used in zip(self.plan.slots, used.tolist(), strict=True) if not is_used}
        scale = self.loss_scale.value if self.loss_scale else 1.0
        loss = float(total(list(losses))) / weight
        return Totals(loss, weight, bool(table.pending.any()), unused, scale, table.loss, terms)

    @raw.undivided()
    def _meet(
        self,
        status: Status,
        *,
        whole: bool = False,
        announces: Mapping[str, float] | None = None,
        wrong: EngineError | None = None,
    ) -> Table:
        """The gather of this step. Where any rank failed, discards or was given wrong input, the step is dropped on all
        ranks; all but those that discard raise. announces: what `begin` was given. wrong: found here already."""
        ledger, shares = self.ledger, self.ledger.shares
        ledger.must_be(State.OPEN, State.SETTLED, State.FAILED)
        wrong = wrong or self._watch.problem(self.mesh) or self._optimized.problem(self.mesh)
        problem = ledger.spoiled or (ledger.failure if wrong is None else str(wrong).splitlines()[0])
        if status not in (Status.DISCARDS, Status.SAVES) and problem is not None:
            status = Status.SPOILED if ledger.spoiled else Status.FAILED
        self._meet_units("comes to engine.begin, step, grads or discard", again=status is Status.DISCARDS)
        if announces is None:
            losses = ledger.told.losses
            own = total(losses) if losses else torch.zeros((), dtype=torch.float64)
            columns = shares.columns()
        else:
            own, columns = shares.message(announces)
        given = self._inputs.columns()
        more = torch.cat((given, columns.to(given.device)))
        settings = self._optimized.settings()
        table = totals.gather(ledger, status, own, more, self._widest, self._device, settings)
        quiet = status is Status.DISCARDS
        try:
            totals.refuse_failed(table, ledger, problem, quiet)
            if not quiet and status is not Status.SAVES:
                self._inputs.check(table.more)
                if status is Status.BEGINS:
                    return table
                totals.refuse_wrong(table, self.mesh)
                if whole:
                    shares.refuse_incomplete(self._of_terms(table))
                self._refuse_no_weight(table)
        except IsogradError as refusal:
            self._drop()
            raise mark(wrong or refusal, self.ledger) from None
        if quiet:
            self._drop()
        return table

    def _of_terms(self, table: Table) -> Tensor:
        """The columns of `Shares` in a table."""
        return table.more[:, len(self._inputs.columns()) :]

    def _meet_units(self, said: str, again: bool = False) -> None:
        """At ZeRO 3, before a collective of all ranks: a rank in another forward would wait there for this one.
        `again`: ranks that were elsewhere hear of it, and are waited for: they come to the same collective next."""
        while self._units is not None:
            try:
                self._units.meet(said)
                return
            except EngineError as error:  # told to the other ranks at the same time, where they were
                self.ledger.fail(error)
                if not again:
                    raise

    def _drop(self) -> None:
        """All ranks together: nothing of this step is left."""
        self.ledger.abandon()
        self._tallies.end(committed=False)
        self._inputs.clear()

    def _refuse_no_weight(self, table: Table) -> None:
        shares = self.ledger.shares
        weights = self._of_data(table.weight if shares.announced is None else shares.announced.sum(1))
        if not float(weights.sum()) > 0:
            raise EngineError(
                "IG512",
                "the step has no weight: no rank contributed a token",
                seen=f"weights per data rank: {weights.tolist()}",
                expected="a positive sum of weights over the data ranks and backwards of a step",
                fix="call engine.backward(loss, weight=count) at least once before engine.step()",
                where=self.mesh.where(),
            )
