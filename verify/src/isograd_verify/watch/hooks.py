"""Where a program is watched: each hook says what it sees, why there, and is taken out again."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle, unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from isograd_verify.record.events import Average, Draw, Input, Norm, Reached
from isograd_verify.record.sketch import digest
from isograd_verify.watch import foreign
from isograd_verify.watch.clips import Clips
from isograd_verify.watch.collectives import WatchMode
from isograd_verify.watch.flows import strided
from isograd_verify.watch.fused import Fused
from isograd_verify.watch.given import named, tell
from isograd_verify.watch.recorder import Recorder
from isograd_verify.watch.routing import Routing


class Hooks:
    """All hooks that a capture puts into a program; see the head of this file."""

    def __init__(self, capture: Recorder, watch: WatchMode, fused: Fused, routing: Routing) -> None:
        self.capture, self.watch, self.fused, self.routing = capture, watch, fused, routing
        self.handles: list[RemovableHandle] = []
        self.after: RemovableHandle | None = None
        self.on_parameters: list[RemovableHandle] = []
        self.seen = WeakTensorKeyDictionary()  # not a mark on the parameter: parameters are copied and pickled
        self.wrapped: list[tuple[Any, str, Any]] = []
        self.calls: dict[str, int] = {}

    def install(self) -> None:
        """Puts every hook in place."""
        guarded = self.capture.guarded
        self.handles = [
            module_hooks.register_module_forward_pre_hook(guarded(self._enter)),
            module_hooks.register_module_forward_hook(guarded(self._leave), with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
        ]
        step_ends = guarded(self._step_ends)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            step_ends()
            watching, after = self.capture.tick(optimizer), self.after
            # Torch is walking the list of hooks behind a step: only its last member may go.
            if not watching and after is not None and next(reversed(_global_optimizer_post_hooks), None) == after.id:
                after.remove()
                self.after = None

        if self.after is None:  # else it watches again, called from this very hook
            self.after = register_optimizer_step_post_hook(after_step)
        self.wrap(torch.autograd, "backward", self._backward)
        self.wrap(Optimizer, "add_param_group", self._add_param_group)
        original, watched = self.fused.wrapper()
        self.wrapped.append((torch.autograd.Function, "apply", original))
        torch.autograd.Function.apply = watched  # type: ignore[method-assign]
        self.clips = Clips(self.capture)
        self.clips.install(self.wrap)
        for module, home, name, around in (
            ("torch.optim.swa_utils", "AveragedModel", "update_parameters", self._averaged),
            ("isograd.engine.engine", "Engine", "step", self._isograd_step),
            ("isograd.nn.routing", "", "choose", self._isograd_choice),
            ("deepspeed.runtime.engine", "DeepSpeedEngine", "step", self._deepspeed_step),
        ):
            if (found := sys.modules.get(module)) is not None:
                self.wrap(getattr(found, home) if home else found, name, around)

    def remove(self) -> None:
        """All but the hook behind optimizer steps, which times some more of them, and from which this is called."""
        for handle in (*self.handles, *self.on_parameters):
            handle.remove()
        for home, name, original in reversed(self.wrapped):
            if getattr(getattr(home, name), "__wrapped__", None) is original:  # else the program has wrapped it too
                setattr(home, name, original)
        self.handles, self.on_parameters, self.wrapped = [], [], []
        self.seen = WeakTensorKeyDictionary()

    def close(self) -> None:
        """Takes out the hooks that are left, the one that times steps included."""
        self.remove()
        if self.after is not None:
            self.after.remove()

    def wrap(self, home: Any, name: str, around: Callable[..., Any]) -> None:
        """While the capture looks, `around` is called in place of a function, with the function first."""
        original = getattr(home, name)
        self.wrapped.append((home, name, original))

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if self.capture.active else original(*args, **kwargs)

        setattr(home, name, wrapper)

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Before a module's own hooks: the outermost one tells the names and the data."""
        c = self.capture
        self.routing.called(args)
        if torch._C._current_graph_task_id() != -1:  # checkpointing computes it once more, inside backward
            return
        if foreign.functional():  # its gradients are returned, and reach no parameter
            c.out.about["functional"] = True
            c.out.save_about()
            return
        if not c.stack and foreign.imagined(args):  # shapes are computed, and nothing else
            return
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            c.compiled = True
        if not c.stack:
            c.close_step()
            if not c.active:
                return
            self._learn(module)
            if c.modules.get(module) is not None and torch.is_grad_enabled():
                c.event(Input(*c.now, forward=c.micro + 1))
            c.reserve()
            self.calls.clear()
            if torch.is_grad_enabled():
                c.guarded(c.look_at_buffers, "buffers")("between")
        elif module not in c.modules and not c.flats:  # in a list, where torch does not find it
            mine = [p for p in module.parameters() if p.requires_grad and p.is_leaf and not foreign.flat(p)]
            if not all(p in c.names for p in mine):
                self._learn(module)
        if not c.stack or any(isinstance(one, Tensor) for one in (*module._buffers.values(), *vars(module).values())):
            c.guarded(self.watch.states.called, "states")(module, args)
        c.stack.append(c.modules.get(module, type(module).__name__))
        c.drawn.append(False)

    def _learn(self, module: nn.Module) -> None:
        self.capture.root(module)
        for name, parameter in self.capture.learn_names().items():
            if isinstance(parameter, Tensor):
                self._on_parameter(name, parameter)

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """After a module's forward and before its own hooks: FSDP's parameters are still whole here. `rest`: keyword
        arguments and the output; of a forward that raises (checkpointing does, to end early) the output alone."""
        kwargs, output = rest if len(rest) == 2 else ({}, None)
        c = self.capture
        if c.flats:
            self._on_views(module)  # also of a forward that is computed once more
        if not c.stack or torch._C._current_graph_task_id() != -1:
            return
        name = c.stack.pop()
        drew = c.drawn.pop()
        if not c.stack and c.modules.get(module) is not None and torch.is_grad_enabled():
            c.guarded(tell, "data")(c, named(module, args, kwargs), foreign.tensors_in(output))
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                self._on_parameter(f"{name}.{leaf}" if name else leaf, parameter)
        first = next((t for t in foreign.tensors_in(output)), None)
        given = next((t for t in foreign.tensors_in(args)), None)
        if drew and first is not None and given is not None:
            into, out = foreign.local(given), foreign.local(first)
            about: dict[str, Any] = {"module": name, "forward": c.micro + 1, "graph": torch.is_grad_enabled()}
            about |= {"into": digest(into), "out": digest(out), "mask": _mask(into, out)}
            c.event(Draw(*c.now, shape=tuple(first.shape), **about))
        if first is None:
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

            def note(gradient: Tensor | None) -> None:
                if gradient is None:
                    return
                c.behind = name
                if c.activations and c.step == 1:
                    c.keep_activation("back", label, foreign.local(gradient))

            first.register_hook(unserializable_hook(c.guarded(note, "activations")))

    def _on_parameter(self, name: str, parameter: Tensor) -> None:
        """A leaf's hook runs with the gradient of all its uses in this backward, before it is added to `grad`."""
        if not parameter.requires_grad or not parameter.is_leaf or foreign.flat(parameter) or parameter in self.seen:
            return
        self.seen[parameter] = True
        c = self.capture
        name = c.names.get(parameter, name)
        box = foreign.box_of(parameter) if isinstance(parameter, foreign.DTensor) else None
        hooks = partial(c.contribution, name, box=box), partial(c.accumulated, name)
        arrival, accumulation = (unserializable_hook(c.guarded(hook)) for hook in hooks)
        accumulation._isograd_hook = True  # an Engine refuses others (engine/validation.py)
        self.on_parameters.append(parameter.register_hook(arrival))
        self.on_parameters.append(parameter.register_post_accumulate_grad_hook(accumulation))

    def _on_views(self, module: nn.Module) -> None:
        """Inside a module of FSDP1's its parameters are whole: what comes back to them is this rank's contribution."""
        c = self.capture
        for prefix, flat in c.flats:
            wrapper = flat()
            if wrapper is None or wrapper.module is not module:
                continue
            for name, view in foreign.views(wrapper).items():
                if view not in self.seen:
                    self.seen[view] = True
                    arrives = partial(c.contribution, prefix + name)
                    view.register_hook(unserializable_hook(c.guarded(arrives)))

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        roots = foreign.tensors_in(args[0] if args else kwargs.get("tensors"))
        inside = torch._C._current_graph_task_id() != -1 or self.capture.in_function or self.capture.backing
        if not inside:  # recomputation calls backward inside backward, a Function in its forward: it is the same one
            gradients = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
            scaled = self.clips.scaled(roots) if gradients is None else 0
            self.capture.guarded(self.capture.backward_begins)(roots, scaled)
            self.capture.guarded(self.capture.look_at_buffers, "buffers")("forward")
            self.capture.guarded(self.watch.means.hook_fresh, "means")()
            self.capture.guarded(self.watch.terms.begin, "terms")(roots)
            self.capture.guarded(self._reached, "flows")(roots)
            self.capture.guarded(self.watch.states.begin, "states")(roots)
        self.capture.backing += 1
        try:
            return original(*args, **kwargs)
        finally:
            self.capture.backing -= 1
            if torch._C._current_graph_task_id() == -1:
                self.capture.guarded(self.capture.look_at_buffers, "buffers")("backward")

    def _reached(self, roots: list[Tensor]) -> None:
        calls = self.watch.flows.of(strided(roots))
        if calls:
            self.capture.event(Reached(*self.capture.now, calls=tuple(calls.items())))

    def _add_param_group(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        self.capture.guarded(self.capture.entrusted)(optimizer, foreign.stepped(optimizer))
        return result

    def _averaged(self, original: Any, averaged: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(averaged, *args, **kwargs)
        self.capture.guarded(self._average, "averages")(averaged)
        return result

    def _average(self, averaged: nn.Module) -> None:
        named = foreign.unwrapped(averaged.module).named_parameters()  # type: ignore[arg-type]
        hashes = {foreign.plain_name(name): digest(foreign.local(p)) for name, p in named}
        self.capture.event(Average(*self.capture.now, hashes=hashes))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """An optimizer's closure computes gradients inside its step: its first call is the step that is judged."""
        closure = kwargs.get("closure") if "closure" in kwargs else args[1] if len(args) > 1 else None
        self.capture.guarded(self._step_begins)(optimizer, closure)
        if closure is None or not self.capture.active:
            return None
        watched = self._closure(optimizer, closure)
        return (args, kwargs | {"closure": watched}) if "closure" in kwargs else ((args[0], watched, *args[2:]), kwargs)

    def _step_begins(self, optimizer: Optimizer, closure: Any) -> None:
        c = self.capture
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("an optimizer steps inside backward, parameter by parameter, which is not understood")
        c.stepping += 1
        if c.stepping == 1 and not self.capture.inside_engine and closure is None:
            c.before_step(foreign.stepped(optimizer), _rates(optimizer))

    def _closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        c = self.capture
        called = False

        def watched() -> Any:
            nonlocal called
            if called:
                active, c.active = c.active, False
                try:
                    return closure()
                finally:
                    c.active = active
            called = True
            stepping, c.stepping = c.stepping, 0
            result = closure()
            c.guarded(c.before_step)(foreign.stepped(optimizer), _rates(optimizer))
            c.stepping = stepping if c.active else 0
            return result

        return watched

    def _step_ends(self) -> None:
        self.capture.stepping -= 1
        if self.capture.stepping == 0 and not self.capture.inside_engine:
            self.capture.after_step()

    def _isograd_step(self, original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Its gradients are sums until the step divides; `grads()` gives them whole and divided, on every rank."""
        c = self.capture
        c.root(engine.model)
        c.learn_names()
        named = {name: c.names.get(parameter, name) for name, parameter in engine.model.named_parameters()}
        gradients = {}
        for name, whole in engine.grads().items():
            if name not in engine.table.records:  # of another pipeline stage
                continue
            box, known = engine.table[name].local(engine.mesh), named.get(name, name)
            c.boxes[known] = tuple((a, b) for a, b in box), tuple(whole.shape)
            gradients[known] = whole[tuple(slice(*span) for span in box)]
        with engine.full_parameters():
            self._ask(gradients)
        c.owned |= set(c.learn_names())
        return self._within(original, engine, *args, whole=engine.full_parameters, **kwargs)

    def _isograd_choice(self, original: Any, scores: Tensor, options: Any, bias: Tensor | None = None) -> Any:
        """Its experts: by a stable sort, and of groups that are chosen first."""
        routing = self.routing
        routing.inside = True
        try:
            indices = original(scores, options, bias)
        finally:
            routing.inside = False
        ranked = scores if bias is None else scores + bias.to(scores.dtype)
        instead: list[Tensor | None] = []

        def note() -> None:
            instead.append(self.routing.chosen(ranked, indices, foreign.call_site(self.capture.base)))

        self.capture.guarded(note, "choices")()
        return indices if not instead or instead[0] is None else instead[0]

    def _deepspeed_step(self, original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Only at an accumulation boundary does DeepSpeed step; its full gradients are public functions' answers."""
        if not engine.is_gradient_accumulation_boundary():
            return original(engine, *args, **kwargs)
        from deepspeed.utils import safe_get_full_grad

        c = self.capture
        c.root(engine.module)
        gradients = {name: safe_get_full_grad(p) for name, p in c.learn_names().items() if p.requires_grad}
        self._ask({name: g for name, g in gradients.items() if g is not None})
        c.owned |= set(gradients)
        return self._within(original, engine, *args, **kwargs)

    def _ask(self, gradients: dict[str, Tensor]) -> None:
        c = self.capture
        c.snapshot(gradients)
        for name, parameter in c.learn_names().items() if c.parameters else ():
            c.keep(f"parameter/{name}", foreign.local(parameter), parameter)

    def _within(self, original: Any, engine: Any, *args: Any, whole: Any = nullcontext, **kwargs: Any) -> Any:
        """`whole`: makes parameters readable that are kept as shards."""
        self.capture.inside_engine += 1
        try:
            result = original(engine, *args, **kwargs)
        finally:
            self.capture.inside_engine -= 1
        norm = getattr(result, "grad_norm", None)
        if norm is not None:
            self.capture.event(Norm(*self.capture.now, value=float(norm)))
        with whole():
            self.capture.after_step()
        return result


def _rates(optimizer: Optimizer) -> list[float | None]:
    known = [float(g["lr"]) if isinstance(g.get("lr"), float | int | Tensor) else None for g in optimizer.param_groups]
    return [rate for rate, group in zip(known, optimizer.param_groups, strict=True) for _ in group["params"]]


def _mask(given: Tensor, made: Tensor) -> str:
    """The hash of the elements that a dropout has made zero; '' of a module that is none."""
    if given.shape != made.shape or not bool(given.all()):
        return ""
    dropped = made == 0
    return digest(dropped) if bool(dropped.any()) and not bool(dropped.all()) else ""
