"""Which parameters each part of a model of transformers needs: found on a small copy, which runs forward once.

The input of the first layer and the output of each are cut from autograd and continued as new leaves. The leaves from
which a tensor is then made say what it needs: the input of the first layer, the parameters before the layers; the loss,
those after them; any other input of a layer, parameters that every stage of a pipeline must hold. A layer that needs
more of an earlier layer than the output of the one just before it cannot be cut off from it, and is named.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.hf.force_fp64 import ForceFP64, undisturbed
from isograd.hf.losses import SCORE, shard
from isograd.hf.small_config import VOCAB, small
from isograd.hf.sub_configs import parts_of, text_of
from isograd.hf.tp_plan import is_below, names_of_towers

BEFORE, AFTER, EVERYWHERE = "before", "after", "everywhere"


@dataclass
class Dependencies:
    """What a pipeline must know of an architecture."""

    layers: str  # the name of the list of layers
    roles: dict[str, set[str]] = field(default_factory=dict)  # of parameters outside of it, by name
    crossing: list[str] = field(default_factory=list)  # what a layer takes, apart from the output of the one before
    output: Any = None  # of a layer: its form and its leaves, the class Tensor in the place of each tensor


def probe_dependencies(library: Any, config: Any, loss: str) -> Dependencies:
    """library: the class of transformers."""
    with tiny_model(library, config) as model:
        return _Look(model, list_of_layers(model)).run(loss)


@contextmanager
def tiny_model(library: Any, config: Any) -> Iterator[Any]:
    """A small copy of the class, whole and in fp64, with the library's own random values; nothing else changes."""
    tiny = small(config, 1)
    for part in (tiny, *parts_of(tiny).values()):
        part._experts_implementation = "eager"  # the class's own; grouped products of matrices have no fp64
    with undisturbed(), ForceFP64():
        yield library._from_config(copy.deepcopy(tiny), dtype=torch.float64).double().train()


def list_of_layers(model: Any) -> str:
    """The name of the list of layers in the pipeline plan; without a plan, the outermost list of that length."""
    plan = getattr(model, "pp_plan", None) or {}
    depth = getattr(text_of(model.config), "num_hidden_layers", None)
    towers = names_of_towers(model)
    named = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and not is_below(n, towers)}
    lists: dict[str, int] = {n: len(m) for n, m in named.items()}
    long = [n for n, length in lists.items() if length == depth]
    outermost = min((n.count(".") for n in long), default=0)
    found = [n for n in lists if n in plan] or [n for n in long if n.count(".") == outermost]
    if len(found) != 1:
        seen = f"pipeline plan {sorted(plan)}, lists of modules {dict(list(lists.items())[:4])}"
        raise ModelError("IG470", seen=seen, model=type(model).__name__)
    return found[0]


class _Look:
    """One forward, layer by layer."""

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.found = model, Dependencies(name)
        self.layers: nn.ModuleList = model.get_submodule(name)
        # What each leaf is: the number of a layer, for its parameters and its output; or the name of another parameter.
        self.of: dict[int, int | str] = {}
        self.kept: list[Tensor] = []
        for parameter_name, parameter in model.named_parameters():
            self.of[id(parameter)] = parameter_name
        for number, layer in enumerate(self.layers):
            self.of |= dict.fromkeys(map(id, layer.parameters()), number)
        self.outputs: dict[int, int] = {}  # by the id of a leaf that continues a layer's output
        self.forms: list[Any] = []

    def run(self, loss: str) -> Dependencies:
        handles = []
        for number, layer in enumerate(self.layers):
            handles.append(layer.register_forward_pre_hook(partial(self._takes, number), with_kwargs=True))
            handles.append(layer.register_forward_hook(partial(self._gives, number)))
        tokens = torch.arange(14).view(2, 7) % (VOCAB - 3) + 3
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if loss != SCORE:
            given = shard({"input_ids": tokens, "labels": tokens}, Mesh.unbound("1"), loss).inputs
        result = self.model(**given)
        self._note("the loss", [result.logits if loss == SCORE else result.loss], AFTER, len(self.layers), -1)
        form = self.forms[0] if self.forms else None
        if any(other != form for other in self.forms):
            self.found.crossing.append("layers return results of several forms")
        self.found.output = form
        return self.found

    def _takes(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given, form = tree.tree_flatten((args, kwargs))
        self._note(f"layer {number}", given, EVERYWHERE if number else BEFORE, number, -1)
        return None if number else tree.tree_unflatten([self._continued(leaf, -1) for leaf in given], form)

    def _gives(self, number: int, module: nn.Module, args: Any, output: Any) -> Any:
        leaves, form = tree.tree_flatten(output)
        self._note(f"layer {number}", leaves, EVERYWHERE, number, number)
        self.forms.append((form, [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]))
        return tree.tree_unflatten([self._continued(leaf, number) for leaf in leaves], form)

    def _continued(self, leaf: Any, number: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        new = leaf.detach()
        if leaf.requires_grad:
            new.requires_grad_()
        self.kept.append(new)
        self.outputs[id(new)] = number
        return new

    def _note(self, who: str, tensors: list[Any], role: str, number: int, own: int) -> None:
        """`own`: the layer whose own parameters are no news."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            for leaf in _leaves(tensor):
                if id(leaf) in self.outputs:
                    if self.outputs[id(leaf)] not in (number - 1, own):
                        self._crosses(f"{who} takes a tensor of layer {self.outputs[id(leaf)]}")
                    continue
                what = self.of.get(id(leaf))
                if isinstance(what, str):
                    self.found.roles.setdefault(what, set()).add(role)
                elif what is not None and what != own:
                    self._crosses(f"{who} depends on parameters of layer {what}")

    def _crosses(self, what: str) -> None:
        if what not in self.found.crossing:
            self.found.crossing.append(what)


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """The leaves of autograd from which a tensor is made."""
    if tensor.grad_fn is None:
        if tensor.requires_grad:
            yield tensor
        return
    seen, todo = set(), [tensor.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        todo += [upper for upper, _ in node.next_functions]
