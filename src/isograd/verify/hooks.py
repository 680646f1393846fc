"""Where a program is watched: each hook says what it sees, why there, and is taken out again.

Module hooks are torch's global ones, tensor hooks sit on parameters and module outputs, and three functions are
wrapped: autograd.backward (a micro-batch begins), clip_grad_norm_ (gradients before clip), and the step of engines
that hold their own gradients (isograd, DeepSpeed), which are asked for them through their public functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from isograd.verify import foreign
from isograd.verify.collectives import call_site

if TYPE_CHECKING:
    from isograd.verify.capture import Capture

_SEEN = "_isograd_watched"


class Hooks:
    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.handles: list[Any] = []
        self.wrapped: list[tuple[Any, str, Any]] = []
        self.calls: dict[str, int] = {}
        self.inside_engine = 0

    def install(self) -> None:
        self.handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, with_kwargs=False, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        self._wrap(torch.autograd, "backward", self._backward)
        for home in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._wrap(home, "clip_grad_norm_", self._clip)
        self._wrap(torch.nn.utils, "clip_grads_with_norm_", self._clip_with)
        engine = sys.modules.get("isograd.engine.engine")
        if engine is not None:
            self._wrap(engine.Engine, "step", self._isograd_step)
        deepspeed = sys.modules.get("deepspeed.runtime.engine")
        if deepspeed is not None:
            self._wrap(deepspeed.DeepSpeedEngine, "step", self._deepspeed_step)

    def remove(self) -> None:
        """Optimizer hooks are only left idle: this is called from one of them, and torch walks the list just then."""
        for handle in self.handles[:2]:
            handle.remove()
        for home, name, original in reversed(self.wrapped):
            setattr(home, name, original)
        self.handles, self.wrapped = self.handles[2:], []

    def close(self) -> None:
        self.remove()
        for handle in self.handles:
            handle.remove()

    def _wrap(self, home: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(home, name)
        self.wrapped.append((home, name, original))

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if self.capture.active else original(*args, **kwargs)

        wrapper.__name__, wrapper.__doc__, wrapper.__wrapped__ = name, original.__doc__, original  # type: ignore[attr-defined]
        setattr(home, name, wrapper)

    # -- forward -------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Before a module's own hooks: the outermost one tells the names and the data."""
        c = self.capture
        if not c.active:
            return
        if not c.stack:
            c.root(module)
            if c.modules.get(module) is not None and torch.is_grad_enabled():
                c.inputs([t for t in args if isinstance(t, Tensor)])
            for name, parameter in c.learn_names().items():
                self._on_parameter(name, parameter)
            self.calls.clear()
        c.stack.append(c.modules.get(module, type(module).__name__))
        c.drawn.append(False)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After a module's forward and before its own hooks: FSDP's parameters are still whole here."""
        c = self.capture
        if not c.active or not c.stack:
            return
        name = c.stack.pop()
        drew = c.drawn.pop()
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                self._on_parameter(f"{name}.{leaf}" if name else leaf, parameter)
        first = next((t for t in _tensors(output)), None)
        given = next((t for t in _tensors(args)), None)
        if drew and first is not None and given is not None:
            from isograd.verify.capture import digest

            c.event(
                "random", module=name, into=digest(foreign.local(given)), out=digest(foreign.local(first)),
                shape=list(first.shape), forward=c.micro + 1,
            )  # fmt: skip
        if first is None or not torch.is_tensor(first):
            return
        micro = c.micro + 1  # the backward that will follow
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        label = f"{micro}/{name}#{call}"
        if c.activations and c.step == 1 and torch.is_grad_enabled():
            c.keep_activation("out", label, foreign.local(first))
            if given is not None:
                c.keep_activation("in", label, foreign.local(given))
        if first.requires_grad and torch.is_grad_enabled():

            def note(gradient: Tensor) -> None:
                if c.active:
                    c.behind = name
                    if c.activations and c.step == 1:
                        c.keep_activation("back", label, foreign.local(gradient))

            first.register_hook(note)

    def _on_parameter(self, name: str, parameter: Tensor) -> None:
        """A leaf's hook runs with the gradient of all its uses in this backward, before it is added to `grad`."""
        if not parameter.requires_grad or getattr(parameter, _SEEN, None) is self.capture:
            return
        setattr(parameter, _SEEN, self.capture)
        c = self.capture
        name = c.names.get(id(parameter), name)

        def arrives(gradient: Tensor) -> None:
            if c.active:
                c.contribution(name, gradient)

        def accumulated(leaf: Tensor) -> None:
            if c.active:
                c.accumulated(name, leaf)

        if parameter.is_leaf:
            parameter.register_hook(arrives)
            parameter.register_post_accumulate_grad_hook(accumulated)

    # -- backward and step ---------------------------------------------------------------------------------------

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # recomputation calls backward inside backward: the same one
            self.capture.backward_begins()
        return original(*args, **kwargs)

    def _clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.capture.snapshot()
        result = original(*args, **kwargs)
        if isinstance(result, Tensor) and not isinstance(result, foreign.DTensor):
            self.capture.norm(float(result), call_site(self.capture.base))
        return result

    def _clip_with(self, original: Any, parameters: Any, max_norm: float, total_norm: Tensor, *a: Any, **k: Any) -> Any:
        """Clipping by a norm that the program computed itself: it tells the norm."""
        self.capture.snapshot()
        if isinstance(total_norm, Tensor) and not isinstance(total_norm, foreign.DTensor):
            self.capture.norm(float(total_norm), call_site(self.capture.base))
        return original(parameters, max_norm, total_norm, *a, **k)

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        c = self.capture
        if not c.active:
            return
        c.stepping += 1
        if c.stepping == 1 and not self.inside_engine:
            c.before_step([p for group in optimizer.param_groups for p in group["params"]])

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        c = self.capture
        if not c.active:
            return
        c.stepping -= 1
        if c.stepping == 0 and not self.inside_engine:
            c.after_step()

    def _isograd_step(self, original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Its gradients are sums until the step divides; `grads()` gives them whole and divided, on every rank."""
        c = self.capture
        c.root(engine.model)
        gradients = {}
        for name, whole in engine.grads():
            box = engine.table[name].local(engine.mesh)
            c.boxes[name] = [list(span) for span in box], list(whole.shape)
            gradients[name] = whole[tuple(slice(*span) for span in box)]
        self._ask(gradients)
        c.owned |= set(c.learn_names())
        return self._within(original, engine, *args, **kwargs)

    def _deepspeed_step(self, original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Only at an accumulation boundary does DeepSpeed step; its full gradients are public functions' answers."""
        if not engine.is_gradient_accumulation_boundary():
            return original(engine, *args, **kwargs)
        from deepspeed.utils import safe_get_full_grad  # type: ignore[import-not-found]

        c = self.capture
        c.root(engine.module)
        gradients = {name: safe_get_full_grad(p) for name, p in c.learn_names().items() if p.requires_grad}
        self._ask({name: g for name, g in gradients.items() if g is not None})
        c.owned |= set(gradients)
        return self._within(original, engine, *args, **kwargs)

    def _ask(self, gradients: dict[str, Tensor]) -> None:
        c = self.capture
        c.snapshot(gradients)
        for name, parameter in c.learn_names().items():
            c.keep(f"parameter/{name}", foreign.local(parameter))

    def _within(self, original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        self.inside_engine += 1
        try:
            result = original(engine, *args, **kwargs)
        finally:
            self.inside_engine -= 1
        norm = getattr(result, "grad_norm", None)
        if norm is not None:
            self.capture.norm(float(norm), call_site(self.capture.base))
        self.capture.after_step()
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    return []
