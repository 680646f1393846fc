"""Sequence parallelism: between the cut regions of its layers, each tp rank has a part of every sequence.

Only the list of layers works on cut sequences: masks and rotary positions are made before it, of whole ones. Within it,

    before the first layer, behind the last      slice; gather_for_identical_use       I -> V; V -> I
    at the entry of a module whose projections are cut, and of experts   all_gather    V -> R
    behind a projection whose inputs are cut, and behind experts         reduce_scatter  P -> V
    around a module of which nothing is cut, which may mix tokens        gather_for_identical_use, slice
    everywhere else, each token is treated by itself

A whole parameter that is used on a part of the tokens, or in a cut region, has a part of its gradient on each rank: it
owes tp. One of a module of which nothing is cut is used on whole sequences and owes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import ops
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.hf.dependency_probe import list_of_layers, tiny_model
from isograd.hf.losses import CAUSAL, shard
from isograd.hf.small_config import VOCAB
from isograd.hf.styles import Called, first_of, gather_tokens, replaced
from isograd.hf.sub_configs import text_of
from isograd.hf.tp_plan import CLOSED, is_below

WITHOUT_CUT = (*CLOSED, "replicated_with_grad_allreduce", "mla_kv_a_proj")


@dataclass(frozen=True)
class Sequences:
    """Where in a model sequences are cut."""

    layers: str = ""  # the name of their list; "" where nothing is
    whole: tuple[str, ...] = ()  # modules in it that run on whole sequences
    entered: tuple[str, ...] = ()  # modules that are given whole sequences by an all_gather

    def are_cut(self, name: str) -> bool:
        """Whether a module is given parts of sequences, or is inside of one that gathers them."""
        return bool(self.layers) and name.startswith(f"{self.layers}.") and not is_below(name, self.whole)


def sequences_of(model: Any, plan: dict[str, str], experts: Iterable[str], mesh: Mesh) -> Sequences:
    """Follows from which modules of each layer the plan cuts. experts: layers of experts that ep deals out."""
    if not mesh.layout.sp:
        return Sequences()
    layers = list_of_layers(model)
    modules = dict(model.named_modules())
    cut = [name for name, style in plan.items() if style not in WITHOUT_CUT] + list(experts)
    whole = tuple(
        name
        for number, layer in modules[layers].named_children()
        for name, module in _called_in(layer, f"{layers}.{number}")
        if next(module.children(), None) is not None and not any(is_below(other, [name]) for other in cut)
    )
    homes = {n.rpartition(".")[0] for n, style in plan.items() if style == "colwise" and n in modules}
    homes = {n for n in homes if n.startswith(f"{layers}.") and not n.removeprefix(f"{layers}.").isdigit()}
    return Sequences(layers, whole, tuple(n for n in homes if not is_below(n, homes - {n})))


def _called_in(layer: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a layer calls: its children, and for a list of modules, which nobody calls, its members."""
    for child, module in layer.named_children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from _called_in(module, f"{name}.{child}")
        else:
            yield f"{name}.{child}", module


def register(model: Any, sequences: Sequences, mesh: Mesh) -> None:
    """Hooks of the list of layers and of the modules in it."""
    if not sequences.layers:
        return
    modules = dict(model.named_modules())
    group, layers = SequenceHooks(mesh), modules[sequences.layers]
    layers[0].register_forward_pre_hook(group.take, with_kwargs=True)
    layers[-1].register_forward_hook(group.join)
    for name in sequences.whole:
        modules[name].register_forward_pre_hook(group.join_first, with_kwargs=True)
        modules[name].register_forward_hook(group.take_again)
    for name in sequences.entered:
        modules[name].register_forward_pre_hook(group.gather_tokens, with_kwargs=True)


def refuse_sequences(library: Any, config: Any, loss: str, mesh: Mesh) -> None:
    """Refuse what sequence parallelism would train wrongly, or not at all."""
    if not mesh.layout.sp:
        return
    if loss != CAUSAL:
        wrong = f"its loss is {loss}, and its sequences may not be padded"
    elif getattr(text_of(config), "output_router_logits", False):
        wrong = "its balance loss is of all tokens"
    elif not _may_be_padded(library, config):
        wrong = "a token behind the others changes their loss, so its sequences may not be padded"
    else:
        return
    raise ModelError(
        "IG460",
        f"the sequences of {library.__name__} are not cut over tp: {wrong}",
        seen=str(mesh.layout),
        expected="a causal loss without terms of the router, of tokens that depend on those before them only",
        fix="leave sp out",
        where=mesh.describe_rank(),
    )


def _may_be_padded(library: Any, config: Any) -> bool:
    """Tried on a small copy, which is given rows with and without one token more. They are many, as ties may decide."""
    with tiny_model(library, config) as model, torch.no_grad():
        tokens = torch.randint(3, VOCAB, (32, 11), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": tokens, "labels": tokens}
        losses = [model(**shard(batch, Mesh.unbound(layout)).inputs).loss for layout in ("1", "tp2 sp")]
    return abs(float(losses[1] - losses[0])) <= 1e-9 * abs(float(losses[0]))


@dataclass(frozen=True, eq=False)
class SequenceHooks:
    """Hooks: the sequences are the dimension before the last."""

    mesh: Mesh

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        """Of the first layer: whole sequences -> this rank's part of them."""
        return replaced(args, kwargs, self._slice(first_of(args, kwargs)))

    def join(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Of the last layer: a part -> whole sequences, of which every rank computes the same."""
        return _changed(output, self._gather)

    def join_first(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        """Of a module of which nothing is cut: a part -> whole sequences."""
        return replaced(args, kwargs, self._gather(first_of(args, kwargs)))

    def take_again(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Of the same module: whole sequences -> a part."""
        return _changed(output, self._slice)

    def gather_tokens(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        """Of a module whose projections are cut: a part -> whole sequences, each of whose uses is partial."""
        return replaced(args, kwargs, gather_tokens(first_of(args, kwargs), self.mesh, sequences=True))

    def _gather(self, x: Tensor) -> Tensor:
        return ops.gather_for_identical_use(x, self.mesh.group("tp"), -2).contiguous()

    def _slice(self, x: Tensor) -> Tensor:
        length, tp = x.shape[-2], self.mesh.size("tp")
        if length % tp:
            raise ModelError(
                "IG460",
                f"sequences of {length} tokens are not cut over tp{tp}",
                seen=f"{tuple(x.shape)} before the first layer, under {str(self.mesh.layout)!r}",
                expected=f"a multiple of {tp}",
                fix="ig.hf.shard(batch, mesh) pads what it is given",
                where=self.mesh.describe_rank(),
            )
        return ops.slice(x, self.mesh.group("tp"), -2)


def _changed(output: Any, change: Any) -> Any:
    """The output of a module, with its first tensor changed."""
    if isinstance(output, Tensor):
        return change(output)
    return type(output)([change(output[0]), *output[1:]])
