"""Engine: backward, step, no_sync. The gradient of one device under every layout.

`backward` seeds the loss with its weight (the number of tokens, rows, ... that it is the mean of) and adds the weight
to a running count. Gradients are sums from there on and nothing divides them until `step` multiplies once by 1 /
(global weight). Uneven ranks, uneven micro-batches and ranks without data are exact by construction.

A step is a transaction. Its state is one object, the step state (engine/step.py, which follows a gradient from autograd
to the optimizer). What every rank must know to decide alike crosses the wire once per step (engine/step_status.py);
then all ranks step, skip or refuse together, and what fails leaves nothing behind. engine/norm.py counts each element
once, engine/zero.py steps. engine/naive.py is what all of this means, in twenty lines.

`train_step` does a whole step under any layout, and is the only way with a pipeline, of which pipeline/run.py is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from isograd.comm import raw
from isograd.comm.consensus import all_gather_object
from isograd.comm.world import abort_group_on_interrupt
from isograd.core.contract_table import ContractTable, contracts
from isograd.core.input_checks import InputChecks
from isograd.core.loss_terms import Terms
from isograd.core.mesh import DATA, Mesh
from isograd.core.step_counters import StepCounters
from isograd.engine import batches, evaluation, muon, step_status, validation
from isograd.engine.decision import Decision
from isograd.engine.evaluation import Evaluation, PendingStats, Stats
from isograd.engine.gathered import State
from isograd.engine.gradients import Gradients
from isograd.engine.plan import homes, make_plan, repeated_blocks, slot_of
from isograd.engine.precision import LossScale
from isograd.engine.reducer import ReduceWhen
from isograd.engine.sdc.reductions import ReductionSums
from isograd.engine.step import StepState
from isograd.engine.step_status import Status, StepStatus
from isograd.engine.term_weights import on_host
from isograd.engine.zero import Factory, ShardedOptimizer
from isograd.engine.zero3.deferred_init import FirstValues
from isograd.engine.zero3.param_group import Zero3Hooks
from isograd.errors import EngineError, IsogradError
from isograd.io.safetensors_reader import Weights


class Engine:
    """Trains a model under any layout with the gradient of one device; see the head of this file."""

    @abort_group_on_interrupt()
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
        matrices: Sequence[str] = (),
        accumulate: Literal["local", "sharded"] = "local",
        elementwise: bool = False,
        accept_weights: bool = False,
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
        matrices: patterns of names; each matrix among them has one owner, for optimizers that need matrices, like Muon.
        accumulate: what `train_step` does with gradients of all but its last micro-batch. "local": kept whole here, and
            reduced once, as in no_sync. "sharded": each reduced into its owners' rows, and freed.
        elementwise: True says of an optimizer that is not torch's that it steps each element by itself (of `matrices`:
            each matrix), so that ranks may step parts of a parameter.
        accept_weights: train weights in which an earlier Engine's optimizer has left half a step (IG559), as they are.
        """
        validation.check_arguments(model, mesh, optimizer)
        validation.detach_previous_engine(model, mesh)
        self.model, self.mesh, self.clip, self.reproducible = model, mesh, clip, reproducible
        options: dict[str, Any] = {"clip": clip, "reproducible": reproducible, "overlap": overlap}
        options |= {"bucket_mb": bucket_mb, "loss_scale": loss_scale}

        def check_locally() -> tuple[ContractTable, dict[str, int | None], FirstValues]:
            validation.check_options(model, mesh, offload, accumulate, options)
            table = contracts(model, mesh)
            validation.refuse_parameters(model, table, mesh)
            return table, muon.owners(table, mesh, matrices), FirstValues(model, table, mesh, weights)

        self.table, owners, first = validation.check_together(check_locally, mesh)
        self.pipeline = validation.pipeline_of(model, mesh)
        widest = validation.widest_stage(self.table, mesh, options)
        validation.warn_of_half_sums(model, mesh)
        stage = mesh.layout.zero
        parts = (repeated_blocks(model) if blocks is None else list(blocks)) if stage == 3 else []
        self.plan = make_plan(self.table, mesh, int(bucket_mb * 2**20), homes(parts), owners)
        validation.check_plan(self.plan, self.table, model, mesh)
        first.fill_buffers(model)
        validation.equal_replicas(model, self.table, mesh)
        fp16 = any(slot.parameter.dtype == torch.float16 for slot in self.plan.slots)
        self._zero3 = None
        if stage == 3:
            slots = {id(slot.parameter): slot for slot in self.plan.slots}
            every = [slots.get(id(record.parameter)) or slot_of(record, mesh) for record in self.table]
            self._zero3 = Zero3Hooks(model, every, mesh, first, blocks=parts, keep=keep_gathered, offload=offload)
        else:
            first.fill(self.table)
        cut = muon.TensorParallelMatrices(self.plan.slots, mesh, owners, stage)
        self._sharded_optimizer = ShardedOptimizer(self.plan, mesh, optimizer, self._zero3, offload, cut, elementwise)
        self.step_state = StepState(
            self.plan,
            mesh,
            reproducible=reproducible,
            keep_full=stage == 0,
            zero3=self._zero3,
            loss_scale=loss_scale or (LossScale() if fp16 else None),
            masters=self._sharded_optimizer.masters,
            widest=widest,
        )
        self._overlap, self._keeps_local = overlap, accumulate == "local"
        self._inputs = InputChecks(model, mesh)
        self._decision = Decision(
            mesh, self._sharded_optimizer, self.step_state, self._inputs, self._decide, self._drop
        )
        self._tallies = StepCounters(model, mesh)
        self._counts_ahead = self._tallies.needs_prepass()
        self._watch = validation.Watch(model, self.plan, moving=stage == 3)
        for slot in self.plan.slots:
            validation.replace_hook(slot, self.step_state, self.step_state.arrived)
        if accept_weights or weights is not None:
            self.step_state.mark_consistent()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer: for learning-rate schedulers and for looking at its state."""
        return self._sharded_optimizer.optimizer

    @property
    def loss_scale(self) -> LossScale | None:
        """That of the step under way, in fp16."""
        return self.step_state.now.loss_scale

    @property
    def _reduce_when(self) -> ReduceWhen:
        """When the buckets of the next backward leave."""
        every_micro = self._zero3 is not None and self.pipeline is not None  # blocks are left once for each of them
        if not (self.step_state.now.syncs and self._overlap) or self.reproducible or every_micro:
            return ReduceWhen.STEP
        # Ranks of a cp or ep group reach parameters at different points of backward. On NCCL a bucket that one of them
        # launches early could take the place of an exchange that the other one waits for.
        unordered = max(self.mesh.size("cp"), self.mesh.size("ep")) > 1 and self.mesh.group(DATA).is_nccl
        return ReduceWhen.BLOCK_DONE if self._zero3 is not None or unordered else ReduceWhen.GRAD_READY

    def backward(self, loss: Tensor | Terms, weight: float | Tensor | None = None) -> None:
        """Add the gradient of loss * weight to the step. `weight`: how many tokens (rows, ...) it is the mean of.

        A loss that is a sum of means of different things is given as `ig.Terms`, whose weights over the whole step are
        announced by `begin`. Without that, the step has this one backward.
        """
        if self.pipeline is not None:  # the model lives on several ranks
            seen = f"backward under {str(self.mesh.layout)!r}"
            raise EngineError("IG521", seen=seen, where=self.mesh.describe_rank())
        if isinstance(loss, Terms):
            self.step_state.now.term_weights.check(loss)  # before the backward begins: nothing is left behind
            self.begin_single_backward(**{name: term.weight for name, term in loss.items()})
            with self.backward_context() as step_state:
                step_state.backward_terms(loss)
            return
        count = validation.weight_of(weight, self.mesh, first=self.step_state.empty)
        validation.check_mean("the loss", loss, count, self.mesh)  # before the backward begins: nothing is left behind
        with self.backward_context() as step_state:
            step_state.backward_loss(loss, count)
            step_state.now.note(weight)

    def begin(self, /, **weights: float | Tensor) -> None:
        """Announce a step of several terms (`ig.Terms`): this rank's weight of each, over all backwards of the step.

        All ranks call it before the first backward, with the same names; `begin(lm=0, balance=0)`, or `begin()`, on a
        rank without data. Each term is divided by the sum of its announced weights over all ranks.
        """
        self._begin(weights, exact=True)

    def _begin(self, weights: Mapping[str, float | Tensor], *, exact: bool, single: bool = False) -> None:
        step_state, term_weights = self.step_state, self.step_state.now.term_weights
        weights = on_host(weights)
        wrong = term_weights.problem(weights)
        if not step_state.empty and step_state.state is not State.FAILED:
            has_losses = step_state.now.losses and term_weights.expected is None
            wrong = term_weights.mixed() if has_losses else EngineError("IG566", where=self.mesh.describe_rank())
        announces = {} if wrong else {name: float(weight) for name, weight in weights.items()}
        if not exact and announces.keys() <= set(term_weights.names):  # the terms of the step before
            announces = {name: announces.get(name, 0.0) for name in term_weights.names}
        table = self._gather_step_status(Status.BEGINS, announces=announces, wrong=wrong)
        with step_status.refusing(step_state, self._drop):
            columns = table.loss, table.more["terms"]
            step_state.change(term_weights=term_weights.agreed(*columns, announces, exact=exact, single=single))

    def begin_single_backward(self, /, **weights: float | Tensor) -> None:
        """Before a backward of terms: unless the step was begun, its weights are the step's, which takes no other."""
        term_weights = self.step_state.now.term_weights
        if term_weights.single_backward:
            seen = "a second backward of terms: the first one's weights are the step's"
            raise EngineError("IG564", seen=seen, where=self.mesh.describe_rank())
        if term_weights.expected is None:
            self._begin(weights, exact=False, single=True)

    def check_sums(self) -> None:
        """Before a step, on all ranks: compare what its reductions send with what they add up (engine/sdc)."""
        self.step_state.change(sums=(sums := ReductionSums()))
        self.mesh.group("world").context.checks.add(sums.messages)

    def discard(self) -> None:
        """Drop all that this step has gathered, on every rank: after a backward that failed, or for a bad batch.

        Every rank calls it. A rank that calls `step` or `grads` instead raises IG558, and its step is dropped, too.
        While an exception is handled whose step is dropped already, `discard` returns at once.
        """
        if not self.step_state.skips_discard():
            self._gather_step_status(Status.DISCARDS)
            self.step_state.mark_discarded()

    def train_step(self, batch: Any, micro_batches: int | None = None) -> Stats:
        """Forward, backward and step of a whole batch of this data rank, cut by rows; a list is taken as it is.

        The model is called with each micro-batch (a dict gives keywords, a tuple positions) and returns (loss, weight)
        or `ig.Terms`. The weights of terms are counted before the first backward: by the model's `term_weights`, called
        like the model, which returns {name: weight} (None: no terms); without it, by a pass without gradients.
        """
        try:
            with self._watch.naming_changes(self.mesh):
                self.accumulate(batch, micro_batches)
            return self.step()  # and nothing behind it, where an exception would pass for one of this step
        except BaseException as error:
            self._tell_others(error)
            raise

    def _tell_others(self, error: BaseException) -> None:
        """Drop the step. Ranks of dp come to its gather, or were in it; others wait in a layer till the next call."""
        connected = self.mesh.size("world") == 1 or self.step_state.status_group.transport is not None
        if self.step_state.already_discarded or not connected:
            return
        if isinstance(error, Exception) and not self.mesh.layers_wait:
            self.step_state.fail(error)
            with suppress(EngineError):  # in place of `error`
                self._refuse_failed()
            self.step_state.mark_discarded(error)
        elif not isinstance(error, IsogradError):
            self.step_state.fail(error)

    def accumulate(self, batch: Any, micro_batches: int | None = None) -> None:
        """What `train_step` does before `step`: in between, `grads` shows what the step will use."""
        self._refuse_failed()
        micros = batches.micro_batches(batch, micro_batches)
        if self._counts_ahead:
            self.count(micros)
        begun = self.step_state.now.term_weights.expected is not None
        if not begun and (weights := batches.said_weights(self.model, micros)) is not None:
            self.begin(**weights)
        if self.pipeline is not None:
            self.pipeline.refuse(micros)
            self._inputs.add(self.model, batch)
            with self.backward_context() as step_state:
                self.pipeline.train(micros, step_state)
            return
        for number, micro in enumerate(micros):
            keeps = self._keeps_local and number < len(micros) - 1
            if number and not self._keeps_local:
                self.step_state.reducer.begin_pass()  # frees what the micro-batch before has packed
            with self.no_sync() if keeps else nullcontext():
                result = batches.loss_of(self.model, micro)
                if isinstance(result, Terms) and self.step_state.now.term_weights.expected is None:
                    weights = batches.counted_weights(self.model, result, micros[1:], self.mesh.device)
                    self._begin(weights, exact=False)
                self.backward(*((result,) if isinstance(result, Terms) else result))

    def _refuse_failed(self) -> None:
        """After a failed backward: refuse the step together with the other ranks, which meet this one at theirs."""
        if self.step_state.state is State.FAILED:
            self._gather_step_status(Status.FINE)

    def count(self, batch: Any, micro_batches: int | None = None) -> None:
        """Before the first forward of a step, on all ranks: what layers must count in the whole step before its first
        backward (experts balanced over the batch), by a pass without gradients. `accumulate` does it by itself."""
        micros = batches.micro_batches(batch, micro_batches)
        with self._tallies.counting():
            if self.pipeline is not None:
                self.pipeline.evaluate(micros)
            for micro in micros if self.pipeline is None else ():
                batches.call(self.model, micro)
            self._check_lockstep("ends its count")

    def untracked_forward(self) -> AbstractContextManager[None]:
        """Forwards in here are not the step's: what it was given is kept."""
        return self._inputs.evaluating()

    @torch.no_grad()
    def evaluate(self, batch: Any, micro_batches: int | None = None) -> Evaluation:
        """The mean loss of all data ranks' batches, under any layout; train or eval mode is the caller's choice."""
        try:
            micros, pipeline = batches.micro_batches(batch, micro_batches), self.pipeline
            with self._inputs.evaluating():
                with abort_group_on_interrupt() if self.mesh.layers_wait else nullcontext():  # for this one's forward
                    self._check_lockstep("begins an evaluation")  # its forwards would pass for those of a step
                    found = pipeline.evaluate(micros) if pipeline else [batches.loss_of(self.model, m) for m in micros]
                    self._inputs.add(self.model, batch)  # of a pipeline; others' forwards have said the same
                device = self.plan.slots[0].parameter.device
                mine = torch.cat((evaluation.columns(found, device), self._inputs.columns().to(device)))
                with abort_group_on_interrupt():
                    self._gather_step_status(Status.EVALUATES)
                    table = raw.gather(mine, self.mesh.group("world")).cpu()
                self._inputs.check(table[:, evaluation.COLUMNS :])
        except BaseException as error:
            self._tell_others(error)
            raise
        weight, _, terms = table[:, : evaluation.COLUMNS].unbind(1)
        if not bool(terms.any()):
            total, loss, *_ = step_status.of_data(table, self.mesh).sum(0).tolist()
            return Evaluation(loss / total if total else math.nan, total)
        if bool(weight.any()):
            raise self.step_state.now.term_weights.mixed()
        notes = all_gather_object(evaluation.sums_of_terms(found), self.mesh)
        return evaluation.of_terms(notes[rank] for rank in step_status.with_own_things(self.mesh))

    @contextmanager
    def backward_context(self) -> Iterator[StepState]:
        """Several runs of autograd that count as one backward: `backward_loss`, `run_backward` of what this yields."""
        name = "isograd: backward" if self.pipeline is None else "isograd: pipeline"
        named = self._watch.naming_changes(self.mesh)
        with record_function(name), named, self.step_state.backward(self._reduce_when) as step_state:
            yield step_state

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here accumulate locally (`accumulate="local"`); the next one outside, or the step, reduces all
        of it once. A backward outside reduces at once, and adds to what its owners have ("sharded")."""
        before = self.step_state.now.syncs
        self.step_state.change(syncs=False)
        try:
            yield
        finally:
            self.step_state.change(syncs=before)

    def step(self) -> Stats:
        """Complete every gradient, clip, step the optimizer. All ranks step or none does."""
        return self._step(may_be_late=False).wait()

    def step_async(self) -> PendingStats:
        """`step` that returns while a card works, if the card can decide alone (engine/decision.py): `wait()` of
        what it returns gives the step's numbers, or raises what was refused. Else the next call of all ranks does, and
        refuses both (IG586). Of a step that was skipped it is not known where its numbers were not finite."""
        return self._step(may_be_late=True)

    def _step(self, may_be_late: bool) -> PendingStats:
        if not self.step_state.now.syncs:
            raise EngineError("IG511", seen="no_sync is still open", where=self.mesh.describe_rank())
        step_state = self.step_state
        with abort_group_on_interrupt():
            table = self._gather_step_status(Status.FINE)  # all ranks go on, or none
            unused = self._reduce(table)  # every sum is complete
            may_be_late = may_be_late and not self._tallies.members
            taken = self._decision.take(table, unused, self.clip, may_be_late=may_be_late)
            problem = None if taken.skipped else step_status.optimizer_problem(step_state, taken.raised)
            if self.loss_scale and problem is None:
                step_state.change(loss_scale=self.loss_scale.after(overflow=taken.skipped))
            step_state.clear(taken.wait if taken.late and problem is None else None)
            self._end(committed=not taken.skipped and problem is None)
        if problem is not None:
            step_state.mark_discarded(problem)
            raise problem
        return PendingStats(taken.wait)

    def _end(self, committed: bool) -> None:
        self._tallies.end(committed=committed)
        self._inputs.clear()

    def local_shard(self, name: str) -> Tensor:
        """What this rank keeps of a parameter between steps: at ZeRO 3 its rows, else all that its contract says."""
        parameter = self.table.records[name].parameter
        return parameter.data if self._zero3 is None else self._zero3.params[id(parameter)].rows

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """The model with all of what ZeRO shards, at any stage: to look at, save or edit alike on all ranks.

        What tp or ep cuts stays cut, and a pipeline rank has its own stages: under tp2 `embed.weight` has half of its
        rows. `assemble(p.detach(), engine.table.records[name].contract, engine.mesh)` of isograd.core.contract,
        called on all ranks, returns the tensor of all tp and ep ranks.
        """
        self.mesh.group("world").refuse_closed()
        outermost = self._zero3 is not None and self._zero3.gather_all()
        try:
            yield self.model
        finally:
            if self._zero3 is not None:
                self._zero3.take_edits(free=outermost)
            self._sharded_optimizer.take_edits()

    @torch.no_grad()
    def grads(self) -> Gradients:
        """Full gradients of the mean loss by name, before clipping; all ranks call it, and look up the same names."""
        meet = partial(self._gather_step_status, Status.READS)
        self._reduce(table := meet())
        totals = self._decision.totals(table)
        return Gradients(self.plan, self.step_state, self.mesh, totals.scale, meet)

    def _reduce(self, table: StepStatus) -> set[str]:
        """Complete every sum; the names of the parameters that no rank has used."""
        step_state, unsent = self.step_state, bool(table.pending.any())
        if step_state.state is not State.REDUCED or unsent:  # perhaps only another rank's are unsent
            step_state.finish_reductions(flush=unsent)
        used = step_status.used_anywhere(table, self.plan, self.mesh).tolist()
        return {slot.name for slot, is_used in zip(self.plan.slots, used, strict=True) if not is_used}

    @abort_group_on_interrupt()
    def _gather_step_status(
        self,
        status: Status,
        look: str = "",
        *,
        announces: Mapping[str, float] | None = None,
        wrong: EngineError | None = None,
    ) -> StepStatus:
        """The gather of this step (engine/step_status.py). announces: what `begin` was given. wrong: found here."""
        step_state, term_weights = self.step_state, self.step_state.now.term_weights
        step_state.must_be(State.OPEN, State.REDUCED, State.FAILED)
        grads = before = None
        if status is not Status.DISCARDS:
            grads = step_state.problem_in_grads()
            before = None if step_state.state is State.FAILED else step_state.now.problem_before(self.mesh)
        if before is not None and status in step_status.TOGETHER:
            raise before
        wrong = wrong or before or self._watch.problem(self.mesh) or self._sharded_optimizer.problem(self.mesh) or grads
        wrong = wrong or validation.clip_problem(self.clip, self.mesh)
        self._check_lockstep("comes to engine.begin, step, grads or discard", status)
        if announces is None:
            own, columns = step_state.now.loss(), term_weights.columns()
        else:
            own, columns = term_weights.message(announces)
        can = self._decision.possible(status is Status.FINE and term_weights.expected is None)
        alike = self.clip, repr(self.loss_scale), step_state.now.sums is not None
        settings, more = self._sharded_optimizer.settings(self.mesh, *alike)
        more |= {"inputs": self._inputs.columns(), "terms": columns, "device": can}
        return step_status.gather_step_status(
            step_state, status, wrong, more, partial(self._decide, status=status), self._drop, own,
            settings, look=look, may_be_late=True,
        )  # fmt: skip

    def _decide(self, table: StepStatus, status: Status) -> None:
        """Refuse, alike on all ranks, what is wrong with a step that no rank has failed in."""
        self._inputs.check(table.more["inputs"])
        if status is not Status.BEGINS:
            term_weights = self.step_state.now.term_weights
            step_status.refuse_wrong(table, self.mesh)
            if status is Status.FINE:
                term_weights.refuse_incomplete(table.more["terms"])
            step_status.refuse_weightless(table, term_weights, self.mesh)

    def _check_lockstep(self, said: str, status: Status = Status.FINE) -> None:
        """At ZeRO 3, before a collective of all ranks: a rank in another forward would wait there for this one.
        Where this one discards, ranks that were elsewhere hear of it, and come to the same collective next."""
        while self._zero3 is not None:
            try:
                self._zero3.wait_for_all(said, status is Status.DISCARDS or self.step_state.state is State.FAILED)
                return
            except EngineError as error:  # told to the other ranks at the same time, where they were
                self.step_state.fail(error)
                if status is not Status.DISCARDS:
                    raise

    def _drop(self) -> None:
        """All ranks together: nothing of this step is left."""
        self.step_state.abandon()
        self._end(committed=False)
