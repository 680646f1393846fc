"""DataParallel: torch's DistributedDataParallel in one line less and one line more.

    model = ig.DataParallel(model)              # a world that torchrun or ig.launch has started, or one process
    loss = model(batch)
    model.weigh(tokens)                         # the line more: how many tokens the loss is the mean of
    loss.backward()
    optimizer.step(); optimizer.zero_grad()     # any optimizer, clipping, GradScaler: `.grad` is what it seems

After a backward `.grad` is the same on all ranks. Without `weigh` it is DDP's: the mean over ranks of each one's
gradient, which is not one device's where ranks have different numbers of tokens. With it, each backward counts by its
weight, and `.grad` is the weighted mean over all ranks and all backwards since gradients were last cleared.

The sums are the Engine's (engine/reduce.py): rows go to their owners during backward, and come back at its end, when
weights and the use of parameters have crossed the wire in one small message. Parameters that no rank used keep `.grad`
as it was, None at first. Buffers become those of the first rank.

Ranks with different numbers of batches need no join context:

    for batch in model.together(loader):        # goes on until no rank has a batch left; None where there is none
        model(batch).mean().backward() if batch is not None else model.skip()
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils import _pytree as tree

from isograd.comm import raw
from isograd.contract import contracts
from isograd.engine import start
from isograd.engine.first import FirstValues
from isograd.engine.fit import refuse_unfit
from isograd.engine.plan import Bucket, Slot, make_plan
from isograd.engine.reduce import Reducer
from isograd.engine.units import differentiable
from isograd.engine.zero import gather_gradients
from isograd.mesh import Mesh

Batch = TypeVar("Batch")

# Of DDP's options: what changes nothing here, and what would change something unless it has this value.
HARMLESS = {"find_unused_parameters", "gradient_as_bucket_view", "static_graph", "check_reduction"}
HARMLESS |= {"skip_all_reduce_unused_params"}
ONLY = {"dim": 0, "init_sync": True, "process_group": None, "mixed_precision": None, "device_mesh": None}
ONLY |= {"delay_all_reduce_named_params": None, "param_to_hook_all_reduce": None}


class DataParallel(nn.Module):
    """Takes the place of torch's DistributedDataParallel; `weigh` makes uneven ranks exact."""

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
        self.mesh = mesh = Mesh(f"dp{raw.world()[1]}")
        start.refuse_options({k: v for k, v in options.items() if k not in HARMLESS}, ONLY, mesh)
        start.take_over(module)
        self.module, self.broadcast_buffers = module, broadcast_buffers
        table = contracts(module, mesh)
        refuse_unfit(module, table, mesh)
        self._plan = make_plan(table, mesh, int((bucket_cap_mb or 16.0) * 2**20))
        start.check_plan(self._plan, mesh)
        FirstValues(module, table, mesh, None).fill(table)
        start.equal_replicas(module, table, mesh)
        home = self._plan.slots[0].parameter.device
        start.check_devices(device_ids, output_device, home, mesh)
        self._inputs_to = home if device_ids else None
        self._group = mesh.group("world")
        self._reducer = Reducer(self._plan, mesh, keep_full=True, reproducible=False)
        self._watch = start.Watch(module, self._plan, moving=True)
        self._window = _Window(self._plan.slots)
        self._sync = True
        self._running = self._travels = self._reached = False  # about the backward that is under way
        self._weight: float | None = None  # of the next backward
        for bucket in self._plan.buckets:
            for slot in bucket.slots:
                arrived = partial(self._arrived, slot, bucket)
                start.replace_hook(slot.parameter, arrived, self._entering)
        self.register_load_state_dict_pre_hook(_rename)  # type: ignore[no-untyped-call]

    # -- what users call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # else a recomputed forward
            self._running = False  # a backward that failed has not said that it ended
        if self._inputs_to is not None:
            args, kwargs = tree.tree_map_only(
                Tensor, lambda t: t.to(self._inputs_to, non_blocking=True), (args, kwargs)
            )
        output = self.module(*args, **kwargs)
        for tensor in differentiable(output) if torch.is_grad_enabled() else ():
            tensor.register_hook(self._begin)
        return output

    def weigh(self, count: float | Tensor) -> None:
        """The next backward is of a loss that is the mean over `count` tokens (rows, ...); 0 adds nothing."""
        start.check_weight(float(count), self.mesh)
        self._weight = float(count)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here add up locally; the next one outside reduces all of it once. Forwards do not matter."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def skip(self) -> None:
        """Instead of a backward, on a rank without a batch: adds nothing, gets the others' gradients in `.grad`."""
        if self._sync:
            self._window.open()
            self._reducer.arm()
            self._synchronize()

    def together(self, batches: Iterable[Batch]) -> Iterator[Batch | None]:
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

    # -- a backward, as hooks see it

    def _begin(self, _: Tensor | None = None) -> None:
        """An output's gradient, or a parameter's, is there."""
        if not self._running:
            self._running, self._reached, self._travels = True, False, self._sync
            Variable._execution_engine.queue_callback(self._end)

    def _entering(self, gradient: Tensor) -> Tensor | None:
        """Before a gradient is added to `.grad`."""
        self._begin()
        if not self._reached:
            self._reached = True
            self._window.open()
            if self._travels:
                self._reducer.arm()
        if self._weight is None or self._weight == 1.0:
            return None
        return gradient * self._weight if self._weight else torch.zeros_like(gradient)  # not even NaN

    def _arrived(self, slot: Slot, bucket: Bucket, _: Tensor) -> None:
        slot.used = True
        if self._travels:
            self._reducer.arrived(slot, bucket, True)

    def _end(self) -> None:
        self._running = False
        if not self._reached:  # torch.autograd.grad: no parameter's business
            return
        self._window.add(self._weight)
        self._weight = None
        if self._travels:
            self._synchronize()
        else:
            self._window.close()

    # -- all ranks together

    @torch.no_grad()
    def _synchronize(self) -> None:
        """The gradients of this window, of all ranks, into `.grad`."""
        self._watch.check(self.mesh)
        for slot in self._plan.slots:
            self._reducer.collect(slot)
        self._reducer.flush()
        window = self._window
        head = [window.weight, float(window.plain), float(window.weighed), float(self._reducer.pending())]
        mine = torch.tensor([*head, *(float(s.used) for s in self._plan.slots)], dtype=torch.float64)
        table = torch.stack(raw.gather_list(mine.to(self.mesh.device), self._group)).cpu()
        start.check_weights(table[:, 1], table[:, 2], self.mesh)
        weight, plain, _, pending, *used = table.sum(0).tolist()
        self._reducer.settle(flush=pending > 0)
        total = weight if plain else window.total + weight
        share = 1.0 / total if total else 0.0  # a mean over nothing is nothing
        gather_gradients(self._plan, self._group, share)
        window.settle(used, weight, keep=1.0 if plain else window.total * share)
        self._reducer.clear()
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


