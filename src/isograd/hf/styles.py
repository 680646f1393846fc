"""What a module of a tensor plan does under tp: hooks before and after its forward, made of the pairs of comm/ops.

    Entrance      I -> R   before a projection whose outputs are cut. Projections of one module that read the same
                           tensor (q, k, v; gate, up) share one, so that backward sums its gradient once.
    SumHook       P -> I   after a projection whose inputs are cut. Its bias is added once, after the sum.
    GatherHook    V -> I   after a projection whose outputs are cut, but used whole.
    SliceHook     I -> V   before a projection whose inputs are cut, but come whole.
    VocabRows     P -> I   around an embedding of which each rank holds some tokens' rows.
    ExpertRange            around experts that are dealt out over tp: each rank computes its experts for all tokens.
    SharedTail    I -> R   after a projection whose last features enter the cut heads directly (MLA's rotary key).

The library's forward runs between the two, on this rank's part of the parameters. Within layers whose sequences are cut
(sequence_parallel.py), an all_gather (V -> R) takes the place of copy_in, and a reduce_scatter (P -> V) that of
all_reduce. A hook holds no module, so that a deep copy of a model has hooks of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import ops
from isograd.core.mesh import Mesh

Called = tuple[tuple[Any, ...], dict[str, Any]]


def replaced(args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Tensor) -> Called:
    """The same call with another first argument."""
    if args:
        return (value, *args[1:]), dict(kwargs)
    first = next(iter(kwargs))
    return (), {**kwargs, first: value}


def gather_tokens(x: Tensor, mesh: Mesh, sequences: bool) -> Tensor:
    """Into a cut region: from what all ranks hold, or from parts of sequences. Contiguous, as models take views."""
    group = mesh.group("tp")
    return ops.all_gather(x, group, -2).contiguous() if sequences else ops.copy_in(x, group)


def reduce_output(x: Tensor, mesh: Mesh, sequences: bool) -> Tensor:
    """The sum over tp of partial outputs: all of it, or of this rank's part of the sequences."""
    group = mesh.group("tp")
    return ops.reduce_scatter(x, group, -2).contiguous() if sequences else ops.all_reduce(x, group)


def first_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The first argument of a call."""
    value: Tensor = args[0] if args else next(iter(kwargs.values()))
    return value


@dataclass(eq=False)
class Entrance:
    """Copies a tensor into the cut region once for all modules below one parent that are given it."""

    mesh: Mesh
    sequences: bool = False  # whether the tensor is a part of the sequences
    seen: Tensor | None = None
    entered: Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        """Of a projection: replaces its input by the tensor that its siblings were given, too."""
        x = first_of(args, kwargs)
        if self.entered is None or x is not self.seen:
            self.seen, self.entered = x, gather_tokens(x, self.mesh, self.sequences)
        return replaced(args, kwargs, self.entered)

    def forget(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Of the parent: when its forward is over, no tensor is kept."""
        self.seen = self.entered = None


@dataclass(eq=False)
class SumHook:
    """Sums the partial outputs of a projection; the bias waits outside of it, as it is to be added once."""

    mesh: Mesh
    sequences: bool = False  # whether each rank goes on with a part of the sequences
    bias: nn.Parameter | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Take the bias out of the module for the time of its forward."""
        own = getattr(module, "base_layer", module)
        self.bias = own._parameters.get("bias")
        if self.bias is not None:
            own._parameters["bias"] = None

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Called after a forward that raised, too, with None."""
        bias, self.bias = self.bias, None
        if bias is not None:
            getattr(module, "base_layer", module)._parameters["bias"] = bias
        if output is None:
            return None
        total = reduce_output(output, self.mesh, self.sequences)
        return total if bias is None else total + bias


@dataclass(frozen=True, eq=False)
class GatherHook:
    """Joins the outputs of all ranks; every rank then computes the same with them."""

    mesh: Mesh
    sizes: tuple[int, ...]

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """output [..., mine] -> [..., all]."""
        return ops.gather_for_identical_use(output, self.mesh.group("tp"), -1, self.sizes)


