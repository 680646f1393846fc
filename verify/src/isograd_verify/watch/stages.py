"""A pipeline's stages, each computed once more by plain autograd before its optimizer steps: what one device makes of
what a call was given and of what came back to it. Schedules may cut a backward in two, and accumulate by themselves.

compare/chained.py chains the stages of all ranks by the contents that they send one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import unserializable_hook

from isograd_verify.record.events import Staged
from isograd_verify.record.sketch import digest, sketch
from isograd_verify.watch import foreign
from isograd_verify.watch.randomness import generators, set_generators
from isograd_verify.watch.sites import call_site

if TYPE_CHECKING:
    from isograd_verify.watch.capture import Capture

LIMIT = 1 << 28  # bytes of what the calls of a step were given


@dataclass(eq=False)
class _Call:
    """One call: what it was given, with a memory of its own, what it made, and what came back to that."""

    module: nn.Module
    given: tuple[Any, Any]
    states: dict[str, Tensor]  # buffers, and of the random generators
    site: str
    named: dict[str, Tensor] = field(default_factory=dict)  # its parameters
    made: list[Tensor] = field(default_factory=list)
    back: dict[int, Tensor] = field(default_factory=dict)


class Stages:
    """The calls of a step."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.calls: list[_Call] = []
        self.size, self.why = 0, ""
        again = capture.guarded(self._again, "stages")
        capture.hooks.handles.append(register_optimizer_step_pre_hook(lambda *_: again()))

    def called(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module that learns is called from outside any other, with a graph."""
        c, before, begun = self.capture, self.capture.numbers, len(self.calls)
        if foreign.infers_shapes():
            return original(module, *args, **kwargs)
        c.guarded(self._begin, "stages")(module, args, kwargs)
        result = original(module, *args, **kwargs)
        if len(self.calls) > begun:
            c.guarded(self._end, "stages")(self.calls[-1], result, c.numbers > before)
        return result

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = tree_map_only(Tensor, _copy, (args, kwargs))
        self.size += sum(t.numel() * t.element_size() for t in foreign.tensors_in(list(given)))
        states = {name: buffer.clone() for name, buffer in module.named_buffers()} | generators()
        call = _Call(module, given, states, call_site(self.capture.base))
        if self.size > LIMIT:
            self.calls.clear()
            self.why = self.why or f"what the stages at {call.site} are given in a step is larger than {LIMIT} bytes"
        if not self.why:
            self.calls.append(call)

    def _end(self, call: _Call, result: Any, communicates: bool) -> None:
        own = {id(p) for p in call.module.parameters() if p.requires_grad}
        names = self.capture.learn_names().items()
        call.named = {name: p for name, p in names if isinstance(p, Tensor) and id(p) in own}
        if communicates:
            self.why = f"the stage that is called at {call.site} communicates by itself"
        call.made = [t for t in foreign.tensors_in(result) if t.requires_grad]
        every = (*call.named.values(), *call.made, *foreign.tensors_in(list(call.given)))
        if len(call.named) < len(own) or any(isinstance(t, foreign.DTensor) for t in every):
            self.why = f"of what the stage that is called at {call.site} holds or is given a rank has a part"
            self.calls.clear()
            return
        for number, output in enumerate(call.made):
            arrives = self.capture.guarded(partial(self._arrives, call, number), "stages")
            output.register_hook(unserializable_hook(arrives))
        call.made = [output.detach().clone() for output in call.made]

    def _arrives(self, call: _Call, number: int, gradient: Tensor | None) -> None:
        if gradient is None or call not in self.calls:
            return
        if not call.back:
            args = foreign.tensors_in(list(call.given))
            given, made = (tuple(digest(t) for t in of if t.is_floating_point()) for of in (args, call.made))
            about = Staged(
                *self.capture.now, call=self.calls.index(call), site=call.site, given=given, made=made,
                names=tuple(call.named),
            )  # fmt: skip
            self.capture.event(about)
        came = gradient.detach().clone()
        call.back[number] = call.back[number] + came if number in call.back else came

    def _again(self) -> None:
        """All calls to which something came back, in a program whose ranks send one another what stages make."""
        c, calls, why = self.capture, self.calls, self.why
        self.calls, self.size, self.why = [], 0, ""
        if not c.posted:
            return
        if why:
            c.event(Staged(*c.now, call=-1, site="", why=why))
        c.active, now = False, generators()
        try:
            for number, call in enumerate(calls if not why else ()):
                self._compute(call, number)
        finally:
            set_generators(now)
            c.active, c.posted = True, False

    def _compute(self, call: _Call, number: int) -> None:
        c, module = self.capture, call.module
        if not call.back:  # an evaluation
            return
        while foreign.shell(module):
            module = next(iter(module.children()))
        buffers = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}
        for name, (buffer, _) in buffers.items():
            buffer.data.copy_(call.states.get(name, buffer))
        set_generators(call.states)
        args, kwargs = call.given
        with torch.enable_grad():
            made = [t for t in foreign.tensors_in(module(*args, **kwargs)) if t.requires_grad]
        for buffer, value in buffers.values():
            buffer.data.copy_(value)
        inputs = [t for t in foreign.tensors_in(list(call.given)) if t.is_floating_point()]
        wanted = {f"one/{n}": p for n, p in call.named.items()}
        wanted |= {f"stage/{number}/in/{i}": t for i, t in enumerate(inputs) if t.requires_grad}
        apart = [
            float((a - b).detach().norm() / b.norm().clamp_min(1e-30)) for a, b in zip(made, call.made, strict=True)
        ]
        c.tensors[f"stage/{number}/error"] = torch.tensor(apart)
        back = [made[i] for i in call.back]
        gradients = torch.autograd.grad(back, list(wanted.values()), list(call.back.values()), allow_unused=True)
        for name, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None and name.startswith("one/"):
                c.tensors[name] = c.tensors[name] + gradient if name in c.tensors else gradient.clone()
            elif gradient is not None:
                c.tensors[name] = sketch(gradient)
        c.tensors |= {f"stage/{number}/out/{i}": sketch(gradient) for i, gradient in call.back.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
