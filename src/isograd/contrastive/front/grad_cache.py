"""The GradCache package's class and decorators, with isograd's gradient.

    from isograd.contrastive.front.grad_cache import GradCache, cached, cat_input_tensor, gather_input_tensor

As in that package, the caller provides `loss_fn(*representations, **keywords)`. The differences:

- The gather (`gather_input_tensor`) returns gradients to the ranks that own the rows. So under torch's DDP, which
  averages, the encoders and a temperature in the loss get the full gradient, not 1/W of it. Keyword arguments work.
- One reduction per step, for any number of chunks and towers: all backwards but the last of each model run under
  `no_sync`, also when one model encodes two towers. `no_sync_except_last` is accepted without effect.
- The replay is checked: IG965 is raised when its bits differ from the first pass.
- `engine=`: the models belong to an isograd engine, and the gradient is added to the engine's step. loss_fn may return
  the mean over this rank's rows or over all ranks' rows. Then call `engine.step()`, without a scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import ops, raw
from isograd.comm.fingerprint import fingerprint
from isograd.contrastive.chunks import cut, one_kernel, random_state, rows_of, set_random_state
from isograd.contrastive.front.world import everyone
from isograd.engine import Engine
from isograd.errors import ContrastiveError

Representations = Tensor | Sequence[Tensor]


class Replay:
    """A function that is called once without a graph, and again with a graph by `backward`."""

    def __init__(self, function: Callable[[], Representations], device: torch.device) -> None:
        self.function, self.device = function, device
        self.state = random_state(device)
        with torch.no_grad(), one_kernel():
            made = _tuple(function())
        self.prints = [int(fingerprint(t)) for t in made]
        self.made = tuple(t.detach() for t in made)

    def backward(self, gradients: Sequence[Tensor], engine: Engine | None = None) -> None:
        """Call the function again from the same random state, check its bits, and go backward from `gradients`."""
        after = random_state(self.device)
        set_random_state(self.state, self.device)
        torch.clear_autocast_cache()
        with torch.enable_grad(), one_kernel():
            again = _tuple(self.function())
        set_random_state(after, self.device)
        if [int(fingerprint(t)) for t in again] != self.prints:
            raise ContrastiveError(
                "IG965",
                "the replay of a chunk gave representations that differ from the first pass",
                seen="other bits",
                expected="equal bits: the same weights and inputs, and random numbers from torch's own generators only",
                fix="isograd.contrastive.GradCache(..., watch=True) names the module",
            )
        pairs = [(t, g.to(t.dtype)) for t, g in zip(again, gradients, strict=True) if t.requires_grad]
        if not pairs:
            return
        tensors, seeds = zip(*pairs, strict=True)
        if engine is None:
            torch.autograd.backward(tensors, seeds)
        else:
            engine.ledger.run_backward(tensors, seeds, last=False)


class GradCache:
    """Takes the place of grad_cache.GradCache; see the head of this file."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        chunk_sizes: int | Sequence[int],
        loss_fn: Callable[..., Tensor],
        split_input_fn: Callable[[Any, int], Any] | None = None,
        get_rep_fn: Callable[..., Tensor] | None = None,
        fp16: bool = False,
        scaler: Any = None,
        *,
        engine: Engine | None = None,
    ) -> None:
        """One model and chunk size for each tower; `fp16` autocasts, and `scaler` scales the loss."""
        self.models, self.loss_fn, self.get_rep_fn = list(models), loss_fn, get_rep_fn
        self.chunk_sizes = [chunk_sizes] * len(self.models) if isinstance(chunk_sizes, int) else list(chunk_sizes)
        self.split = split_input_fn or _split
        self.fp16, self.scaler, self.engine = fp16, scaler, engine

    def __call__(self, *inputs: Any, **keywords: Any) -> Tensor:
        return self.cache_step(*inputs, **keywords)

    def cache_step(self, *model_inputs: Any, no_sync_except_last: bool = True, **loss_kwargs: Any) -> Tensor:
        """Add the step's gradient to the models' parameters; returns the loss."""
        del no_sync_except_last
        with self.engine.together() if self.engine else nullcontext():
            towers = [
                self._represent(*tower) for tower in zip(self.models, model_inputs, self.chunk_sizes, strict=True)
            ]
            leaves = [torch.cat([r.made[0] for r in tower]).requires_grad_() for tower in towers]
            with self._autocast(leaves[0].device):
                loss = self.loss_fn(*leaves, **loss_kwargs)
            if self.engine:
                self.engine.ledger.of_loss(loss, len(leaves[0]), last=False)
            else:
                (self.scaler.scale(loss) if self.scaler else loss).backward()
            for number, (model, tower, leaf) in enumerate(zip(self.models, towers, leaves, strict=True)):
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                ends = gradient.split([len(r.made[0]) for r in tower])
                again = any(later is model for later in self.models[number + 1 :])
                for replay, part in zip(tower, ends, strict=True):
                    with nullcontext() if replay is tower[-1] and not again else _no_sync(model):
                        replay.backward([part], self.engine)
        return loss.detach()

    def _represent(self, model: nn.Module, inputs: Any, chunk: int) -> list[Replay]:
        device = next(model.parameters()).device

        def encode(part: Any) -> Tensor:
            with self._autocast(device):
                output = _call(model, part)
            return self.get_rep_fn(output) if self.get_rep_fn else output

        return [Replay(lambda part=part: encode(part), device) for part in self.split(inputs, chunk)]  # type: ignore[misc]

    def _autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.float16, enabled=self.fp16)