@dataclass(frozen=True, eq=False)
class SliceHook:
    """Takes this rank's features of an input that all ranks hold."""

    mesh: Mesh
    sizes: tuple[int, ...]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        """input [..., all] -> [..., mine]."""
        mine = ops.slice(first_of(args, kwargs), self.mesh.group("tp"), -1, self.sizes)
        return replaced(args, kwargs, mine)


@dataclass(eq=False)
class VocabRows:
    """Looks up the tokens whose rows this rank holds; others are zeros here, and the sum over tp has all."""

    mesh: Mesh
    first: int
    rows: int
    here: Tensor | None = None
    wrong: Tensor | None = None

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        """Token ids become rows of this rank's part."""
        ids = first_of(args, kwargs)
        self.wrong = module.wrong.find(ids)
        row = ids - self.first
        self.here = (row >= 0) & (row < self.rows)
        return replaced(args, kwargs, torch.where(self.here, row, 0))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """A token outside the vocabulary becomes NaN and is counted: an Engine refuses the step on all ranks."""
        assert self.here is not None
        assert self.wrong is not None
        elsewhere = torch.where(self.wrong, torch.nan, 0.0).to(output.dtype)[..., None]
        mine = torch.where(self.here[..., None], output, elsewhere)
        self.here = self.wrong = None
        return ops.all_reduce(mine, self.mesh.group("tp"))


@dataclass(eq=False)
class ExpertRange:
    """Runs the experts of this rank for all tokens, and sums what all ranks' experts gave.

    transformers' experts leave out a choice whose number is that of the experts here. The scores of such choices are
    zeros, so the router's gradient is a sum over ranks as well, which their copy_in completes.
    """

    mesh: Mesh
    here: int  # how many experts this rank holds
    sequences: bool = False  # whether the tokens that come are a part of the sequences
    entered: tuple[Tensor, ...] = ()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        """(tokens [T, hidden], numbers [T, k], scores [T, k]) -> the same for the experts here."""
        x, numbers, scores = (*args, *kwargs.values())[:3]
        group = self.mesh.group("tp")
        x, scores = gather_tokens(x, self.mesh, self.sequences), gather_tokens(scores, self.mesh, self.sequences)
        numbers = ops.all_gather(numbers, group, -2) if self.sequences else numbers
        self.entered = x, scores
        mine = numbers - group.index * self.here
        elsewhere = (mine < 0) | (mine >= self.here)
        given = x, mine.masked_fill(elsewhere, self.here), scores.masked_fill(elsewhere, 0.0)
        return (*given[: len(args)], *args[3:]), dict(zip(kwargs, given[len(args) :], strict=False))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """A rank whose experts no token chose still answers the others in backward: its output depends on the input."""
        entered, self.entered = self.entered, ()
        if output is None:
            return None
        for tensor in entered:
            output = output + tensor[:0].sum().to(output.dtype)
        return reduce_output(output, self.mesh, self.sequences)


@dataclass(frozen=True, eq=False)
class SharedTail:
    """The last features of an output are used by cut heads; the others pass through a projection that enters them."""

    mesh: Mesh
    tail: int

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """output [..., n + tail]: the tail's gradient is summed over tp."""
        first, tail = output.split([output.shape[-1] - self.tail, self.tail], dim=-1)
        return torch.cat((first, ops.copy_in(tail, self.mesh.group("tp"))), dim=-1)


@dataclass(frozen=True, eq=False)
class Total:
    """Sums the partial outputs of a module of any kind. What enters one that has cut parameters of its own is copied
    in, whichever argument it is."""

    mesh: Mesh
    sequences: bool = False  # whether each rank has a part of the sequences

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        """I -> R, of each tensor that may have a gradient."""
        return tuple(map(self._enter, args)), {name: self._enter(value) for name, value in kwargs.items()}

    def _enter(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return gather_tokens(value, self.mesh, self.sequences)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """P -> I."""
        return reduce_output(output, self.mesh, self.sequences)
