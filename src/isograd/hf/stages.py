"""Stages of a pipeline: the library's model with the layers that this rank does not hold left out.

Every stage runs the library's own forward on the micro-batch's tokens and positions, so masks and rotary angles are
made on each stage. In the place of the layers before a stage stand modules that return what the stage before has passed
on; behind its last layer, the forward ends. The last stage ends with the library's loss.

What each stage holds follows from dependency_probe.py: its layers; the first stage, what is needed before them; the
last, what is needed after them; every stage, what layers are given from elsewhere. A parameter that several ranks hold,
such as a tied embedding, owes their sum. What a rank does not hold is zeros without memory there.

One device: the library's forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from isograd.core.contract import Contract, contract_of, declare
from isograd.core.mesh import Mesh
from isograd.errors import ModelError, PipelineError
from isograd.hf.dependency_probe import AFTER, BEFORE, EVERYWHERE, Dependencies
from isograd.hf.losses import shard
from isograd.hf.sub_configs import text_of
from isograd.pipeline.split import balanced, ranges
from isograd.pipeline.stages import pieces


def cut_into_stages(model: Any, mesh: Mesh, survey: Dependencies, loss: str) -> None:
    """Keep this rank's stages of a model whose parameters are on the meta device. With one pp rank it stays whole."""
    refuse_crossing(type(model).__name__, survey.crossing, mesh)
    layers: Any = model.get_submodule(survey.layers)
    stages = mesh.layout.pp * mesh.layout.vpp
    head = getattr(model, "lm_head", None)
    last = cost_of_token(head, text_of(model.config)) if isinstance(head, nn.Module) else 0.0
    costs = [cost_of_token(layer, text_of(model.config)) for layer in layers]
    parts = ranges(balanced(costs, stages, last=last, ranks=mesh.layout.pp), stages, len(layers))
    _declare_ties(model, mesh, survey, parts)
    flow = _Flow(mesh, survey.layers, parts, survey.output, loss)
    own = {number for part in parts[mesh.index("pp") :: mesh.layout.pp] for number in part}
    for number, layer in enumerate(layers):
        if number not in own:
            layers[number] = _Elsewhere(layer, flow)
    put_in_front(model, _Staged)
    model._isograd_flow = flow


def put_in_front(model: Any, kind: type[nn.Module]) -> None:
    """Put `kind` in front of the library's class of a model. Its name stays, which exports write."""
    library = type(model)
    names = {"__module__": library.__module__, "__qualname__": library.__qualname__}
    model.__class__ = type(library.__name__, (kind, library), names)


def refuse_crossing(name: str, crossing: list[str], mesh: Mesh) -> None:
    """Refuse a model of which more than one layer's output would have to travel."""
    if crossing:
        seen = "; ".join(crossing[:4]) + (" ..." if len(crossing) > 4 else "")
        raise ModelError("IG471", seen=seen, where=mesh.describe_rank(), name=name)


def refuse_shared_keys(config: Any, mesh: Mesh) -> None:
    """Refuse layers that attend with the keys of earlier ones. A small copy has none of them, so no survey finds it."""
    number = getattr(text_of(config), "num_kv_shared_layers", None)
    if mesh.size("pp") > 1 and number:
        refuse_crossing(type(config).__name__, [f"num_kv_shared_layers={number}"], mesh)


class _Staged(nn.Module):
    """In front of the library's class: its forward, of one stage."""

    _isograd_flow: _Flow

    @property
    def chunks(self) -> dict[int, Callable[[Any, Any], Any]]:
        """The stages of this rank, by number."""
        return pieces(self, self._isograd_flow.mesh)

    def refuse_micro(self, micro: Any) -> None:
        """Raise for a micro-batch that some stage could not run, before any stage of the step runs."""
        flow = self._isograd_flow
        if flow.loss_of is not None:
            return
        if not isinstance(micro, Mapping) or all(micro.get(name) is None for name in ("labels", "shift_labels")):
            raise ModelError(
                "IG444",
                "a batch that a model of transformers in stages cannot train on",
                seen=f"keys {', '.join(map(str, micro))}" if isinstance(micro, Mapping) else type(micro).__name__,
                expected="a mapping with input_ids and labels",
                where=flow.mesh.describe_rank(),
            )
        shard(micro, flow.mesh, flow.loss)

    def forward(self, *args: Any, stage: int | None = None, passed: Any = None, **micro: Any) -> Any:
        """One stage of a micro-batch of input_ids and labels, as a pipeline calls it."""
        flow = self._isograd_flow
        if stage is None or args:
            batch, layout = "{'input_ids': ..., 'labels': ...}", str(flow.mesh.layout)
            raise PipelineError("IG808", where=flow.mesh.describe_rank(), layout=layout, batch=batch)
        with flow.through(self, stage, passed):
            try:
                if flow.loss_of is not None:
                    return flow.loss_of(super().forward, micro)
                part = shard(micro, flow.mesh, flow.loss)
                return super().forward(**part.inputs).loss, part.weight
            except _Ended as end:
                return end.outputs


