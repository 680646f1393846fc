"""Gives a program, run as a world of one, the data of an earlier run of it: each call of its model gets what a call of
some rank was made with (calls.py), and each backward is recorded by itself, as an optimizer step of its own.

Its first step is left as it is; then calls are fed. Optimizers find no gradients; weights, and what modules carry from
step to step, are those with which the other run's step began. After the last call the process ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from isograd_verify.io.untrusted import CONFIG, read_json
from isograd_verify.record.recording import BEHIND, WEIGHTS, load
from isograd_verify.watch import foreign
from isograd_verify.watch.calls import CACHE, GRAPH, file_of, joined, outermost, states, total
from isograd_verify.watch.life import Steps
from isograd_verify.watch.variables import found, set_generators

if TYPE_CHECKING:
    from isograd_verify.watch.capture import Capture


class Loopback:
    """What a world of one sends to itself is what it receives: by tag, in the order of sending."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.sent: dict[int, list[Tensor]] = defaultdict(list)
        self.waiting: dict[int, list[tuple[Tensor, str]]] = defaultdict(list)

    def __call__(self, op: str, named: dict[str, Any]) -> Any:
        tag = named["tag"]
        for tensor in named["tensors"]:
            if op == "recv" and not self.sent[tag]:
                self.waiting[tag].append((tensor, foreign.call_site(self.base)))
            elif op == "recv":
                tensor.copy_(self.sent[tag].pop(0).view(tensor.shape))
            elif self.waiting[tag]:
                target, _ = self.waiting[tag].pop(0)
                target.copy_(tensor.view(target.shape))
            else:
                self.sent[tag].append(tensor.detach().clone())
        done = torch.zeros(1, device=named["tensors"][0].device)  # a collective that is over gives its Work
        return torch.ops.c10d._allgather_base_.default(done.clone(), done, named["process_group"], False, -1)[1]

    def check(self) -> None:
        """Nothing is waited for when a backward begins."""
        if site := next((site for open_ones in self.waiting.values() for _, site in open_ones), ""):
            raise RuntimeError(f"{site} waits for what nobody sends in a world of one")