class _Window:
    """The backwards between two reductions. Within it `.grad` holds this rank's own sum, weighted and not yet reduced;
    what `.grad` was when it began waits in `before`. A user who clears gradients in between clears all of it."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.before: dict[str, Tensor] = {}
        self.weight = 0.0  # of my backwards in this window; without `weigh`, 1 for any number of them
        self.total = 0.0  # all ranks' weight in what `before` is the weighted mean of
        self.plain = self.weighed = False  # which kinds of backwards there were since gradients were last cleared
        self._reduced = False  # whether `.grad` holds what the last reduction gave
        self._seen: tuple[Any, int] | None = None  # a gradient as we left it

    def open(self) -> None:
        """Before the first gradient of a backward arrives."""
        if self._cleared():
            self.before, self.weight, self.total, self.plain, self.weighed = {}, 0.0, 0.0, False, False
            for slot in self.slots:
                slot.used = False
        elif self._reduced:
            self.before = {s.name: s.parameter.grad for s in self.slots if s.parameter.grad is not None}
            for slot in self.slots:
                slot.parameter.grad = None
        self._reduced = False

    def _cleared(self) -> bool:
        """By zero_grad, which sets to None, or to zero in place. (Gradients may be zero by themselves.)"""
        there = [slot.parameter.grad for slot in self.slots if slot.parameter.grad is not None]
        if not there or self._seen is None:
            return True
        seen, version = self._seen
        touched = there[0] is not seen() or there[0]._version != version
        return touched and not any(bool(gradient.any()) for gradient in there)

    def add(self, weight: float | None) -> None:
        if weight is None:
            self.plain, self.weight = True, 1.0
        else:
            self.weighed = True
            self.weight += weight

    def close(self) -> None:
        """After a backward or a reduction."""
        there = next((slot.parameter.grad for slot in self.slots if slot.parameter.grad is not None), None)
        self._seen = None if there is None else (weakref.ref(there), there._version)

    def settle(self, used: Sequence[float], weight: float, *, keep: float) -> None:
        """`slot.full` holds the mean of this window, over what counts; what was there before counts `keep`."""
        for slot, times in zip(self.slots, used, strict=True):
            gradient, before = slot.full, self.before.get(slot.name)
            if times and gradient is not None and before is not None:
                gradient = gradient.add_(before, alpha=keep)
            elif not times:
                gradient = None if before is None else before.mul_(keep)
            slot.parameter.grad = None if gradient is None else gradient.to(slot.parameter.dtype)
        self.before, self.weight, self._reduced = {}, 0.0, True
        self.total += weight
        self.close()


def _rename(module: DataParallel, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Names without "module.", as `state_dict` gives them, to where this class keeps them."""
    for name in module.module.state_dict(keep_vars=True):
        if prefix + name in state:
            state[f"{prefix}module.{name}"] = state.pop(prefix + name)