def cached(func: Callable[..., Representations] | None = None, *, engine: Engine | None = None) -> Any:
    """Decorates a function that calls a model: it returns leaf representations, then a function that replays the call.

    Call that with the leaves, after loss.backward(). With an engine, all of it inside `with engine.together():`, and
    engine.ledger.of_loss(loss, rows, last=False) in place of loss.backward().
    """

    def decorate(function: Callable[..., Representations]) -> Callable[..., tuple[Any, ...]]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            device = engine.mesh.device if engine else raw.device()
            replay = Replay(lambda: function(*args, **kwargs), device)
            leaves = tuple(t.requires_grad_() for t in replay.made)

            def backward(representations: Representations) -> None:
                gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in _tuple(representations)]
                replay.backward(gradients, engine)

            return (*leaves, backward)

        return call

    return decorate if func is None else decorate(func)


def cat_input_tensor(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorates a loss: each argument that is a list of tensors is joined along dim 0, keyword arguments too."""

    def joined(x: Any) -> Any:
        many = isinstance(x, list) and x and all(isinstance(t, Tensor) for t in x)
        return torch.cat(x) if many else x

    return _on_arguments(func, joined)


def gather_input_tensor(func: Callable[..., Tensor], axis: int = 0) -> Callable[..., Tensor]:
    """Decorates a loss: each tensor but scalars is gathered from all ranks along `axis`, keywords too.

    Ranks may bring different lengths. What each rank's loss says of a row is summed where the row came from.
    """

    def gathered(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim():  # a temperature is not one per row
            return x
        group = everyone()
        sizes = raw.gather_list(torch.tensor(x.shape[axis], device=x.device), group)
        return ops.all_gather(x, group, axis, [int(n) for n in sizes])

    return _on_arguments(func, gathered)


def _on_arguments(func: Callable[..., Tensor], change: Callable[[Any], Any]) -> Callable[..., Tensor]:
    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        return func(*map(change, args), **{name: change(value) for name, value in kwargs.items()})

    return call


def _tuple(representations: Representations) -> tuple[Tensor, ...]:
    return (representations,) if isinstance(representations, Tensor) else tuple(representations)


def _split(inputs: Any, chunk: int) -> list[Any]:
    return [cut(inputs, first, chunk) for first in range(0, max(1, rows_of(inputs)), chunk)]


def _call(model: nn.Module, part: Any) -> Any:
    """As GradCache calls models: a list gives positional arguments, a dict keywords, ([...], {...}) both."""
    if isinstance(part, tuple) and list(map(type, part)) == [list, dict]:
        return model(*part[0], **part[1])
    if isinstance(part, list | tuple):
        return model(*part)
    return model(**part) if not isinstance(part, Tensor) else model(part)


def _no_sync(model: nn.Module) -> AbstractContextManager[None]:
    no_sync = getattr(model, "no_sync", None)
    return no_sync() if callable(no_sync) else nullcontext()
