"""DataParallel: torch's DistributedDataParallel in one line less and one line more.

    model = ig.DataParallel(model)              # a world that torchrun or ig.launch has started, or one process
    loss = model(batch)
    loss = model.weigh(loss, tokens)            # the line more: how many tokens the loss is the mean of
    loss.backward()
    optimizer.step(); optimizer.zero_grad()     # any optimizer, clipping, GradScaler: `.grad` is what it seems

After a backward `.grad` is the same on all ranks. With `weigh`, each backward counts by its weight, and `.grad` is the
weighted mean over all ranks and all backwards since gradients were last cleared. Without it a loss is taken for the
mean over the rows of its batch (dim 0 of the first tensor that the model was called with): ranks count by their rows,
and backwards add up. Backwards under `no_sync` and the one that reduces them are one batch: the result is their number
times the mean over all their rows. Where all ranks have as many rows, that is DDP's gradient.

It is a front of the engine's step state (engine/step.py): rows go to their owners during backward, and come back at its
end, when weights and the use of parameters have crossed the wire in one small message. Parameters that no rank used
keep `.grad` as it was, None at first. Buffers become those of the first rank. A backward that raises leaves nothing
behind: this rank says so at its next call, and the backward in which the other ranks wait for it raises IG550.

Ranks with different numbers of batches need no join context:

    for batch in model.until_all_exhausted(loader):  # None where this rank has no batch left
        model(batch).mean().backward() if batch is not None else model.skip()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils import _pytree as tree

from isograd.comm import raw, world
from isograd.comm.world import abort_group_on_interrupt
from isograd.core.attributes import set_attributes
from isograd.core.contract_table import ContractTable, contracts
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.core.step_counters import StepCounters
from isograd.engine import step_status, validation
from isograd.engine.grad_placeholder import take_grad
from isograd.engine.plan import Slot, make_plan
from isograd.engine.reducer import ReduceWhen
from isograd.engine.step import StepState
from isograd.engine.step_status import Status
from isograd.engine.window import Window
from isograd.engine.zero import gather_gradients
from isograd.engine.zero3.deferred_init import FirstValues
from isograd.engine.zero3.module_hooks import differentiable
from isograd.errors import EngineError

Batch = TypeVar("Batch")

# Of DDP's options: what changes nothing here, and what would change something unless it has this value.
HARMLESS = {"find_unused_parameters", "gradient_as_bucket_view", "static_graph", "check_reduction"}
HARMLESS |= {"skip_all_reduce_unused_params"}
ONLY = {"dim": 0, "init_sync": True, "process_group": None, "mixed_precision": None, "device_mesh": None}
ONLY |= {"delay_all_reduce_named_params": None, "param_to_hook_all_reduce": None}

STEPS = "an optimizer raised in its step"


@dataclass(frozen=True)
class _Backward:
    """What hooks have seen of a backward."""

    running: bool = False  # autograd will call `_end`
    reached: bool = False  # a parameter
    rows: float | None = None  # of the batch that it is of, once it has met the output; 1 where no tensor was given
    early: list[tuple[Slot, Tensor | None]] = field(default_factory=list)  # gradients of a loss's own parameters
    weight: float | None = None  # that `weigh` was given
    factor: float = 1.0  # of it, that a half-precision loss could not be scaled with


class DataParallel(nn.Module):
    """Takes the place of torch's DistributedDataParallel; `weigh` makes uneven ranks exact."""

    @abort_group_on_interrupt()
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        *,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        **options: object,
    ) -> None:
        """`options`: those of DDP, as far as they change nothing; others are refused (IG533)."""
        super().__init__()
        self.mesh = mesh = Mesh(f"dp{world.world()[1]}")
        wrong = {k: v for k, v in options.items() if k not in HARMLESS and (k not in ONLY or v != ONLY[k])}
        if wrong:
            raise EngineError("IG533", seen=wrong, where=mesh.describe_rank(), options=dict(ONLY))
        validation.detach_previous_engine(module, mesh)
        self.module, self.broadcast_buffers = module, broadcast_buffers

        def check_locally() -> ContractTable:
            validation.refuse_wrapped(module, mesh)
            table = contracts(module, mesh)
            validation.refuse_cut(table, mesh)
            if layers := len(StepCounters(module, mesh).members):  # which steps are taken is not seen here
                raise EngineError("IG569", where=mesh.describe_rank(), layers=layers)
            validation.refuse_parameters(module, table, mesh)
            return table

        table = validation.check_together(check_locally, mesh)
        validation.warn_of_half_sums(module, mesh)
        self._plan = make_plan(table, mesh, int((bucket_cap_mb or 16.0) * 2**20))
        validation.check_plan(self._plan, table, module, mesh)
        FirstValues(module, table, mesh, None).fill(table)
        validation.equal_replicas(module, table, mesh)
        home = self._plan.slots[0].parameter.device
        validation.check_devices(device_ids, output_device, home, mesh)
        self._inputs_to = home if device_ids else None
        self._group = mesh.group("world")
        self._step_state = StepState(self._plan, mesh, keep_full=True)
        self._watch = validation.Watch(module, self._plan, moving=True)
        self._window = Window(self._step_state)
        self.require_backward_grad_sync = True  # DDP's name; `no_sync` clears it
        self.require_forward_param_sync = True  # DDP's name, which accelerate sets; buffers are equal after a reduction
        # accelerate's trigger_sync_in_backward calls it before a backward whose forward ran under DDP's no_sync: each
        # backward asks `require_backward_grad_sync`, and there is nothing to prepare.
        self.reducer = SimpleNamespace(prepare_for_backward=lambda outputs: None)
        self._backward = _Backward()  # the running one
        for slot in self._plan.slots:
            validation.replace_hook(slot, self._step_state, self._arrived, self._entering)
        self.register_load_state_dict_pre_hook(_rename)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own; what it returns starts the backward."""
        if torch._C._current_graph_task_id() == -1:  # else a recomputed forward
            self._recover()
        if self._inputs_to is not None:
            args, kwargs = tree.tree_map_only(
                Tensor, lambda t: t.to(self._inputs_to, non_blocking=True), (args, kwargs)
            )
        output = self.module(*args, **kwargs)
        leaves = [t for t in tree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
        begin = partial(self._meets_output, float(len(leaves[0])) if leaves else 1.0)
        for tensor in differentiable(output) if torch.is_grad_enabled() else ():
            tensor.register_hook(begin)
        return output

    def weigh(self, loss: Tensor, count: float | Tensor) -> Tensor:
        """The loss, whose backward counts by `count`: the number of tokens (rows, ...) it is the mean of. The value is
        unchanged. Its gradient is scaled at the root, so gathers of features are right: a rank whose loss weighs 0
        brings what others' losses make of its features. A mean over nothing, which is NaN, adds nothing."""
        if isinstance(loss, Terms):
            raise EngineError("IG568", seen=f"weigh(Terms({', '.join(loss)}), ...)", where=self.mesh.describe_rank())
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise EngineError("IG536", seen=f"weigh({type(loss).__name__}, ...)", where=self.mesh.describe_rank())
        if not validation.is_weight(count, waits=True):
            raise validation.bad_weight("the loss", count, self.mesh)
        weight = scale = float(count)
        if loss.dtype in (torch.float16, torch.bfloat16) and weight:  # 1,003 would become 1,000
            scale = 2.0 ** math.floor(math.log2(weight))
        adds_nothing = validation.adds_nothing(loss, weight, self.mesh)
        note = partial(self._note, weight, 0.0 if adds_nothing else weight / scale if scale else 1.0)
        return _Weighed.apply(loss, scale, note)  # type: ignore[no-any-return, no-untyped-call]

    def _note(self, weight: float, factor: float) -> None:
        """A weighed loss goes backward."""
        now = self._backward
        seen = f"weigh(..., {now.weight}) and weigh(..., {weight}) in the graph of one loss"
        if now.early:  # a gradient that does not come through the weighed loss
            seen = f"weigh(..., {weight}), and {now.early[0][0].name!r} has a gradient of what was added to it"
        if now.weight is not None or now.early:
            self._backward = replace(now, weight=None, factor=1.0)
            raise EngineError("IG538", seen=seen, where=self.mesh.describe_rank())
        self._backward = replace(now, weight=weight, factor=factor)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in here add up locally; the next one outside reduces all of it once. Forwards do not matter."""
        return set_attributes(self, require_backward_grad_sync=False)

    def skip(self) -> None:
        """Instead of a backward, on a rank without a batch: adds nothing, gets the others' gradients in `.grad`."""
        self._recover()
        if self.require_backward_grad_sync:
            self._window.open()
            with self._step_state.backward(ReduceWhen.GRAD_READY):
                pass
            self._synchronize()

    def discard(self) -> None:
        """Drop what all backwards since the last `zero_grad` have gathered; every rank calls it. `.grad` is None."""
        self._backward = _Backward()
        if not self._step_state.skips_discard():
            self._gather_step_status(Status.DISCARDS)
            self._step_state.mark_discarded()

    def begins_step(self) -> None:
        """Called before an optimizer of this model steps, as the Accelerator does. Until it `has_stepped`, backwards
        that reduce are refused on all ranks (IG559): a step that raises may have changed half of this rank's copy."""
        self._window.change(opened=self._window.now.opened + 1)  # a `step` may call that of its class
        self._step_state.mark_inconsistent(STEPS)

    def has_stepped(self) -> None:
        """Called behind it. Ranks whose optimizers have not stepped equally often are refused, too: one of them has
        missed an update."""
        now = self._window.now
        is_last = now.opened == 1  # not inside of another, nor behind one that raised
        self._window.change(opened=now.opened - 1, steps=now.steps + is_last)
        if is_last and self._step_state.optimizer_inconsistent == STEPS:
            self._step_state.mark_consistent()

    def is_restored(self) -> None:
        """Called when all ranks have loaded a checkpoint: copies are equal again."""
        self._step_state.mark_consistent()
        self._window.change(opened=0, steps=0)

    @property
    def drops(self) -> int:
        """How many times what was gathered since `zero_grad` was dropped, on all ranks: refused or discarded."""
        return self._window.now.drops

    def until_all_exhausted(self, batches: Iterable[Batch]) -> Iterator[Batch | None]:
        """The batches, and then None as long as another rank has some."""
        own, end = iter(batches), object()
        while True:
            batch: Any = next(own, end)
            here = torch.tensor(batch is not end, device=self.mesh.device)
            if not any(bool(there) for there in raw.gather_list(here, self._group)):
                return
            yield None if batch is end else batch

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Under the module's own names, without "module." in front; `load_state_dict` takes both."""
        return self.module.state_dict(*args, **kwargs)

    def _recover(self) -> None:
        """A backward that failed has not said that it ended: drop what it left, with the other ranks."""
        if self._backward.running:
            self._backward = _Backward()
            self._step_state.fail("a backward raised, and the next batch began")
            with suppress(EngineError):  # here it is no refusal
                self._gather_step_status(Status.FINE)

    def _begin(self) -> None:
        """An output's gradient, or a parameter's, is there."""
        if not self._backward.running:
            self._backward = replace(self._backward, running=True)
            Variable._execution_engine.queue_callback(self._end)

    def _meets_output(self, rows: float, _: Tensor) -> None:
        """The gradient of an output of a batch of `rows` is there."""
        self._begin()
        if self._backward.rows is None:
            self._backward = replace(self._backward, rows=rows)

    def _entering(self, _: Tensor) -> None:
        """Before a gradient is added to `.grad`."""
        self._begin()
        if not self._backward.reached:
            self._window.open()
            self._step_state.begin(ReduceWhen.GRAD_READY if self.require_backward_grad_sync else ReduceWhen.STEP)
            self._backward = replace(self._backward, reached=True)

    def _arrived(self, slot: Slot, parameter: Tensor) -> None:
        gradient = take_grad(parameter)
        if self._backward.weight is None and self._backward.rows is None:
            self._backward.early.append((slot, gradient))
        else:
            self._take(slot, gradient)

    def _take(self, slot: Slot, gradient: Tensor | None) -> None:
        now = self._backward
        factor = now.factor if now.weight is not None else 1.0 if now.rows is None else now.rows
        if gradient is not None and factor == 0:
            gradient = torch.zeros_like(gradient)  # not even NaN
        elif gradient is not None and factor != 1.0:
            gradient = gradient.to(slot.dtype).mul_(factor)
        if gradient is not None:
            self._step_state.collect(slot, gradient)
        if self.require_backward_grad_sync:
            self._step_state.on_grad_ready(slot)

    def _end(self) -> None:
        now = self._backward
        if now.reached:
            for slot, gradient in now.early:
                self._take(slot, gradient)
        self._backward = _Backward()
        if not now.reached:  # torch.autograd.grad, which is no parameter's business
            return
        self._step_state.end()
        self._window.add(now.weight, now.rows)
        if self.require_backward_grad_sync:
            self._synchronize()
        else:
            self._window.show_own()

    def _gather_step_status(self, status: Status) -> step_status.StepStatus:
        """The gather of a reduction (engine/step_status.py)."""
        wrong = self._watch.problem(self.mesh) or self._window.problem(self.mesh)
        decide = partial(step_status.refuse_wrong, mesh=self.mesh)
        columns = self._window.columns()
        return step_status.gather_step_status(self._step_state, status, wrong, columns, decide, self._drop)

    def _drop(self) -> None:
        """All ranks together: nothing is left that was gathered since gradients were last cleared."""
        self._step_state.abandon()
        self._window.drop()

    @abort_group_on_interrupt()
    @torch.no_grad()
    def _synchronize(self) -> None:
        """The gradients of this window, of all ranks, into `.grad`."""
        step_state, window = self._step_state, self._window
        table = self._gather_step_status(Status.FINE)
        step_state.finish_reductions(flush=bool(table.pending.any()))
        weight = float(table.weight.sum())
        by_rows, backwards = bool(table.more["losses"][:, 0].any()), float(table.more["backwards"].max())
        scales = window.scales(weight, by_rows=by_rows, backwards=backwards)
        gather_gradients(step_state, {slot: share for slot, (share, _) in scales.items()})
        window.finish(table.used.any(0).tolist(), weight, scales)
        if self.broadcast_buffers:
            self._equal_buffers()

    def _equal_buffers(self) -> None:
        """The first rank's, in one message for each dtype."""
        for dtype in dict.fromkeys(buffer.dtype for buffer in self.module.buffers()):
            buffers = [buffer for buffer in self.module.buffers() if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            raw.broadcast_(flat, self._group)
            parts = flat.split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))


class _Weighed(torch.autograd.Function):
    """The value of a loss, and `weight` times its gradient; `note` is called when that is asked for."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: float, note: Callable[[], None]) -> Tensor:
        ctx.weight, ctx.note = weight, note
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.note()
        return gradient * ctx.weight, None, None


def _rename(module: DataParallel, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Names without "module.", as `state_dict` gives them, to where this class keeps them."""
    for name in module.module.state_dict(keep_vars=True):
        if prefix + name in state:
            state[f"{prefix}module.{name}"] = state.pop(prefix + name)
