"""Sees a program clip: gradients are looked at before, norms are told, and gradient scalers are watched: a clip before
`unscale_` compares gradients that are many times as large with its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isograd_verify import tolerances
from isograd_verify.record.events import Norm, ScaledClip
from isograd_verify.watch import foreign
from isograd_verify.watch.recorder import Recorder
from isograd_verify.watch.terms import SCALED, scaled


@dataclass(frozen=True)
class Clip:
    """A clip to a norm, or of each element."""

    parameters: list[Tensor]
    bound: float
    norm: Any  # None: of each element
    site: str
    backwards: int  # before it

    def clipped(self) -> bool:
        """Whether it changed something: of elements the largest is the bound now."""
        if self.norm is not None:
            return self.bound < float(foreign.local(self.norm)) < float("inf")
        held = [foreign.local(p.grad) for p in self.parameters if p.grad is not None]
        near = self.bound * (1 - tolerances.ONE_FACTOR)  # in half precision
        return any(g.numel() and float(g.abs().max()) >= near for g in held)


class Clips:
    """Clips since the last backward, and optimizers whose gradients have lost a scaler's factor."""

    def __init__(self, capture: Recorder) -> None:
        self.capture = capture
        self.clips: list[Clip] = []
        self.unscaled: dict[int, int] = {}  # an optimizer's id -> the backwards before

    def install(self, wrap: Callable[[Any, str, Callable[..., Any]], None]) -> None:
        """`wrap`: puts a function around another one."""
        for home in (torch.nn.utils, torch.nn.utils.clip_grad):
            wrap(home, "clip_grad_norm_", self._clips)
            wrap(home, "clip_grad_value_", self._clips)
        wrap(torch.nn.utils, "clip_grads_with_norm_", self._clips)
        wrap(foreign.FullyShardedDataParallel, "clip_grad_norm_", self._clips)
        for scaler in (torch.amp.GradScaler, foreign.ShardedGradScaler):
            wrap(scaler, "unscale_", self._unscales)
            wrap(scaler, "scale", self._scales)
        wrap(torch.amp.GradScaler, "step", self._steps)

    def _clips(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, Iterable) and not isinstance(parameters, Tensor | nn.Module):
            parameters = list(parameters)  # an iterator can be read once
        self.capture.guarded(self.capture.snapshot)()
        result = original(parameters, *args, **kwargs)
        bound, given = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value")), [*args[1:2], None][0]
        with_norm = original.__name__.endswith("clip_grads_with_norm_")
        norm = kwargs.get("total_norm", given) if with_norm else result
        self.capture.guarded(self._note, "norms")(parameters, bound, norm)
        return result

    def _note(self, parameters: Any, bound: float, norm: Any) -> None:
        c, site = self.capture, foreign.call_site(self.capture.base)
        if isinstance(norm, Tensor) and not isinstance(norm, foreign.DTensor):
            c.event(Norm(*c.now, value=float(norm)))
        held = [*parameters.parameters()] if isinstance(parameters, nn.Module) else parameters
        self.clips = [clip for clip in self.clips if clip.backwards == c.backwards]
        self.clips.append(Clip([held] if isinstance(held, Tensor) else held, float(bound), norm, site, c.backwards))

    def _steps(self, original: Any, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.capture.guarded(self._look, "norms")(scaler, optimizer)
        return original(scaler, optimizer, *args, **kwargs)

    def _scales(self, original: Any, scaler: Any, outputs: Any) -> Any:
        result = original(scaler, outputs)
        for made in foreign.tensors_in(result) if scaler.is_enabled() else ():
            if made.grad_fn is not None:
                made.grad_fn.metadata[SCALED] = True  # type: ignore[index]
        return result

    def scaled(self, roots: list[Tensor]) -> int:
        """Whether a backward begins with a scaled loss; behind `unscale_` an unscaled one is right."""
        c = self.capture
        return 0 if c.micro >= 0 and c.backwards in self.unscaled.values() else scaled(roots)

    def _unscales(self, original: Any, scaler: Any, optimizer: Optimizer) -> Any:
        result = self._steps(original, scaler, optimizer)
        self.capture.guarded(self._look_again, "norms")(optimizer)
        return result

    def _look_again(self, optimizer: Optimizer) -> None:
        """Gradients that were looked at with their factor, when those of another optimizer were clipped."""
        c = self.capture
        clipped = {id(p) for clip in self.clips if clip.backwards == c.backwards for p in clip.parameters}
        owned = set(map(id, foreign.stepped(optimizer))) - clipped
        for name, parameter in c.learn_names().items() if c.snapped else ():
            if id(parameter) in owned and parameter.grad is not None and f"sum/{name}" in c.tensors:
                c.gradient(name, parameter, parameter.grad)

    def _look(self, scaler: Any, optimizer: Optimizer) -> None:
        """A scaler is about to take its factor from the gradients of an optimizer, unless it has done so before."""
        c = self.capture
        if not scaler.is_enabled() or self.unscaled.get(id(optimizer)) == c.backwards:
            return
        self.unscaled[id(optimizer)] = c.backwards
        scale = float(scaler.get_scale())
        owned = set(map(id, foreign.stepped(optimizer)))
        for clip in self.clips:
            far = clip.bound < scale * tolerances.SCALED  # else the program has multiplied the one by the other
            if far and clip.backwards == c.backwards and owned & set(map(id, clip.parameters)) and clip.clipped():
                c.event(ScaledClip(*c.now, site=clip.site, bound=clip.bound, scale=scale))
