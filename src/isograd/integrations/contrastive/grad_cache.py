"""The GradCache package's class and decorators, with isograd's gradient.

    from isograd.integrations.contrastive.grad_cache import GradCache, cached, cat_input_tensor, gather_input_tensor

As in that package, the caller provides `loss_fn(*representations, **keywords)`. The differences:

- The gather (`gather_input_tensor`) returns gradients to the ranks that own the rows. So under torch's DDP, which
  averages, the encoders and a temperature in the loss get the full gradient, not 1/W of it. Keyword arguments work.
- One reduction per step, for any number of chunks and towers: all backwards but the last of each model run under
  `no_sync`, also when one model encodes two towers. `no_sync_except_last` is accepted without effect.
- The methods that people override or call have the names, arguments and results of that package. `forward_no_grad`
  returns replays in place of random states; `forward_backward` takes them. Without an engine they can be called one by
  one; with one, `build_cache` and `forward_backward` inside `with engine.backward_context():`.
- The replay is checked: IG965 is raised when its bits differ from the first pass.
- `engine=`: the models belong to an isograd engine, and the gradient is added to the engine's step. loss_fn may return
  the mean over this rank's rows or over all ranks' rows. Then call `engine.step()`, without a scaler.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import ops, raw
from isograd.comm.fingerprint import fingerprint
from isograd.engine import Engine
from isograd.errors import ContrastiveError
from isograd.integrations.contrastive.world import world_group
from isograd.losses.contrastive.chunks import cut, one_kernel, random_state, rows_of, set_random_state

Representations = Tensor | Sequence[Tensor]


class ChunkReplay:
    """A function that is called once without a graph, and again with a graph by `backward`."""

    def __init__(self, function: Callable[[], Representations], device: torch.device) -> None:
        self.function, self.device = function, device
        self.state = random_state(device)
        with torch.no_grad(), one_kernel():
            made = _tuple(function())
        self.prints = [int(fingerprint(t)) for t in made]
        self.made = tuple(t.detach() for t in made)

    def backward(
        self,
        gradients: Sequence[Tensor],
        engine: Engine | None = None,
        function: Callable[[], Representations] | None = None,
    ) -> None:
        """Call the function again from the same random state, check its bits, and go backward from `gradients`.

        function: called in place of the first pass's own; it must give the same representations."""
        after = random_state(self.device)
        set_random_state(self.state, self.device)
        torch.clear_autocast_cache()
        with torch.enable_grad(), one_kernel():
            again = _tuple((function or self.function)())
        set_random_state(after, self.device)
        if [int(fingerprint(t)) for t in again] != self.prints:
            fix = "isograd.losses.contrastive.GradCache(..., record_modules=True) names the module"
            raise ContrastiveError("IG965", seen="other bits", fix=fix)
        pairs = [(t, g.to(t.dtype)) for t, g in zip(again, gradients, strict=True) if t.requires_grad]
        if not pairs:
            return
        tensors, seeds = zip(*pairs, strict=True)
        if engine is None:
            torch.autograd.backward(tensors, seeds)
        else:
            engine.step_state.run_backward(tensors, seeds, last=False)


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
        self.split_input_fn, self.fp16, self.scaler, self.engine = split_input_fn, fp16, scaler, engine

    def __call__(self, *inputs: Any, **keywords: Any) -> Tensor:
        return self.cache_step(*inputs, **keywords)

    def cache_step(self, *model_inputs: Any, no_sync_except_last: bool = True, **loss_kwargs: Any) -> Tensor:
        """Add the step's gradient to the models' parameters; returns the loss."""
        del no_sync_except_last
        if not len(model_inputs) == len(self.models) == len(self.chunk_sizes):
            raise ContrastiveError(
                "IG963",
                "the number of encoders differs from the number of towers",
                seen=f"{len(self.models)} models, {len(self.chunk_sizes)} chunk sizes, {len(model_inputs)} inputs",
                expected="one chunk size and one input for each model; a model of two towers is listed twice",
            )
        inputs = [self.split_inputs(x, size) for x, size in zip(model_inputs, self.chunk_sizes, strict=True)]
        passes = [self.forward_no_grad(model, parts) for model, parts in zip(self.models, inputs, strict=True)]
        with self.engine.backward_context() if self.engine else nullcontext():
            cache, loss = self.build_cache(*(vectors for vectors, _ in passes), **loss_kwargs)
            for number, (model, parts, gradient) in enumerate(zip(self.models, inputs, cache, strict=True)):
                replays = passes[number][1]
                again = any(later is model for later in self.models[number + 1 :])
                with no_sync(model) if again else nullcontext():
                    gradients = gradient.split([len(replay.made[0]) for replay in replays])
                    self.forward_backward(model, parts, gradients, replays, no_sync_except_last=True)
        return loss

    # -- the package's methods, which people override or call by themselves

    def split_inputs(self, model_input: Any, chunk_size: int) -> list[Any]:
        """The chunks of one model's input: of a tensor, list, dict, BatchEncoding, or ([...], {...})."""
        if self.split_input_fn is not None:
            return list(self.split_input_fn(model_input, chunk_size))
        inputs = dict(model_input) if isinstance(model_input, UserDict) else model_input
        return [cut(inputs, first, chunk_size) for first in range(0, max(1, rows_of(inputs)), chunk_size)]

    def get_input_tensors(self, model_input: Any) -> list[Tensor]:
        """All tensors of an input."""
        if isinstance(model_input, Tensor):
            return [model_input]
        if isinstance(model_input, Mapping):
            return self.get_input_tensors([*model_input.values()])
        if isinstance(model_input, list | tuple):
            return [tensor for part in model_input for tensor in self.get_input_tensors(part)]
        return []

    def model_call(self, model: nn.Module, model_input: Any) -> Any:
        """What the model returns: a list gives positional arguments, a mapping keywords, ([...], {...}) both."""
        with self._autocast(next(model.parameters()).device):
            if isinstance(model_input, tuple) and list(map(type, model_input)) == [list, dict]:
                return model(*model_input[0], **model_input[1])
            if isinstance(model_input, list | tuple):
                return model(*model_input)
            return model(model_input) if isinstance(model_input, Tensor) else model(**model_input)

    def get_reps(self, model_out: Any) -> Tensor:
        """The representations in what the model returned."""
        return self.get_rep_fn(model_out) if self.get_rep_fn is not None else model_out

    def compute_loss(self, *reps: Tensor, **loss_kwargs: Any) -> Tensor:
        """The loss of all models' representations."""
        return self.loss_fn(*reps, **loss_kwargs)

    def forward_no_grad(self, model: nn.Module, model_inputs: Sequence[Any]) -> tuple[Tensor, list[ChunkReplay]]:
        """The first pass over one model's chunks: their representations, and how to repeat each."""
        device = next(model.parameters()).device
        replays = [ChunkReplay(partial(self._encode, model, part), device) for part in model_inputs]
        return torch.cat([replay.made[0] for replay in replays]), replays

    def build_cache(self, *reps: Tensor, **loss_kwargs: Any) -> tuple[list[Tensor], Tensor]:
        """The gradient of the loss with respect to each model's representations, and the loss."""
        leaves = [t.detach().requires_grad_() for t in reps]
        with self._autocast(leaves[0].device):
            loss = self.compute_loss(*leaves, **loss_kwargs)
        if self.engine:
            self.engine.step_state.backward_loss(loss, len(leaves[0]), last=False)
        else:
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves], loss.detach()

    def forward_backward(
        self,
        model: nn.Module,
        model_inputs: Sequence[Any],
        cached_gradients: Sequence[Tensor],
        random_states: Sequence[ChunkReplay],
        no_sync_except_last: bool = False,
    ) -> None:
        """The second pass over one model's chunks, with a graph, and its backward.

        random_states: what `forward_no_grad` returned. no_sync_except_last: only the last chunk's backward reduces."""
        work = list(zip(model_inputs, cached_gradients, random_states, strict=True))
        for number, (part, gradient, replay) in enumerate(work):
            with no_sync(model) if no_sync_except_last and number < len(work) - 1 else nullcontext():
                replay.backward([gradient], self.engine, partial(self._encode, model, part))

    def _encode(self, model: nn.Module, part: Any) -> Tensor:
        return self.get_reps(self.model_call(model, part))

    def _autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.float16, enabled=self.fp16)


def cached(func: Callable[..., Representations] | None = None, *, engine: Engine | None = None) -> Any:
    """Decorates a function that calls a model: it returns leaf representations, then a function that replays the call.

    Call that with the leaves, after loss.backward(). With an engine, all of it inside `with
    engine.backward_context() as step:`, and step.backward_loss(loss, rows, last=False) in place of loss.backward().
    """

    def decorate(function: Callable[..., Representations]) -> Callable[..., tuple[Any, ...]]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            device = engine.mesh.device if engine else raw.device()
            replay = ChunkReplay(lambda: function(*args, **kwargs), device)
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
        group = world_group()
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


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """The model's own no_sync, where it has one."""
    own = getattr(model, "no_sync", None)
    return own() if callable(own) else nullcontext()
