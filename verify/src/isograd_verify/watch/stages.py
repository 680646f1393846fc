"""A pipeline's stages, each computed once more by plain autograd before its optimizer steps: what one device makes of
what a call was given and of what came back to it (compare/chained.py chains them). Where nothing was sent or received
when the first gradient comes back, there is no pipeline in a step, and nothing is kept of it.
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

from isograd_verify import tolerances
from isograd_verify.record.events import Staged
from isograd_verify.record.sketch import digest, sketch
from isograd_verify.watch import foreign
from isograd_verify.watch.variables import generators, set_generators

if TYPE_CHECKING:
    from isograd_verify.watch.capture import Capture

LIMIT = 1 << 28  # bytes of what the calls of a step were given


@dataclass(eq=False)
class _Call:
    """One call: what it was given, kept apart; what it made (digest, sketch); what came back to that."""

    module: nn.Module
    given: list[Any]
    states: dict[str, Tensor]  # buffers, and of the random generators
    site: str
    named: dict[str, Tensor] = field(default_factory=dict)  # its parameters
    made: list[tuple[str, Tensor]] = field(default_factory=list)
    back: dict[int, Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> list[Tensor]:
        return [t for t in foreign.tensors_in(self.given) if t.is_floating_point()]


class StageCalls:
    """The calls of a step. `why`: they cannot be computed once more. `alone`: there is no pipeline."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.calls: list[_Call] = []
        self.size, self.why, self.alone = 0, "", False
        again = capture.guarded(self._again, "stages")
        capture.hooks.handles.append(register_optimizer_step_pre_hook(lambda *_: again()))

    def called(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module that learns is called from outside any other, with a graph."""
        c, before, begun = self.capture, self.capture.numbers, len(self.calls)
        if not self.why and not self.alone and not foreign.infers_shapes():
            c.guarded(self._begin, "stages")(module, args, kwargs)
        result = original(module, *args, **kwargs)
        if len(self.calls) > begun:
            c.guarded(self._end, "stages")(self.calls[-1], result, c.numbers > before)
        return result

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), [args, kwargs])
        states = {name: buffer.clone() for name, buffer in module.named_buffers()} | generators()
        self.size += sum(t.numel() * t.element_size() for t in foreign.tensors_in(given))
        self.calls.append(_Call(module, given, states, foreign.call_site(self.capture.base)))

    def _end(self, call: _Call, result: Any, communicates: bool) -> None:
        own = {id(p) for p in call.module.parameters() if p.requires_grad}
        named = self.capture.learn_names().items()
        call.named = {name: p for name, p in named if isinstance(p, Tensor) and id(p) in own}
        made = _made(result)
        every = (*call.named.values(), *made, *call.inputs)
        cut = len(call.named) < len(own) or any(isinstance(t, foreign.DTensor) for t in every)
        if communicates or cut or self.size > LIMIT:
            kinds = {communicates: "communicates by itself", cut and not communicates: "is cut"}
            what = kinds.get(True, f"is given more than {LIMIT} bytes")
            self.calls, self.why = [], f"the stage that is called at {call.site} {what}"
            return
        for number, output in enumerate(made):
            arrives = self.capture.guarded(partial(self._arrives, call, number), "stages")
            output.register_hook(unserializable_hook(arrives))
        call.made = [(digest(output), sketch(output)) for output in made]

    def _arrives(self, call: _Call, number: int, gradient: Tensor | None) -> None:
        if gradient is None or call not in self.calls:
            return
        if not self.capture.posted:
            self.calls, self.alone = [], True
            return
        if not call.back:
            given, made = tuple(map(digest, call.inputs)), tuple(digested for digested, _ in call.made)
            at, names = self.calls.index(call), tuple(call.named)
            still = tuple(i for i, one in enumerate(call.inputs) if not one.requires_grad)
            told = Staged(*self.capture.now, call=at, site=call.site, given=given, made=made, names=names, still=still)
            self.capture.event(told)
        call.back[number] = call.back.get(number, 0) + gradient.detach().clone()

    def _again(self) -> None:
        """All calls to which something came back, in a program whose ranks send one another what stages make."""
        c, calls = self.capture, self.calls
        c.active, now = False, generators()
        try:
            for number, call in enumerate(calls):
                if call.back:
                    self._compute(call, number)
        finally:
            set_generators(now)
            c.active = True
        if self.why:
            c.event(Staged(*c.now, call=-1, site="", why=self.why))
        self.calls, self.size, self.why, self.alone, c.posted = [], 0, "", False, False

    def _compute(self, call: _Call, number: int) -> None:
        c, module = self.capture, foreign.unwrapped(call.module)
        buffers = [(call.states.get(name, b), b, b.clone()) for name, b in module.named_buffers()]
        for was, buffer, _ in buffers:
            buffer.data.copy_(was)
        set_generators(call.states)
        with torch.enable_grad():
            made = _made(module(*call.given[0], **call.given[1]))
        for _, buffer, now in buffers:
            buffer.data.copy_(now)
        pairs = [(sketch(one), was) for one, (_, was) in zip(made, call.made, strict=True)]
        if any(float((one - was).norm()) > tolerances.START * float(was.norm()) for one, was in pairs):
            self.why = f"the stage that is called at {call.site} makes something else when it is computed once more"
        wanted = {f"one/{name}": p for name, p in call.named.items()}
        wanted |= {f"stage/{number}/in/{i}": t for i, t in enumerate(call.inputs) if t.requires_grad}
        sent = _sent({i: (made[i], gradient) for i, gradient in call.back.items()})
        gradients = _through([(made[i], gradient) for i, gradient in sent.items()], list(wanted.values()))
        for name, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None:
                part = gradient.clone() if name in c.tensors or name.startswith("one/") else sketch(gradient)
                c.tensors[name] = c.tensors[name] + part if name in c.tensors else part
        c.tensors |= {f"stage/{number}/out/{i}": sketch(gradient) for i, gradient in sent.items()}


def _made(result: Any) -> list[Tensor]:
    """The tensors with a graph that a call returns, each once."""
    return list({id(t): t for t in foreign.tensors_in(result) if t.requires_grad}.values())


def _through(made: list[tuple[Tensor, Tensor]], wanted: list[Tensor]) -> tuple[Tensor | None, ...]:
    outputs, gradients = zip(*made, strict=True)
    return torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True)


def _sent(back: dict[int, tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
    """Of what came back to each output, what came from outside: an output of which another one is made gets what
    comes back through that, too."""
    found = {i: gradient for i, (_, gradient) in back.items()}
    for _ in range(len(back) - 1):  # the last of a chain of outputs is known at first, then that before it
        others = {i: [(back[j][0], found[j]) for j in back if j != i] for i in back}
        inner = {i: _through(others[i], [one])[0] for i, (one, _) in back.items()}
        found = {i: all_of if (one := inner[i]) is None else all_of - one for i, (_, all_of) in back.items()}
    return {i: g for i, g in found.items() if float(g.norm()) >= tolerances.START * float(back[i][1].norm())}