@dataclass(eq=False)
class _Flow:
    """Which layers each stage has, and what the stage before passed on to the one that runs."""

    mesh: Mesh
    layers: str  # the name of their list
    parts: tuple[range, ...]  # of each stage
    output: Any  # the form of a layer's output and its leaves, the class Tensor in the place of each tensor
    loss: str
    arrived: Any = None
    # In the place of the library's loss: (its forward, micro-batch) -> (loss, weight). All stages call it.
    loss_of: Callable[[Callable[..., Any], Mapping[str, Any]], tuple[Any, Any]] | None = None

    @contextmanager
    def through(self, model: nn.Module, stage: int, passed: Any) -> Iterator[None]:
        """For the time of a forward, the list of layers is that of a stage."""
        layers: Any = model.get_submodule(self.layers)
        whole, part = dict(layers._modules), self.parts[stage]
        form, leaves = self.output
        if stage:
            given = iter(passed if isinstance(passed, tuple) else (passed,))
            self.arrived = tree.tree_unflatten([next(given) if leaf is Tensor else leaf for leaf in leaves], form)
        for number, layer in enumerate(whole.values()):
            if number < part.start:
                layers._modules[str(number)] = layer if isinstance(layer, _Elsewhere) else _Elsewhere(layer, self)
            elif number == part.stop - 1 and stage < len(self.parts) - 1:
                layers._modules[str(number)] = _Last(layer)
        try:
            yield
        finally:
            layers._modules.update(whole)
            self.arrived = None


class _InPlace(nn.Module):
    """Stands in the list of layers, with the attributes of the layer in whose place it is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.instead = (layer,)  # in a tuple, so that its parameters are not this module's

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["instead"][0], name)


class _Elsewhere(_InPlace):
    """A layer of an earlier stage: returns what that stage has passed on."""

    def __init__(self, layer: nn.Module, flow: _Flow) -> None:
        super().__init__(layer)
        self.flow = flow

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the stage before, in the form of a layer's output."""
        return self.flow.arrived


class _Last(_InPlace):
    """The last layer of a stage: the library's forward ends behind it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Never returns."""
        outputs = self.instead[0](*args, **kwargs)
        raise _Ended(tuple(leaf for leaf in tree.tree_leaves(outputs) if isinstance(leaf, Tensor)))


class _Ended(Exception):
    """Leaves the library's forward behind the last layer of a stage."""

    def __init__(self, outputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.outputs = outputs


def _declare_ties(model: Any, mesh: Mesh, survey: Dependencies, parts: tuple[range, ...]) -> None:
    """Declare what several ranks hold, and take away what this rank does not."""
    pp, place = mesh.layout.pp, mesh.index("pp")
    holder = {number: stage % pp for stage, part in enumerate(parts) for number in part}
    ranks_of = {BEFORE: {0}, AFTER: {pp - 1}, EVERYWHERE: set(range(pp))}
    users: dict[int, set[int]] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        found = users.setdefault(id(parameter), set())
        if name.startswith(survey.layers + "."):
            found.add(holder[int(name.removeprefix(survey.layers + ".").partition(".")[0])])
        for role in survey.roles.get(name, ()):
            found |= ranks_of[role]
    for _, parameter in model.named_parameters():
        ranks = sorted(users[id(parameter)] or {pp - 1})  # what no forward reaches: with the head
        users[id(parameter)] = set(ranks)
        if len(ranks) > 1 and place in ranks:
            old = contract_of(parameter) or Contract(tuple(parameter.shape))
            partial_over = (*old.partial_over, f"pp:{'+'.join(map(str, ranks))}")
            declare(parameter, mesh, shape=old.shape, shards=old.shards, partial_over=partial_over, data=old.data)
    for name, parameter in named:
        if place not in users[id(parameter)]:
            _leave_out(model, name, parameter, mesh)


def _leave_out(model: nn.Module, name: str, parameter: nn.Parameter, mesh: Mesh) -> None:
    """What computes with it here does so for nobody: with zeros, and without the hooks of a cut."""
    home, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(home)
    contract = contract_of(parameter)
    shape = tuple(parameter.shape) if contract is None else contract.shape
    del module._parameters[leaf]
    setattr(module, leaf, torch.zeros((), dtype=parameter.dtype, device=mesh.device).expand(shape))
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()


def cost_of_token(module: nn.Module, config: Any) -> float:
    """Elements by which a token is multiplied; of a stack of experts, those of the chosen ones."""
    found = 0.0
    for parameter in module.parameters():
        number = parameter.shape[0] if parameter.dim() == 3 else 1
        chosen = getattr(config, "num_experts_per_tok", None) or 1
        found += math.prod(parameter.shape) * min(1.0, chosen / number if number > 1 else 1.0)
    return found
