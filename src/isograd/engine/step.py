"""The state of a step: what it has gathered so far, and the only way in. One gradient, from autograd to the optimizer:

1. `backward(reduce_when)` opens the state BACKWARD. Inside it `backward_loss` seeds a loss with its weight,
   `backward_terms` several ones with their shares of the step (engine/term_weights.py), and `run_backward` runs
   autograd. A gradient is a pending sum from here on, and nothing divides it.
2. `arrived`, called by a hook (validation.py): autograd has finished a parameter's gradient. It moves from `.grad` into
   `now.local`, this rank's own sum over the backwards of the step, in fp32 or fp64 (the only one stays in the model's
   dtype until it is packed). `.grad` then refuses to be used.
3. A bucket of gradients leaves `local` for the owners of its rows. `ReduceWhen` says when: with its last gradient
   (GRAD_READY), when backward has left its block (BLOCK_DONE), or at the step (STEP). An autograd hook waits for
   nothing that another rank may not have sent.
4. `finish_reductions`, at the step: what is still here leaves. My rows arrive summed over the data axes. They are
   summed over the other partial axes of the contract (tp, ties): `now.final_shards`. The state is REDUCED.
5. `clear` opens the next step: another `GatheredStep` takes the place of `now`.

    OPEN -> BACKWARD -> OPEN -> ... -> REDUCED -> OPEN      FAILED from anywhere; `abandon` leads from it to OPEN

An exception inside `backward` enters FAILED. A failed step takes no further backward. Ranks learn of it in the gather
of the step (engine/step_status.py), refuse the step together, and `abandon` what it has gathered: reductions under way
are finished, zeros take the place of what ranks have not sent that stopped half way, and all of it is dropped.

Each move empties its source and adds to its target, so backwards that leave at once and backwards that stay may be
mixed in any order, and a gradient that comes late leaves with the next flush.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from isograd.comm import raw
from isograd.comm.fingerprint import fingerprint
from isograd.comm.world import abort_group_on_interrupt
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.engine import validation
from isograd.engine.gathered import AutogradRun, GatheredStep, Inconsistent, Phase, State
from isograd.engine.grad_placeholder import GradPlaceholder, changed_by_hand, set_grads, take_grad
from isograd.engine.plan import Bucket, Plan, Slot
from isograd.engine.precision import LossScale
from isograd.engine.reducer import Reducer, ReduceWhen, zeros_of
from isograd.engine.term_weights import TermWeights, number_on, weighted
from isograd.engine.tree import Tree
from isograd.engine.zero3.param_group import Zero3Hooks
from isograd.errors import EngineError, headline

_DISCARDED = "_isograd_discarded"  # of an exception: the steps that were dropped with it


class StepState:
    """What a step has gathered, in one of four states."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        *,
        reproducible: bool = False,
        keep_full: bool = False,
        zero3: Zero3Hooks | None = None,
        loss_scale: LossScale | None = None,
        masters: Mapping[str, nn.Parameter] | None = None,
        widest: int = 0,
    ) -> None:
        """keep_full: the memory of gradients that have left is kept, for whole gradients to be gathered into.
        widest: how many parameters the stage has that has most; 0: all have as many.
        masters: what the optimizer steps; `.grad` is withheld between backwards, there and of parameters. None: it is
        the caller's."""
        self.plan, self.mesh, self.reproducible, self.zero3 = plan, mesh, reproducible, zero3
        self.keep_full, self.widest = keep_full, widest or len(plan.slots)
        self.made_at = validation.user_line()
        self.taken_over: list[str] = []  # where Engines were made that have taken parameters over
        self.now = GatheredStep(TermWeights(mesh), loss_scale)
        self.left_by_others: set[int] = set()  # values of `ended` behind steps that others discard, in no handler
        self.reducer = Reducer(plan, mesh, tree=reproducible)
        self.status_group = mesh.group("world", "step")  # of the gather of a step; no layer's message travels on it
        self._slots = {id(slot.parameter): slot for slot in plan.slots}
        self._home = {slot: bucket for bucket in plan.buckets for slot in bucket.slots}
        shown = {} if masters is None else {s: dict.fromkeys((s.parameter, masters[s.name])) for s in plan.slots}
        # What withholds `.grad`, once used: of the parameter, and of what is stepped in its place.
        self._placeholders = {s: [(each, GradPlaceholder(each, s.name)) for each in seen] for s, seen in shown.items()}

    @property
    def state(self) -> State:
        """Where the step stands."""
        return self.now.phase.state

    @property
    def optimizer_inconsistent(self) -> str | None:
        """Why no step can be right until a checkpoint is loaded."""
        return None if self.now.inconsistent is None else self.now.inconsistent.why

    @contextmanager
    def backward(self, reduce_when: ReduceWhen) -> Iterator[StepState]:
        """One backward or several that count as one: of each gradient one reduction."""
        try:
            self.begin(reduce_when)
            yield self
            self.end()
        except BaseException as error:
            self.fail(error)
            if self.mesh.on_cards and self.mesh.layers_wait:  # kernels of other ranks wait for its messages
                with abort_group_on_interrupt():
                    raise
            raise

    def change(self, **fields: Any) -> None:
        """Make `now` anew with other values in these fields. Only its tables and lists are added to in place."""
        self.now = replace(self.now, **fields)

    def mark_inconsistent(self, why: str) -> None:
        """Copies of parameters may differ: no step is right until a checkpoint is loaded."""
        if self.now.inconsistent is None:  # before others' optimizers write, there are no versions to remember
            versions = {id(slot.parameter): slot.parameter._version for slot in self._placeholders}
            self.change(inconsistent=Inconsistent(why, versions))

    def shows_own_sum(self, parameter: Tensor) -> bool:
        """Whether `.grad` shows this rank's own sum: to the caller of a front, between backwards."""
        return not self._placeholders and self._slots.get(id(parameter)) in self.now.local

    def torn(self, parameter: Tensor) -> str | None:
        """Why this parameter may have half a step, if it does and nothing has been written into it since then."""
        found, version = self.now.inconsistent, parameter._version
        same = found is not None and found.versions.get(id(parameter), version) == version
        return found.why if found is not None and same else None

    def mark_consistent(self) -> None:
        """They are equal again, on all ranks, and what a step before has left unread is not of them."""
        self.change(inconsistent=None, before=None)

    def fail(self, reason: BaseException | str) -> None:
        """The step cannot be finished; ranks are told at its gather."""
        why = self.now.phase.failure or (headline(reason) if isinstance(reason, BaseException) else reason)
        self.change(phase=replace(self.now.phase, state=State.FAILED, failure=why))

    def backward_loss(self, loss: Tensor, weight: Tensor | float, *, last: bool = True) -> bool:
        """Backward from a loss: gradients of loss * weight. `last`: they may leave. False: they count for nothing."""
        self.must_be(State.BACKWARD)
        if self.now.term_weights.expected is not None:
            raise self.now.term_weights.mixed()
        validation.check_mean("the loss", loss, weight, self.mesh)
        count = number_on(loss.device, weight)
        nothing = validation.adds_nothing(loss, weight, self.mesh)
        if not nothing or self.zero3 is not None:  # at ZeRO 3 the other ranks gather parameters with this one
            on_card = isinstance(weight, Tensor) and weight.device.type != "cpu"
            self._seeded(loss, count, last=last, discard=nothing, counts=not on_card and bool(weight))
        self.add_weight(count, loss)
        return not nothing

    def add_weight(self, weight: Tensor | float, loss: Tensor | None = None) -> None:
        """Of a backward, and its loss where that is not told by others."""
        self.change(weight=self.now.weight + weight)
        if loss is not None:
            self.now.losses.append(weighted(loss.detach().double().reshape(()), torch.as_tensor(weight)))

    def backward_discarded(self, loss: Tensor, weight: Tensor | float) -> None:
        """Backward from a loss as `backward_loss` does it; the step gathers nothing but prints of it."""
        self._seeded(loss, number_on(loss.device, weight), last=False, discard=True)

    def backward_terms(self, terms: Terms, *, last: bool = True) -> bool:
        """Backward from the terms of a loss, in one run of autograd; each is seeded with its share of the step."""
        self.must_be(State.BACKWARD)
        roots, seeds, left_out, loss = self.now.term_weights.seeds(terms)
        self.now.losses.append(loss)
        if self.zero3 is not None and left_out:
            if roots:  # other ranks gather parameters with this backward
                raise validation.needed_elsewhere(left_out[0], self.mesh)
            self.run_backward(left_out, [torch.zeros_like(root) for root in left_out], last=last, discard=True)
        elif len(roots) == 1:
            self._seeded(roots[0], seeds[0], last=last, discard=False)
        else:
            self.run_backward(roots, self._as_gradients(roots, seeds), last=last)
        return bool(roots)

    def seeds_of(self, terms: Terms) -> tuple[list[Tensor], list[Tensor]]:
        """Terms as (roots, their gradients), which `run_backward` takes together with others."""
        self.now.term_weights.refuse_half(terms)
        roots, seeds, _, loss = self.now.term_weights.seeds(terms)
        self.now.losses.append(loss)
        return roots, self._as_gradients(roots, seeds)

    def _as_gradients(self, roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor]:
        return [(seed * self.now.scale).to(root.dtype).expand_as(root) for root, seed in zip(roots, seeds, strict=True)]

    def _seeded(self, loss: Tensor, count: Tensor, *, last: bool, discard: bool, counts: bool = False) -> None:
        """`counts`: the host knows that the weight is not zero."""
        seed, factor = count * self.now.scale, None
        if loss.dtype in (torch.float16, torch.bfloat16):  # 1,003 would become 1,000: seed with a power of two
            validation.refuse_half_loss(loss, self.mesh, in_one_run=last or discard)
            largest = 15.0 if loss.dtype == torch.float16 else 100.0
            power = torch.exp2(torch.log2(seed.clamp(min=1e-30)).floor().clamp(max=largest))
            seed, factor = power, (seed / power).to(torch.float32)
        # A weight on a GPU is not looked at, which would make the GPU wait.
        no_loss = (count == 0) & ~loss.detach().isfinite() if count.device.type != "cpu" and not counts else None
        seeds = [seed.to(loss.dtype).expand_as(loss)]
        self.run_backward([loss], seeds, last=last, discard=discard, factor=factor, no_loss=no_loss)

    def run_backward(
        self,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor],
        *,
        last: bool = True,
        discard: bool = False,
        **of_half: Tensor | None,
    ) -> None:
        """Autograd from these roots. `last`: no later run of this backward reaches the same parameters, so that their
        buckets may leave. `discard`: for the other ranks only, which gather parameters with this one (ZeRO 3)."""
        self.must_be(State.BACKWARD)
        if not roots:
            return
        with self._running(AutogradRun(last and self.now.phase.when is not ReduceWhen.STEP, discard, **of_half)):
            torch.autograd.backward(roots, seeds)

    @contextmanager
    def join_backward(self, loss: Tensor, weight: Tensor | float) -> Iterator[None]:
        """Another engine's backward in here, of a loss that reaches these parameters, is this step's, too."""
        with self._running(AutogradRun(reduces=False, discard=validation.adds_nothing(loss, weight, self.mesh))):
            yield
        self.add_weight(number_on(loss.device, weight), loss)

    @contextmanager
    def _running(self, run: AutogradRun) -> Iterator[None]:
        if self.zero3 is not None:
            self.zero3.begin_backward(self._on_block_done if run.reduces else None)
        try:
            self.change(phase=replace(self.now.phase, run=run))
            yield
        finally:
            self.change(phase=replace(self.now.phase, run=None))
            if self.zero3 is not None:  # it tells the other ranks when an exception is on its way
                self.zero3.end_backward()

    def accepts_split_grads(self, parameter: Tensor) -> bool:
        """Whether a gradient of this parameter may come later than autograd's: it is ours, without others' hooks."""
        slot = self._slots.get(id(parameter))
        return slot is not None and not validation.is_watched(slot.parameter)

    @torch.no_grad()
    def accumulate_weight_grad(self, parameter: Tensor, gradient: Tensor, *, last: bool) -> None:
        """A gradient of such a parameter that came later (nn/split_backward.py). `last`: as in `run_backward`."""
        self.must_be(State.BACKWARD)
        self._add(slot := self._slots[id(parameter)], gradient)
        if last and self.now.phase.when is ReduceWhen.GRAD_READY:
            self.on_grad_ready(slot)

    def _add(self, slot: Slot, gradient: Tensor) -> None:
        discards = self.now.phase.run is not None and self.now.phase.run.discard
        if self.now.prints is not None and (discards or not self.now.losses):
            self.now.prints.setdefault(slot, fingerprint(gradient))
        if not discards:
            self.collect(slot, gradient)

    def begin(self, reduce_when: ReduceWhen) -> None:
        """For a front whose backward is run by others; else `backward`."""
        self.must_be(State.OPEN, State.REDUCED)
        if (error := self.problem_in_grads()) is not None:
            self.fail(error)
            if self.zero3 is not None:  # the others may have begun theirs, and wait for this rank
                self.zero3.abort(headline(error))
            raise error
        set_grads((slot.parameter, None) for slot in self.now.used & self._placeholders.keys())
        unsent = [] if reduce_when is ReduceWhen.STEP else list(self.plan.buckets)
        phase = Phase(State.BACKWARD, None, reduce_when, unsent, {b: set(b.slots) for b in unsent})
        self.change(phase=phase, synced_backwards=self.now.synced_backwards + bool(unsent))
        if unsent:
            self.reducer.begin_pass()

    def must_be(self, *states: State) -> None:
        """Refuse what the state of the step does not allow."""
        if self.taken_over:
            raise EngineError("IG578", where=self.mesh.describe_rank(), old=self.made_at, new=self.taken_over[-1])
        if self.state in states:
            return
        if self.state is State.FAILED:
            self.status_group.refuse_closed()  # nothing can drop the step
            if self.zero3 is not None:  # the others may have begun theirs, and wait for this rank
                self.zero3.abort("refused a backward: an earlier one had failed")
            raise EngineError("IG550", seen=self.now.phase.failure, where=self.mesh.describe_rank(), failed="this rank")
        allowed = " or ".join(state.value for state in states)
        raise EngineError("IG552", where=self.mesh.describe_rank(), state=self.state.value, allowed=allowed)

    def problem_in_grads(self) -> EngineError | None:
        """The one question wherever a step is entered or left: is what the user sees in `.grad` what will be applied?
        Gradients are here, and some have left: zero_grad would drop nothing, and a tensor put there would be added."""
        changed = sorted(
            slot.name
            for slot, shown in self._placeholders.items()
            if any(p.grad is not (stand_in if slot in self.now.used else None) for p, stand_in in shown)
        )
        told = changed and self.state is not State.FAILED
        return changed_by_hand(f"gradients of {changed[:6]}", self.mesh.describe_rank()) if told else None

    def arrived(self, slot: Slot, _: Tensor) -> None:
        """Called when a gradient has been accumulated into `slot.parameter.grad`."""
        gradient, phase = take_grad(slot.parameter), self.now.phase
        if phase.run is None:
            raise EngineError("IG510", where=self.mesh.describe_rank(), name=slot.name, made_at=self.made_at)
        if gradient is not None:
            self._add(slot, gradient)
        if phase.run.reduces and phase.when is ReduceWhen.GRAD_READY:
            self.on_grad_ready(slot)

    def collect(self, slot: Slot, gradient: Tensor) -> None:
        """Add to this rank's own sum."""
        self.now.used.add(slot)
        before, run = self.now.local.get(slot), self.now.phase.run
        if run is not None and run.factor is not None:
            gradient = gradient.to(slot.dtype) * run.factor.to(slot.dtype)
        if run is not None and run.no_loss is not None:
            gradient = torch.where(run.no_loss, gradient.new_zeros(()), gradient)
        if self.reproducible or self.keep_full:  # else half precision is cast as its bucket is packed
            gradient = gradient.to(slot.dtype)
        self.now.local[slot] = gradient if before is None else before.to(slot.dtype).add_(gradient)

    def on_grad_ready(self, slot: Slot) -> None:
        """GRAD_READY: this backward has finished the slot's gradient. Buckets leave in the plan's order."""
        unsent, missing = self.now.phase.unsent, self.now.phase.missing
        missing[self._home[slot]].discard(slot)
        while unsent and not missing[unsent[0]]:
            self._launch(unsent.pop(0))

    def _on_block_done(self, parameters: set[int]) -> None:
        """BLOCK_DONE: backward has left these parameters (ids) behind, on every data rank at the same point: all their
        buckets leave, whether this rank has used them or not."""
        self.reducer.next_block()
        for bucket in list(self.now.phase.unsent):
            if all(id(slot.parameter) in parameters for slot in bucket.slots):
                self.now.phase.unsent.remove(bucket)
                self._launch(bucket)

    @torch.no_grad()
    def end(self) -> None:
        """The backward is over: buckets that it has not sent leave, or their gradients stay in `local`."""
        if self.reproducible:
            self.now.tree.grow([self._pop(slot) for slot in self.plan.slots])
        else:
            self._flush(self.now.phase.unsent)
        if self.zero3 is not None:
            self.zero3.all_ended()
        set_grads(pair for slot in self.now.used for pair in self._placeholders.get(slot, ()))
        self.change(phase=Phase())

    def _flush(self, unsent: list[Bucket]) -> None:
        if unsent and self.zero3 is not None:
            self.zero3.all_ended()  # and so they launch the same buckets
            self.reducer.next_block()
        while unsent:
            self._launch(unsent.pop(0))

    def _launch(self, bucket: Bucket) -> None:
        gradients = [self._pop(slot) for slot in bucket.slots]
        if self.keep_full:
            self.now.full.update(zip(bucket.slots, gradients, strict=True))
        self.reducer.launch(bucket, gradients, self.now.sums)

    def _pop(self, slot: Slot) -> Tensor:
        """A gradient out of `now.local`; zeros for a parameter that this rank did not use."""
        gradient = self.now.local.pop(slot, None)
        return zeros_of(slot) if gradient is None else gradient.contiguous()

    @torch.no_grad()
    def finish_reductions(self, flush: bool) -> None:
        """Complete every sum. `flush`, the same on all ranks: some rank holds gradients that have not left."""
        self.must_be(State.OPEN, State.REDUCED)
        if flush:
            if self.now.tree:
                self.change(local=dict(zip(self.plan.slots, self.now.tree.cut(), strict=True)))
            self._flush(list(self.plan.buckets))
        with record_function("isograd: reduce gradients"):
            self.reducer.finish_all()
        if (sums := self.now.sums) is not None:
            self.change(sums=None)
            self.status_group.context.checks.discard(sums.messages)  # an error may hold them
            sums.check(self.reducer.groups.values(), self.mesh)
        reduced = {slot: self.reducer.reduced.pop(slot) for slot in list(self.reducer.reduced)}
        # Sorted, because the two stages of a tie hold it at different places among their parameters.
        for axes in sorted({axes for slot in reduced for axes in slot.contract.partial_over}, reverse=True):
            owing = sorted((slot for slot in reduced if axes in slot.contract.partial_over), key=lambda slot: slot.name)
            self._all_reduce_partials(axes, owing, reduced)
        before = self.now.final_shards
        shards = {slot: before[slot].add_(rows) if slot in before else rows for slot, rows in reduced.items()}
        self.change(final_shards=before | shards, phase=Phase(State.REDUCED))

    def _all_reduce_partials(self, axes: str, slots: Sequence[Slot], reduced: dict[Slot, Tensor]) -> None:
        """Sum the rows of these slots over `axes`, in as few messages as there are dtypes."""
        by_dtype: dict[torch.dtype, list[Slot]] = {}
        for slot in slots:
            by_dtype.setdefault(slot.dtype, []).append(slot)
        for owing in by_dtype.values():
            rows = [reduced[slot] for slot in owing]
            total = raw.all_reduce(torch.cat([r.reshape(-1) for r in rows]), self.mesh.group(axes))
            for slot, row, part in zip(owing, rows, total.split([r.numel() for r in rows]), strict=True):
                reduced[slot] = part.view(row.shape)

    @property
    def empty(self) -> bool:
        """Whether nothing of a step is under way."""
        now, announced = self.now, self.now.term_weights.expected is not None
        return self.state is State.OPEN and not (announced or now.losses or now.synced_backwards or now.pending())

    def clear(self, unread: Callable[[], object] | None = None) -> None:
        """Everything of this step is dropped, and the next one is open. Nothing may be on its way. unread: waits for
        what the card says of this step, and raises what is refused."""
        set_grads((parameter, None) for shown in self._placeholders.values() for parameter, _ in shown)
        self.reducer.clear()
        self.now = self.now.next_step(unread)

    def abandon(self) -> None:
        """All ranks together: drop the step. What is on its way lands first, and nothing of it is kept."""
        self.change(tree=Tree(), local={}, final_shards={}, full={})  # now: one may be out of memory
        self.reducer.send_missing(self.mesh)
        self.reducer.finish_all()
        if self.zero3 is not None:
            self.zero3.abort()
        self.clear(self.now.before)

    def mark_discarded(self, error: BaseException | None = None) -> None:
        """All ranks have just dropped a step, in their one gather: the rank that failed called `discard` there, and the
        others `step`, which was refused. Where all call `discard` in the handler of their exception, a second gather
        would drop the next step of the first one. So the exception (left out: the one that is handled) carries the
        number of the step that was dropped with it. Numbers only: it must not hold a model, and may be pickled."""
        error = error or sys.exception()
        with suppress(AttributeError):  # no exception, or one of a class with __slots__
            setattr(error, _DISCARDED, {*getattr(error, _DISCARDED, ()), (id(self), self.now.ended)})

    def skips_discard(self) -> bool:
        """Asked by `discard`: whether all ranks have dropped that step. Behind a handler no exception tells: where the
        rank that failed has called it there, the first call after the refusal is for the same step."""
        behind = sys.exception() is None and self.now.ended in self.left_by_others and self.empty
        self.left_by_others.clear()
        return behind or self.already_discarded

    @property
    def already_discarded(self) -> bool:
        """Whether the program handles the refusal of a step after which nothing has happened here. Nothing is there to
        drop, either, when no step is taken any more, which all ranks know or learn at their next step."""
        error, found = sys.exception(), self.optimizer_inconsistent is not None
        while error is not None and not found:
            found = (id(self), self.now.ended) in getattr(error, _DISCARDED, ())
            error = error.__context__
        return found and self.empty
