"""What the calls of a model were made with in the watched steps, kept so that another run can be given it: tensors
among its arguments and in variables around it (variables.py), random states, and what modules carry (`states`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from isograd_verify.record.sketch import digest
from isograd_verify.watch import foreign
from isograd_verify.watch.stages import StageCalls
from isograd_verify.watch.variables import found, generators, variables, walk

if TYPE_CHECKING:
    from isograd_verify.watch.capture import Capture

LIMIT = 1 << 28  # bytes of one call
PLAIN = (str, int, float, bool)  # arguments that are kept beside tensors
# Calls with a graph, and calls without one whose outputs a loss takes all the same: GradCache computes representations
# so, takes the gradient of the loss to them, and calls the model again for its own. Of the latter kind are kept those
# of a backward that has no call with a graph.
GRAPH, CACHE = "call", "cache"


def file_of(step: int, micro: int, call: int, kind: str = GRAPH) -> str:
    """The file of one call: the step, its micro-batch, and which call of the model in that, of its kind."""
    return f"{kind}-{step:04d}-{micro:04d}-{call:04d}.safetensors"


def outermost(capture: Capture, module: nn.Module) -> str:
    """How a model that learns is called: with a graph, or without one by a program that trains it; else ''."""
    if capture.stack or torch._C._current_graph_task_id() != -1 or foreign.functional():
        return ""
    kind = GRAPH if torch.is_grad_enabled() else CACHE if module.training else ""
    return kind if kind and any(p.requires_grad for p in module.parameters()) else ""


def states(module: nn.Module) -> dict[str, Tensor]:
    """Buffers and other tensors of modules in variables around the call and of the one that is called, each once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for place, values in (*variables(), ("model", {"": module})):
        for name, value in values.items():
            for path, one in walk(value, f"{place}/{name}", 0):
                for inner, part in one.named_modules() if isinstance(one, nn.Module) else ():
                    for key, held in (*part._buffers.items(), *vars(part).items()):
                        plain = isinstance(held, Tensor) and not isinstance(held, foreign.DTensor)
                        if plain and held.layout is torch.strided and not held.requires_grad and id(held) not in seen:
                            seen.add(id(held))
                            tensors[".".join(filter(None, (path, inner, key)))] = held
    return tensors