def leave(capture: Capture) -> None:
    """Ends the process. Nothing else of it runs: a program may write its results when it ends."""
    capture.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Feed:
    """`file`: a JSON object of what to feed, see run/beside.py. `done`: called after the last backward."""

    def __init__(self, capture: Capture, file: Path, done: Callable[[Capture], None] = leave) -> None:
        self.capture, self.done = capture, done
        about = read_json(file, CONFIG)
        self.home = file.parent
        self.queue = [([int(r) for r in ranks], int(micro), int(step)) for ranks, micro, step in about["backwards"]]
        self.learn = {int(step): held for step, held in about["learn"].items()}  # by step: whether a parameter did so
        self.natural = int(about["natural"])  # so many steps at first are the program's own
        self.turns = int(about["turns"])  # so many make a round, in which optimizers step one after another
        if self.turns > 1:  # what steps later in a round may be in the graph before
            self.stepped = self.learn
            every = {name for held in self.learn.values() for name, yes in held.items() if yes}
            self.learn = {step: {name: name in every for name in held} for step, held in self.learn.items()}
        self.fed = self.call = 0  # backwards that are over; calls of the model in this one
        self.cached = False  # calls without a graph were fed in this step: what follows from them stands in variables
        self.withheld: list[tuple[Tensor, Tensor]] = []
        self.start: dict[str, Tensor] = {}  # each weight as it began
        self.began: dict[str, Tensor] = {}  # what modules carry, as it began
        self.moving = {str(name) for name in about["moving"]}  # of that, what changed in the other run
        self.means = load(self.home / about["means"]) if about["means"] else {}  # in place of what it was there
        self.states: Callable[[], dict[str, Tensor]] = dict
        self.loopback = capture.watch.loopback = Loopback(capture.base)
        capture.beside, capture.steps = True, Steps(len(self.queue) + 1 + self.turns)
        capture.hooks.wrap(nn.Module, "__call__", self._called)
        capture.hooks.wrap(torch.autograd, "backward", self._backward)
        capture.hooks.handles.append(register_optimizer_step_pre_hook(self._withhold))
        register_optimizer_step_post_hook(self._give_back)  # stays: hooks are taken out behind a step, from their list

    def _called(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kind = outermost(self.capture, module)
        if kind == CACHE:  # does the backward that comes take the outputs of such calls?
            ranks, micro, step = self.queue[self.fed] if self.queue else ([], 0, 0)
            cached = [self.home / f"rank-{rank:04d}" / file_of(step, micro, 0, CACHE) for rank in ranks]
        if kind == GRAPH or (kind == CACHE and cached and all(path.exists() for path in cached)):
            self.plain: dict[str, Any] = {}
            self.capture.guarded(self._replace)(module, kind, args, kwargs)
            if self.capture.failure:
                self.done(self.capture)
            args = tuple(self.plain.get(str(i), value) for i, value in enumerate(args))
            kwargs = {name: self.plain.get(name, value) for name, value in kwargs.items()}
        return original(module, *args, **kwargs)

    def _replace(self, module: nn.Module, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gives the tensors of a call, and of the variables around it, the contents that they had in the other run.
        Behind a call without a graph variables hold what was computed from it, and arguments alone are data."""
        self.capture.close_step()
        if foreign.world()[1] != 1:
            raise RuntimeError(f"the program started {foreign.world()[1]} ranks where one was asked for")
        self.capture.root(module)
        self._remember()
        self.states = partial(states, module)
        for name, value in self.states().items():
            self.began.setdefault(name, value.detach().clone())
        if self.capture.step <= self.natural:
            return
        self.natural = 0
        if not self.queue:
            self.done(self.capture)
        ranks, micro, step = self.queue[self.fed]
        if not self.call:
            self._leave_states()
            self._set_weights(step)
        self.capture.routing.only = step
        paths = {rank: self.home / f"rank-{rank:04d}" / file_of(step, micro, self.call, kind) for rank in ranks}
        self.call += 1
        for rank in (rank for rank, path in paths.items() if not path.exists()):
            raise RuntimeError(
                f"the model is called {self.call} times before a backward, and less often on rank {rank}"
            )
        kept = load(paths[ranks[0]]) if len(paths) == 1 else joined([*map(load, paths.values())])
        words = {name: value for name, value in kept.items() if name.startswith("plain/")}
        self.plain = {name[6:]: json.loads(bytes(value.tolist())) for name, value in words.items()}
        self._give(kept | self.means, found(args, kwargs))
        self.cached |= kind == CACHE

    def _give(self, kept: dict[str, Tensor], own: dict[str, Tensor | torch.Generator]) -> None:
        taken = {id(value) for value in own.values()}
        for name, tensor in self.states().items():
            value = kept.get(f"state/{name}", self.began[name])
            if id(tensor) not in taken and value.shape == tensor.shape:
                tensor.data.copy_(value)
        for name, held in own.items():
            data = (not self.cached or name.startswith("argument/")) and name in kept
            if data and isinstance(held, torch.Generator):
                held.set_state(kept.pop(name))
            elif data and isinstance(held, Tensor) and kept[name].dtype == held.dtype:
                held.data = kept.pop(name).to(held.device)
        left = [name.partition("/")[2] for name, value in kept.items() if name.startswith("argument/") and value.dim()]
        if left:
            raise RuntimeError(f"the model is called with other arguments on one device: no {', '.join(left[:3])}")
        set_generators(kept)

    def _remember(self) -> None:
        for name, parameter in self.capture.learn_names().items():
            if name not in self.start:
                self.start[name] = foreign.local(parameter).detach().clone()

    def _set_weights(self, step: int) -> None:
        """All weights, and which of them learn, are those with which the other run's step began."""
        held = load(self.home / WEIGHTS.format(step)) if step > 1 else self.start
        for name, parameter in self.capture.learn_names().items():
            here = foreign.local(parameter).data
            value = held.get(name, self.start.get(name))
            if value is not None and value.shape != here.shape:
                raise RuntimeError(f"{name} has another shape on one device in step {step}")
            if value is not None:
                here.copy_(value)
            if isinstance(parameter, Tensor) and name in self.learn[step]:
                parameter.requires_grad_(self.learn[step][name])

    def _leave_states(self) -> None:
        state = self.states()
        kept = {name: state[name].detach().cpu().clone() for name in self.moving & state.keys()}
        if self.fed and kept:
            save_file(kept, self.capture.out.path / BEHIND.format(self.capture.step - 1))

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.capture.guarded(self.loopback.check)()
        if self.capture.failure:
            self.done(self.capture)
        result = original(*args, **kwargs)
        if self.natural and torch._C._current_graph_task_id() == -1:
            self.capture.tensors[f"root/{self.capture.micro}"] = total(args[0] if args else kwargs.get("tensors"))
        if self.call and torch._C._current_graph_task_id() == -1:
            self.capture.guarded(self._over)(args[0] if args else kwargs.get("tensors"))
            if self.fed == len(self.queue) or self.capture.failure:
                self.done(self.capture)
        return result

    def _over(self, roots: Any) -> None:
        """One backward is one step of the recording, and what it added is taken away again."""
        c = self.capture
        c.tensors["loss"] = total(roots)
        c.parameters = False
        owned = list(dict.fromkeys(p for o in c.optimizers for p in foreign.stepped(o)))
        if self.turns > 1:
            c.owned.clear()  # of an optimizer that stepped since the last backward, on nothing
            now = self.stepped[self.queue[self.fed][2]]
            owned = [p for p in owned if now.get(c.names.get(p, ""))]
        c.before_step(owned, [None] * len(owned))
        c.after_step()
        c.close_step()
        for parameter in (*owned, *c.learn_names().values()):
            if parameter.grad is not None:
                parameter.grad.detach().zero_()  # not None: a program may look at it
        self.fed, self.call = self.fed + 1, 0
        self._leave_states()

    def _withhold(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """An optimizer without gradients changes nothing; a closure makes them in its step."""
        self.cached = False
        self._remember()
        closure = kwargs.get("closure") if "closure" in kwargs else args[1] if len(args) > 1 else None
        if closure is None:
            self._take(optimizer)
            return None

        def without() -> Any:
            result = closure()
            self._take(optimizer)
            return result

        return (args, kwargs | {"closure": without}) if "closure" in kwargs else ((args[0], without, *args[2:]), kwargs)

    def _take(self, optimizer: Optimizer) -> None:
        self.capture.parameters = False  # after the step nothing is new
        self.withheld = [(p, p.grad) for p in foreign.stepped(optimizer) if p.grad is not None]
        plain = type(optimizer).__module__.startswith("torch.optim")  # others may not look whether there is a gradient
        for parameter, gradient in self.withheld:
            parameter.grad = None if plain else torch.zeros_like(gradient)

    def _give_back(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self.withheld:
            parameter.grad = gradient.detach().zero_()
        self.withheld = []
