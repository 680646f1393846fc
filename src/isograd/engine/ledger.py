"""The ledger of a step: what it has gathered so far, and the only way in. One gradient, from autograd to the optimizer:

1. `backward(leave)` opens the state BACKWARD. Inside it `of_loss` seeds a loss with its weight, `of_terms` several ones
   with their shares of the step (engine/shares.py), and `run_backward` runs autograd. A gradient is a pending sum from
   here on, and nothing divides it.
2. `_arrived`: autograd has finished a parameter's gradient. It moves from `.grad` into `local`, this rank's own sum
   over the backwards of the step, in fp32 (fp64 in fp64 models). `.grad` then holds a stand-in that refuses to be used.
3. A bucket of gradients leaves `local` for the owners of its rows. `Leave` says when: with its last gradient (EAGER),
   when backward has left its block (BY_BLOCK), or at the step (AT_END). Nothing that another rank may not have sent is
   waited for inside an autograd hook.
4. `settle`, at the step: what is still here leaves; everything lands as `due`, my rows summed over the data axes; the
   other debts of the contract (tp, ties) are summed on those rows, which makes them `paid`. The state is SETTLED.
5. `clear` opens the next step.

    OPEN -> BACKWARD -> OPEN -> ... -> SETTLED -> OPEN      FAILED from anywhere; `abandon` leads from it to OPEN

An exception inside `backward` enters FAILED. A failed step takes no further backward. Ranks learn of it in the gather
of the step (engine/totals.py), refuse the step together, and `abandon` what it has gathered: what is on its way lands,
on ranks that stopped half way zeros take the place of what they have not sent, and all of it is dropped.

Each move empties its source and adds to its target, so backwards that leave at once and backwards that stay may be
mixed in any order, and a gradient that comes late leaves with the next flush.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from isograd import matmul
from isograd.comm import raw
from isograd.engine import heap, start
from isograd.engine.flights import Flights, zeros_of
from isograd.engine.plan import Bucket, Plan, Slot
from isograd.engine.precision import LossScale
from isograd.engine.shares import Shares, weighted
from isograd.engine.transport import Pieces
from isograd.engine.tree import Tree
from isograd.engine.units import Units
from isograd.engine.withheld import Withheld
from isograd.errors import EngineError, headline
from isograd.mesh import Mesh
from isograd.terms import Terms


class State(Enum):
    """Where a step stands. Each method of the ledger asserts the states that it may be called in."""

    OPEN = "open"  # between backwards
    BACKWARD = "in a backward"
    SETTLED = "settled"  # every debt is paid; a further backward opens it again
    FAILED = "failed"  # takes nothing more; all ranks refuse the step


class Leave(Enum):
    """When the buckets of a backward leave for their owners. The same on all data ranks."""

    EAGER = "with their last gradient, in the order of the plan"
    BY_BLOCK = "when backward has left their block, and at its end"
    AT_END = "at the step, or with the next backward that lets them"


@dataclass
class Contributions:
    """The losses of a step on this rank."""

    weight: Tensor | float = 0.0
    losses: list[Tensor] = field(default_factory=list)  # weighted, one per backward


class Ledger:
    """What a step has gathered, in one of four states."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        *,
        reproducible: bool = False,
        keep_full: bool = False,
        units: Units | None = None,
        loss_scale: LossScale | None = None,
        withholds: bool = True,
    ) -> None:
        """keep_full: the memory of gradients that have left is kept, for whole gradients to be gathered into.
        withholds: False leaves `.grad` between backwards to the caller."""
        self.plan, self.mesh, self.reproducible, self.units = plan, mesh, reproducible, units
        self.keep_full, self.loss_scale = keep_full, loss_scale
        self.state = State.OPEN
        self.failure: str | None = None  # why the state is FAILED
        self.spoiled: str | None = None  # why no step can be right until a checkpoint is loaded
        self.told = Contributions()
        self.shares = Shares(mesh)  # of the terms of a step that has several
        self.ended = 0  # steps that were taken or dropped
        self.passes = 0  # backwards of this step whose buckets left, which every owner must run equally often
        self.local: dict[Slot, Tensor] = {}  # my own gradients, not reduced
        self.paid: dict[Slot, Tensor] = {}  # my rows, all debts settled
        self.full: dict[Slot, Tensor] = {}  # memory of a whole gradient
        self.used: set[Slot] = set()  # reached by a backward of this step on this rank
        self.flights = Flights(plan, mesh, tree=reproducible, in_place=keep_full)
        self.watcher: Callable[[Slot, Tensor], None] | None = None  # sees each gradient as autograd has made it
        self._tree = Tree()
        self._leave = Leave.AT_END
        self._running = self._leaves = self._dropped = False  # of the run of autograd under way
        self._factor: Tensor | None = None  # that a half-precision loss could not be seeded with
        self._no_loss: Tensor | None = None  # on a GPU: whether the loss is a mean over nothing
        self._unsent: list[Bucket] = []  # of this backward, in the order in which they leave
        self._missing: dict[Bucket, int] = {}  # gradients that this backward has not finished
        self._reached: set[Slot] = set()  # by this backward
        self._slots = {id(slot.parameter): slot for slot in plan.slots}
        self._home = {slot: bucket for bucket in plan.buckets for slot in bucket.slots}
        # Whose `.grad` is withheld, and by what: the parameter's, and that of what the optimizer steps in its place.
        self._shown: dict[Slot, list[tuple[nn.Parameter, Withheld]]] = {
            slot: [(slot.parameter, Withheld(slot.parameter, slot.name))] for slot in plan.slots if withholds
        }
        self._withheld: set[Slot] = set()  # whose `.grad` is a stand-in
        heap.keep(mesh.device)

    def shows(self, masters: dict[str, nn.Parameter]) -> None:
        """Tensors that the optimizer steps in place of parameters: their `.grad` is withheld, too."""
        for slot, seen in self._shown.items():
            if masters[slot.name] is not slot.parameter:
                seen.append((masters[slot.name], Withheld(masters[slot.name], slot.name)))

    # -- 1. the only way in

    @contextmanager
    def backward(self, leave: Leave) -> Iterator[Ledger]:
        """One backward or several that count as one: of each gradient one reduction."""
        try:
            self.begin(leave)
            yield self
            self.end()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._running = False

    def fail(self, reason: BaseException | str) -> None:
        """The step cannot be finished; ranks are told at its gather."""
        if isinstance(reason, BaseException):
            reason = headline(reason)
        self.state, self.failure = State.FAILED, self.failure or reason

    def of_loss(self, loss: Tensor, weight: Tensor | float, *, last: bool = True) -> bool:
        """Backward from a loss: gradients of loss * weight. `last`: they may leave. False: they count for nothing."""
        self.must_be(State.BACKWARD)
        if self.shares.announced is not None:
            raise self.shares.mixed()
        start.check_loss(loss, weight, self.mesh)
        count = torch.as_tensor(weight, dtype=torch.float64, device=loss.device).detach().reshape(())
        nothing = start.adds_nothing(loss, weight, self.mesh)
        if not nothing or self.units is not None:  # at ZeRO 3 the other ranks gather parameters with this one
            self._seeded(loss, count, last=last, discard=nothing)
        self.told.weight = self.told.weight + count
        self.told.losses.append(weighted(loss.detach().double().reshape(()), count))
        return not nothing

    def of_nothing(self, loss: Tensor, weight: Tensor | float) -> None:
        """Backward from a loss as `of_loss` does it; the step gathers nothing of it. For `watcher`."""
        self.must_be(State.BACKWARD)
        count = torch.as_tensor(weight, dtype=torch.float64, device=loss.device).detach().reshape(())
        self._seeded(loss, count, last=False, discard=True)

    def of_terms(self, terms: Terms, *, last: bool = True) -> bool:
        """Backward from the terms of a loss, in one run of autograd; each is seeded with its share of the step."""
        self.must_be(State.BACKWARD)
        roots, seeds, left_out = self._shares_of(terms)
        if self.units is not None and left_out and roots:  # other ranks gather parameters with this backward
            raise start.needed_elsewhere(left_out[0], self.mesh)
        if self.units is not None and left_out:
            self.run_backward(left_out, [torch.zeros_like(root) for root in left_out], last=last, discard=True)
        elif len(roots) == 1:
            self._seeded(roots[0], seeds[0], last=last, discard=False)
        else:
            self.run_backward(roots, self._as_gradients(roots, seeds), last=last)
        return bool(roots)

    def seeds_of(self, terms: Terms) -> tuple[list[Tensor], list[Tensor]]:
        """Terms as (roots, their gradients), which `run_backward` takes together with others."""
        self.shares.refuse_half(terms)
        roots, seeds, _ = self._shares_of(terms)
        return roots, self._as_gradients(roots, seeds)

    def _shares_of(self, terms: Terms) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        roots, seeds, left_out, loss = self.shares.seeds(terms)
        if left_out and start.others_need(self.mesh):
            raise start.needed_elsewhere(left_out[0], self.mesh)
        self.told.losses.append(loss)
        return roots, seeds, left_out

    def _as_gradients(self, roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor]:
        scale = self.loss_scale.value if self.loss_scale else 1.0
        return [(seed * scale).to(root.dtype).expand_as(root) for root, seed in zip(roots, seeds, strict=True)]

    def _seeded(self, loss: Tensor, count: Tensor, *, last: bool, discard: bool) -> None:
        seed = count * (self.loss_scale.value if self.loss_scale else 1.0)
        if loss.dtype in (torch.float16, torch.bfloat16):  # 1,003 would become 1,000: seed with a power of two
            start.refuse_half_loss(loss, self.mesh, in_one_run=last or discard)
            largest = 15.0 if loss.dtype == torch.float16 else 100.0
            power = torch.exp2(torch.log2(seed.clamp(min=1e-30)).floor().clamp(max=largest))
            seed, self._factor = power, (seed / power).to(torch.float32)
        if count.device.type != "cpu":  # it is not looked at, which would make the GPU wait
            self._no_loss = (count == 0) & ~loss.detach().isfinite()
        try:
            self.run_backward([loss], [seed.to(loss.dtype).expand_as(loss)], last=last, discard=discard)
        finally:
            self._factor = self._no_loss = None

    def run_backward(
        self, roots: Sequence[Tensor], seeds: Sequence[Tensor], *, last: bool = True, discard: bool = False
    ) -> None:
        """Autograd from these roots. `last`: no later run of this backward reaches the same parameters, so that their
        buckets may leave. `discard`: for the other ranks only, which gather parameters with this one (ZeRO 3)."""
        self.must_be(State.BACKWARD)
        if not roots:
            return
        self._leaves = last and self._leave is not Leave.AT_END
        self._running, self._dropped = True, discard
        if self.units is not None:
            self.units.begin_backward(self._left if self._leaves else None)
        try:
            torch.autograd.backward(roots, seeds)
        finally:
            self._running = self._leaves = self._dropped = False
            if self.units is not None:  # it tells the other ranks when an exception is on its way
                self.units.end_backward()

    def takes_products(self, parameter: Tensor) -> bool:
        """Whether gradients may come past autograd: no bit depends on it, and no rank waits for a backward of this."""
        alone = self.units is None or self._leave is Leave.AT_END
        return alone and not self.reproducible and self.delays(parameter)

    def delays(self, parameter: Tensor) -> bool:
        """Whether a gradient of this parameter may come later than autograd's: it is ours, without others' hooks."""
        slot = self._slots.get(id(parameter))
        return slot is not None and not start.is_watched(slot.parameter)

    @torch.no_grad()
    def of_product(self, parameter: Tensor, a: Tensor, b: Tensor, *, last: bool = False) -> None:
        """The gradient a @ b of a parameter, which autograd has left to the caller. `last`: as in `run_backward`."""
        if not self._running and not self.takes_products(parameter):
            self.run_backward([parameter], [matmul.gradient(a, b)], last=last)
            return
        self.must_be(State.BACKWARD)
        slot = self._slots[id(parameter)]
        before = self.local.get(slot)
        if before is None or a.dtype != slot.dtype or self._watched():
            self._taken_in(slot, matmul.gradient(a, b))
        elif not self._dropped:
            self.used.add(slot)
            matmul.add(before, a, b)
        if last and self._leave is Leave.EAGER:
            self.passed_by(slot)

    @torch.no_grad()
    def of_rows(self, parameter: Tensor, rows: Tensor, values: Tensor) -> None:
        """A gradient that is zero but for these rows (one may come twice)."""
        self.must_be(State.BACKWARD)
        slot = self._slots[id(parameter)]
        before = self.local.get(slot)
        if before is None or self._watched():
            self._taken_in(slot, zeros_of(slot).index_put_((rows,), values.to(slot.dtype), accumulate=True))
        elif not self._dropped:
            self.used.add(slot)
            self._widened(slot, before).index_put_((rows,), values.to(slot.dtype), accumulate=True)

    def _watched(self) -> bool:
        """Whether each gradient is wanted by itself."""
        return self.watcher is not None or self._factor is not None or self._no_loss is not None

    def _taken_in(self, slot: Slot, gradient: Tensor) -> None:
        if self.watcher is not None:
            self.watcher(slot, gradient)
        if not self._dropped:
            self.collect(slot, gradient)

    def begin(self, leave: Leave) -> None:
        """For a front whose backward is run by others; else `backward`."""
        self.must_be(State.OPEN, State.SETTLED)
        self._refuse_cleared()
        for slot in self._withheld:
            slot.parameter.grad = None
        self.state, self._leave, self._withheld = State.BACKWARD, leave, set()
        self._leaves = leave is not Leave.AT_END
        if leave is not Leave.AT_END:
            self.passes += 1
            self.flights.begin_pass()
            self._unsent, self._reached = list(self.plan.buckets), set()
            self._missing = {bucket: len(bucket.slots) for bucket in self.plan.buckets}

    def must_be(self, *states: State) -> None:
        """Refuse what the state of the step does not allow."""
        if self.state in states:
            return
        if self.state is State.FAILED:
            if self.units is not None:  # the others may have begun theirs, and wait for this rank
                self.units.abort("refused a backward: an earlier one had failed")
            raise EngineError(
                "IG550",
                "a backward of this step failed; the step takes no further one",
                seen=self.failure,
                expected="the failed step to be dropped before the next one begins",
                fix="call engine.discard() on every rank (engine.step() refuses the step on every rank), then go on",
                where=self.mesh.where(),
            )
        raise EngineError(
            "IG552",
            f"the step is {self.state.value}",
            seen="a backward inside another one, or a step inside a backward",
            expected=f"the step to be {' or '.join(state.value for state in states)}",
            where=self.mesh.where(),
        )

    def _refuse_cleared(self) -> None:
        """zero_grad in the middle of a step would drop nothing: the gradients are here, and some have left."""
        cleared = [s.name for s in self._withheld if any(p.grad is not put for p, put in self._shown[s])]
        if cleared:
            error = EngineError(
                "IG553",
                "gradients were cleared or replaced by hand in the middle of a step",
                seen=f"zero_grad(), or an assignment to .grad, of {sorted(cleared)[:6]}",
                expected="engine.discard(), which drops the step on every rank",
                where=self.mesh.where(),
            )
            self.fail(error)
            raise error

    # -- 2. autograd has finished a gradient

    def hook(self, slot: Slot) -> Callable[[Tensor], None]:
        """What is called when a gradient has been accumulated into `slot.parameter.grad`."""

        def arrived(_: Tensor) -> None:
            self._arrived(slot)

        return arrived

    def _arrived(self, slot: Slot) -> None:
        gradient, slot.parameter.grad = slot.parameter.grad, None
        if not self._running:
            raise EngineError(
                "IG510",
                f"a gradient of {slot.name!r} arrived outside engine.backward, and was left out",
                seen="loss.backward() or torch.autograd.backward on parameters that an Engine holds",
                expected="engine.backward(loss, weight=...), which knows the weight of the loss",
                fix="a loss of another engine or optimizer that passes through this model: requires_grad_(False) on "
                "this model's parameters until that backward is over",
                where=self.mesh.where(),
            )
        if gradient is not None:
            self._taken_in(slot, gradient)
        if self._leaves and self._leave is Leave.EAGER:
            self.passed_by(slot)

    def collect(self, slot: Slot, gradient: Tensor) -> None:
        """Add to this rank's own sum. A sum of one gradient stays in half precision, where it may leave so."""
        self.used.add(slot)
        before, is_made = self.local.get(slot), self._factor is None and self._no_loss is None
        exact = before is None and slot in self.flights.halves and (is_made or self._factor == 1.0)
        if gradient.dtype != slot.dtype and not (exact and gradient.dtype == slot.parameter.dtype):
            gradient = gradient.to(slot.dtype)
        if self._factor is not None:
            gradient = gradient * self._factor.to(gradient)
        if self._no_loss is not None:
            gradient = torch.where(self._no_loss, torch.zeros_like(gradient), gradient)
        self.local[slot] = gradient if before is None else self._widened(slot, before).add_(gradient)

    def _widened(self, slot: Slot, own: Tensor) -> Tensor:
        """This rank's own sum, wide enough to be added to."""
        self.local[slot] = own = own.to(slot.dtype)
        return own

    # -- 3. a bucket leaves

    def passed_by(self, slot: Slot) -> None:
        """EAGER: this backward has finished the slot's gradient. Buckets leave in order, when there is room."""
        if slot not in self._reached:
            self._reached.add(slot)
            self._missing[self._home[slot]] -= 1
        while self._unsent and not self._missing[self._unsent[0]] and self.flights.has_room():
            self._launch(self._unsent[0])

    def _left(self, parameters: set[int]) -> None:
        """BY_BLOCK: backward has left these parameters (ids) behind, on every data rank at the same point: all their
        buckets leave, whether this rank has used them or not."""
        self.flights.next_block()
        for bucket in list(self._unsent):
            if all(id(slot.parameter) in parameters for slot in bucket.slots):
                self._launch(bucket)

    def end(self) -> None:
        """The backward is over: what it has not sent leaves, or stays."""
        if self.reproducible:
            self._tree.grow([self._taken(slot) for slot in self.plan.slots])
        elif self._leave is not Leave.AT_END:
            self._flush()
        if self.units is not None:
            self.units.all_ended()
        self._withhold()
        self.state = State.OPEN

    def _flush(self) -> None:
        while self._unsent:
            if self.units is not None and self.flights.is_full():
                self.units.all_ended()  # and so they launch the same buckets
                self.flights.make_room()
            self._launch(self._unsent[0])

    def _launch(self, bucket: Bucket) -> None:
        self._unsent.remove(bucket)
        gradients = [self._taken(slot) for slot in bucket.slots]
        self.flights.launch(bucket, gradients)
        if self.keep_full:
            self.full.update((s, g) for s, g in zip(bucket.slots, gradients, strict=True) if g.dtype == s.dtype)

    def _taken(self, slot: Slot) -> Tensor:
        """A gradient out of `local`; zeros for a parameter that this rank did not use."""
        gradient = self.local.pop(slot, None)
        return self.flights.zeros_of(slot) if gradient is None else gradient.contiguous()

    def _withhold(self) -> None:
        if self._shown:
            self._withheld = set(self.used)
            for slot in self._withheld:
                for parameter, stand_in in self._shown[slot]:
                    parameter.grad = stand_in

    # -- 4. the step

    def pending(self) -> bool:
        """Whether this rank holds gradients that have not left."""
        return bool(self.local) or bool(self._tree)

    def settle(self, flush: bool) -> None:
        """Pay every debt. `flush`, the same on all ranks: some rank holds gradients that have not left."""
        self.must_be(State.OPEN, State.SETTLED)
        if flush:
            if self._tree:
                self.local = dict(zip(self.plan.slots, self._tree.cut(), strict=True))
            self._unsent = list(self.plan.buckets)
            self._flush()
        self.flights.land_all()
        self.flights.check_sums(self.mesh)
        due, self.flights.due = self.flights.due, {}
        # Sorted, because the two stages of a tie hold it at different places among their parameters.
        for axes in sorted({axes for slot in due for axes in slot.contract.owes}, reverse=True):
            owing = sorted((slot for slot in due if axes in slot.contract.owes), key=lambda slot: slot.name)
            self._pay(axes, owing, due)
        for slot, rows in due.items():
            before = self.paid.get(slot)
            self.paid[slot] = rows if before is None else before.add_(rows)
        self.state = State.SETTLED

    def _pay(self, axes: str, slots: Sequence[Slot], due: dict[Slot, Tensor]) -> None:
        """Sum the rows of these slots over `axes`, in as few messages as there are dtypes."""
        by_dtype: dict[torch.dtype, list[Slot]] = {}
        for slot in slots:
            by_dtype.setdefault(slot.dtype, []).append(slot)
        for owing in by_dtype.values():
            rows: Pieces = [due[slot] for slot in owing]
            total = raw.all_reduce(torch.cat([r.reshape(-1) for r in rows]), self.mesh.group(axes))
            for slot, row, part in zip(owing, rows, total.split([r.numel() for r in rows]), strict=True):
                due[slot] = part.view(row.shape)

    # -- 5. the next step

    @property
    def empty(self) -> bool:
        """Whether nothing of a step is under way."""
        begun = self.shares.announced is not None
        return self.state is State.OPEN and not (begun or self.told.losses or self.passes or self.pending())

    def clear(self) -> None:
        """Everything of this step is dropped, and the next one is open. Nothing may be on its way."""
        for shown in self._shown.values():
            for parameter, _ in shown:
                parameter.grad = None
        self.flights.clear()
        self.flights.sums = {}
        self.local, self.paid, self.full, self.told, self.passes = {}, {}, {}, Contributions(), 0
        self.shares.clear()
        self.used, self._withheld, self._unsent = set(), set(), []
        self._tree = Tree()
        self.state, self.failure, self.ended = State.OPEN, None, self.ended + 1

    def abandon(self) -> None:
        """All ranks together: drop the step. What is on its way lands first, and nothing of it is kept."""
        self.flights.even_out(self.mesh)
        self.flights.land_all()
        if self.units is not None:
            self.units.abort()
        self.clear()