class Calls:
    """Writes each call of the watched steps into a file of its own."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.last = {GRAPH: (0, -1, -1), CACHE: (0, -1, -1)}  # of each kind the last call: step, micro-batch, number
        self.began: dict[str, str] = {}  # what modules carry, when it was first seen
        self.cached = 0  # bytes of calls without a graph: together no more than those of one call
        self.stages = StageCalls(capture)
        capture.beside = True
        capture.hooks.wrap(nn.Module, "__call__", self._called)
        capture.hooks.wrap(torch.autograd, "backward", self._backward)

    def _called(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kind = outermost(self.capture, module)
        if kind:
            self.capture.guarded(self._keep, "calls")(kind, module, args, kwargs)
        if kind == GRAPH:
            return self.stages.called(original, module, args, kwargs)
        return original(module, *args, **kwargs)

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = torch._C._current_graph_task_id() == -1
        result = original(*args, **kwargs)
        if outermost:
            self.capture.guarded(self._loss, "calls")(args[0] if args else kwargs.get("tensors"))
        return result

    def _loss(self, roots: Any) -> None:
        now = self.capture.step, self.capture.micro
        self.capture.tensors[f"root/{now[1]}"] = total(roots)
        if self.last[GRAPH][:2] == now == self.last[CACHE][:2]:
            for call in range(self.last[CACHE][2] + 1):
                (self.capture.out.path / file_of(*now, call, CACHE)).unlink(missing_ok=True)
            self.cached = 0

    def _keep(self, kind: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.capture.close_step()
        now = self.capture.step, self.capture.micro + 1
        if not self.capture.active or (kind == CACHE and self.last[GRAPH][:2] == now):
            return
        self.last[kind] = *now, self.last[kind][2] + 1 if self.last[kind][:2] == now else 0
        kept, size = generators(), self.cached if kind == CACHE else 0
        words = {n: a for n, a in ({str(i): a for i, a in enumerate(args)} | kwargs).items() if type(a) in PLAIN}
        for name, word in words.items():  # as the bytes of its JSON
            kept[f"plain/{name}"] = torch.tensor(list(json.dumps(word).encode()), dtype=torch.uint8)
        for name, value in found(args, kwargs).items():
            tensor = value.get_state() if isinstance(value, torch.Generator) else value
            size += tensor.numel() * tensor.element_size()
            if size <= LIMIT:
                kept[name] = tensor.detach().cpu().clone().contiguous()
            elif name.startswith("argument/") and kind == GRAPH:
                raise ValueError(f"the tensors of one call of the model are larger than {LIMIT} bytes")
        for name, tensor in states(module).items():
            size += tensor.numel() * tensor.element_size()
            if size <= LIMIT and (hashed := digest(tensor)) != self.began.setdefault(name, hashed):
                kept[f"state/{name}"] = tensor.detach().cpu().clone().contiguous()
        self.cached = size if kind == CACHE else self.cached
        if kind == GRAPH or size <= LIMIT:
            save_file(kept, self.capture.out.path / file_of(*self.last[kind], kind))


def total(roots: Any) -> Tensor:
    """The number with which a backward began."""
    own = [roots] if isinstance(roots, Tensor) else roots
    return torch.stack([foreign.local(root.detach()).double().sum().cpu() for root in own]).sum()


def joined(kept: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What calls of several ranks were made with, as one call: the rows of one rank under those of another, filled up
    with zeros to one length. The first argument says how many rows a rank has; what has no rows must be equal, but for
    single numbers, which are left as they are. Views that stand one under the other in that argument do so still."""
    argument = next(name for name, t in kept[0].items() if name.startswith("argument/") and t.dim())
    rows, views = [len(one[argument]) for one in kept], {_views(one[argument], one) for one in kept}
    several = views.pop() if len(views) == 1 else ()
    of_view = [len(one[several[0]]) for one in kept] if several else rows
    found = {}
    for name, first in kept[0].items():
        parts = [one[name] for one in kept if name in one]
        if name.startswith("generator/") or (len(parts) == len(kept) and all(torch.equal(p, first) for p in parts[1:])):
            found[name] = first
        if not first.dim():
            continue
        if name.startswith(("generator/", "state/", "plain/")) or [len(p) for p in parts] not in (rows, of_view):
            if name.startswith(("argument/", "plain/")) and name not in found:
                raise RuntimeError(f"{name.partition('/')[2]} of several ranks cannot be put together as rows")
            continue
        sizes = [(d, max(p.shape[d] for p in parts)) for d in range(first.dim() - 1, 0, -1)]  # the last comes first
        gaps = [[n for d, size in sizes for n in (0, size - p.shape[d])] for p in parts]
        found[name] = torch.cat([nn.functional.pad(p, gap) for p, gap in zip(parts, gaps, strict=True)])
    return found | ({argument: torch.cat([found[name] for name in several])} if several else {})


def _views(whole: Tensor, kept: dict[str, Tensor]) -> tuple[str, ...]:
    """The variables whose rows are those of an argument, one under the other; none where there are not several."""
    held = {n: t for n, t in kept.items() if t.dtype == whole.dtype and t.dim() and 0 < len(t) < len(whole)}
    for name, t in held.items() if len(whole) else ():
        if not name.startswith("argument/") and torch.equal(t, whole[: len(t)]):
            rest = _views(whole[len(t) :], kept) or [n for n in held if torch.equal(held[n], whole[len(t) :])][:1]
            return (name, *rest) if rest else ()
    return ()
