"""DeepSpeed's `PipelineModule` with its specs, on isograd's stages (pipeline/stages.py).

    from isograd.integrations import deepspeed
    from isograd.integrations.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    net = PipelineModule([TiedLayerSpec("embed", nn.Embedding, 101, 32), LayerSpec(Block, 32), ...], num_stages=2,
                         loss_fn=nn.CrossEntropyLoss())
    engine, *_ = deepspeed.initialize(model=net, config="ds_config.json")
    loss = engine.train_batch(iterator)

A layer is built on the rank that holds it, from a seed of its own, so every layout begins with the same weights. To
count parameters, and to find those that are tied, it is built on the meta device, where its class allows that.

One device: the layers in turn, each of which is given the output of the one before, a tuple as one argument.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isograd.comm.consensus import all_gather_object
from isograd.core.mesh import Mesh
from isograd.integrations.deepspeed.settings import refuse
from isograd.integrations.weights import rows_in
from isograd.integrations.world import mesh_for
from isograd.pipeline.stages import Stages


class LayerSpec:
    """A layer to be built where it is needed: `typename(*module_args, **module_kwargs)`."""

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that has its weights from the first one of the same key: all of them, if it is of the same type; else
    those that `tied_weight_attr` names."""

    def __init__(
        self, key: str, typename: Callable[..., nn.Module], *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None, tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:  # fmt: skip
        """forward_fn(layer, input) is called in the place of the layer."""
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def tied_names(self, layer: nn.Module) -> list[str]:
        """The names of the parameters that `tied_weight_attr` names."""
        names = {id(parameter): name for name, parameter in layer.named_parameters()}
        found = [names.get(id(attrgetter(attribute)(layer)), "") for attribute in self.tied_weight_attr]
        if "" in found:
            refuse(f"tied_weight_attr={self.tied_weight_attr} of a {type(layer).__name__}", f"of {[*names.values()]}")
        return found


@dataclass(frozen=True)
class PipeModelDataParallelTopology:
    """Ranks by stage, then by data rank, then by tp rank, as isograd has them."""

    num_pp: int
    num_mp: int
    num_dp: int

    def __str__(self) -> str:
        return f"dp{self.num_dp} tp{self.num_mp} pp{self.num_pp}"


class PipeDataParallelTopology(PipeModelDataParallelTopology):
    """The same without tp."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(num_pp, 1, num_dp)


class RepeatingLoader:
    """An iterator over a loader that begins anew at its end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self.data_iter = loader, iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class _Function(nn.Module):
    """A callable among the layers."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.forward = function


class _Layers:
    """What a PipelineModule is given, until this rank's layers are built. Layer i is built from `seed` + i."""

    def __init__(self, given: Sequence[Any], mesh: Mesh, seed: int, seed_fn: Callable[[int], Any]) -> None:
        self.given, self.seed, self._seed_fn = given, seed, seed_fn
        self.tied = {number: spec for number, spec in enumerate(given) if isinstance(spec, TiedLayerSpec)}
        self._generators = partial(torch.random.fork_rng, [mesh.device] if mesh.on_cards else [])
        self._built: dict[int, nn.Module] = {}

    def modules(self) -> list[nn.Module | Callable[[], nn.Module]]:
        """For `Stages`: modules, and for each spec a function that makes one."""
        specs = [
            partial(self._build, self._first(n)) if isinstance(g, LayerSpec) else g for n, g in enumerate(self.given)
        ]
        return [one if isinstance(one, nn.Module | partial) else _Function(one) for one in specs]

    def _first(self, number: int, any_type: bool = False) -> int:
        """The first layer of the same key, and of the same type; a layer that is not tied is its own."""
        of = self.tied.get(number)
        alike = (n for n, s in self.tied.items() if of and s.key == of.key and (any_type or s.typename == of.typename))
        return next(alike, number)

    def _build(self, number: int) -> nn.Module:
        """The layer of a spec, once on this rank."""
        if number not in self._built:
            with self._generators():
                self._seed_fn(self.seed + number)
                self._built[number] = self.given[number].build()
        return self._built[number]

    def _sketch(self, number: int) -> nn.Module:
        """A layer without memory; with it, where its class needs values. A function has no parameters."""
        layer = self.given[number]
        if not isinstance(layer, LayerSpec):
            return layer if isinstance(layer, nn.Module) else nn.Module()
        with self._generators():
            try:
                with torch.device("meta"):
                    return layer.build()
            except Exception:  # of a class that computes with values; where the layer itself is wrong, it raises again
                return layer.build()

    def costs(self, method: str) -> list[float]:
        """What each layer costs by a partition method."""
        kind, _, pattern = method.partition(":")
        numbers, costs = range(len(self.given)), list[float]()
        if kind.lower() == "parameters":
            return [float(sum(p.numel() for p in self._sketch(n).parameters() if p.requires_grad)) for n in numbers]
        if kind.lower() == "uniform":
            return [1.0 for _ in numbers]
        if kind.lower() == "type":
            types = [getattr(layer, "typename", type(layer)) for layer in self.given]
            costs = [float(re.search(pattern, kind.__name__, re.IGNORECASE) is not None) for kind in types]
        if not any(costs):
            refuse(
                f"partition_method={method!r}", "'parameters', 'uniform', or 'type:REGEX' of names of layers' classes"
            )
        return costs

    def ties(self) -> dict[str, str]:
        """{parameter: the one that it is}: all of a layer of the same type, those that the spec names of another."""
        found: dict[str, str] = {}
        for number in self.tied:
            alike, first = self._first(number), self._first(number, any_type=True)
            layer = self._sketch(alike) if number != first else nn.Module()
            names = [name for name, _ in layer.named_parameters(remove_duplicate=False)] if number != alike else []
            found |= {f"{number}.{name}": f"{alike}.{name}" for name in names}
            if alike != first:
                of_first = self.tied[first].tied_names(self._sketch(first))
                pairs = zip(self.tied[alike].tied_names(layer), of_first, strict=True)
                found |= {f"{number}.{name}": f"{first}.{other}" for name, other in pairs}
        return found


_RECOMPUTE = partial(checkpoint, use_reentrant=False)


class PipelineModule(Stages):
    """Layers in stages: specs, modules and functions. A micro-batch is (inputs, labels)."""

    def __init__(
        self,
        layers: Iterable[LayerSpec | nn.Module | Callable[[Any], Any]],
        num_stages: int | None = None,
        topology: PipeModelDataParallelTopology | Mesh | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = _RECOMPUTE,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        """DeepSpeed's arguments. topology: or an isograd mesh, which tensor-parallel layers are given, too.

        loss_fn: of (outputs, labels), the mean, or (the mean, its weight); left out, the last layer returns that.
        seed_layers: layer i is built from base_seed + i, as by DeepSpeed; else from a number drawn on rank 0, plus i.
        dynamic_shape: shapes may differ between micro-batches, whatever it says.
        """
        if num_stages is None and topology is None:
            refuse("a PipelineModule without num_stages or topology", "num_stages=2")
        if not isinstance(topology, PipeModelDataParallelTopology | Mesh | None):
            seen = f"a {type(topology).__name__} as topology"
            refuse(
                seen, "PipeDataParallelTopology(num_pp=2, num_dp=2) of isograd.integrations.deepspeed.pipe, or a Mesh"
            )
        mesh = topology if isinstance(topology, Mesh) else mesh_for(str(topology or f"pp{num_stages}"), "dp tp pp")
        seed = all_gather_object(base_seed if seed_layers else int(torch.randint(2**31, ())), mesh)[0]
        given = _Layers(list(layers), mesh, seed, seed_fn or torch.manual_seed)
        costs, ties = given.costs(partition_method), given.ties()
        super().__init__(given.modules(), mesh, loss=self._weighed, costs=costs, ties=ties)
        self._forward_fns = {number: spec.forward_fn for number, spec in given.tied.items() if spec.forward_fn}
        self.loss_fn, self._speaks = loss_fn, not mesh.index("dp tp")
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func, self._checkpointable = activation_checkpoint_func, checkpointable_layers
        trained = all_gather_object(sum(p.requires_grad for p in self.parameters()), mesh, "pp")
        if 0 in trained:
            seen = f"stages of {partition_method!r} that have {trained} trained parameters"
            refuse(seen, "some on each: partition_method='parameters', or fewer stages", mesh)

    # -- a stage of a micro-batch

    def _through(self, part: range, x: Any) -> Any:
        interval = self.activation_checkpoint_interval if torch.is_grad_enabled() else 0
        for start in range(part.start, part.stop, interval or len(part)):
            numbers = part[start - part.start :][: interval or len(part)]
            run = partial(self._layers, numbers, isinstance(x, tuple))
            inputs = x if isinstance(x, tuple) else (x,)
            x = (
                self.activation_checkpoint_func(run, *inputs)
                if interval and self._recomputes(numbers)
                else run(*inputs)
            )
        if isinstance(x, tuple) and len(x) == 1 and part.stop < self.parts[-1].stop:
            refuse(f"a tuple of one tensor after layer {part.stop - 1}, between stages", "the tensor", self.mesh)
        return x

    def _layers(self, numbers: range, is_tuple: bool, *inputs: Any) -> Any:
        # A copy: layers may change their input in place, which here is another stage's output, or the script's batch.
        copies = tuple(t.clone() if isinstance(t, Tensor) else t for t in inputs)
        x: Any = copies if is_tuple else copies[0]
        for number in numbers:
            layer = self.kept[str(number)]
            x = self._forward_fns[number](layer, x) if number in self._forward_fns else layer(x)
        return x

    def _recomputes(self, numbers: range) -> bool:
        layers = [self.kept[str(number)] for number in numbers]
        if self._checkpointable is not None:
            return all(type(layer).__name__ in self._checkpointable for layer in layers)
        return any(next(layer.parameters(), None) is not None for layer in layers)

    def _weighed(self, output: Any, micro: tuple[Any, Any]) -> Any:
        """A loss and what it is the mean of: as loss_fn says; the labels that torch's own loss counts; else rows."""
        labels = micro[1]
        found = output if self.loss_fn is None else self.loss_fn(output, labels)
        if not isinstance(found, Tensor):
            return found
        ignored = getattr(self.loss_fn, "ignore_index", None)
        if ignored is not None and isinstance(labels, Tensor) and not labels.is_floating_point():
            counted, classes = labels[labels != ignored], getattr(self.loss_fn, "weight", None)
            return found, counted.numel() if classes is None else classes[counted].sum()
        if self._speaks:
            print("isograd: loss_fn returns no (loss, weight): losses weigh their rows", file=sys.stderr)
        self._speaks = False
        return found, rows_in(micro) or 0
