"""DeepSpeed's `PipelineModule` with its specs and its engine, on isograd's stages (pipeline/stages.py).

A layer is built on the rank that holds it, from a seed of its own, so every layout begins with the same weights. To
count parameters, and to find those that are tied, it is built on the meta device, where its class allows that.

One device: the layers in turn, each of which is given the output of the one before, a tuple as one argument.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree
from torch.utils.checkpoint import checkpoint

from isograd.comm.consensus import all_gather_object, run_or_raise_on_all_ranks
from isograd.core.mesh import Mesh
from isograd.errors import IntegrationError, IsogradError
from isograd.integrations.deepspeed.loop import LoopEngine
from isograd.integrations.deepspeed.settings import refuse
from isograd.integrations.weights import rows_in
from isograd.integrations.world import mesh_for, name_failed_rank
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
    those that `tied_weight_attr` names. forward_fn(layer, input) is called in the place of the layer."""

    def __init__(
        self,
        key: str,
        *module: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(*module, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def tied_names(self, layer: nn.Module) -> list[str]:
        """The names of the parameters that `tied_weight_attr` names."""
        names = {id(parameter): name for name, parameter in layer.named_parameters()}
        found = [names.get(id(attrgetter(attribute)(layer)), "") for attribute in self.tied_weight_attr]
        if "" in found:
            refuse(f"tied_weight_attr={self.tied_weight_attr} of a {type(layer).__name__}", f"of {[*names.values()]}")
        return found


def PipeModelDataParallelTopology(num_pp: int, num_mp: int, num_dp: int) -> str:
    """A topology: ranks by stage, then by data rank, then by tp rank, which is a layout in isograd's words."""
    return f"dp{num_dp} tp{num_mp} pp{num_pp}"


def PipeDataParallelTopology(num_pp: int, num_dp: int) -> str:
    """The same without tp."""
    return PipeModelDataParallelTopology(num_pp, 1, num_dp)


def RepeatingLoader(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader, which begins anew at its end; none of an empty one."""
    batch: Any = loader
    while batch is not None:
        batch = None
        for batch in loader:
            yield batch


class _Layers:
    """What a PipelineModule is given, until this rank's layers are built. Layer i is built from `seed` + i."""

    def __init__(self, given: Sequence[Any], mesh: Mesh, seed: int, seed_fn: Callable[[int], Any]) -> None:
        self.given, self.seed, self._seed_fn = given, seed, seed_fn
        self.tied = {number: spec for number, spec in enumerate(given) if isinstance(spec, TiedLayerSpec)}
        self._first = {spec.key: number for number, spec in reversed(self.tied.items())}
        self._alike = {(spec.key, spec.typename): number for number, spec in reversed(self.tied.items())}
        self._generators = partial(torch.random.fork_rng, [mesh.device] if mesh.on_cards else [])
        self._built: dict[int, nn.Module] = {}

    def modules(self) -> list[nn.Module | Callable[[], nn.Module]]:
        """For `Stages`: modules, and for each spec a function that makes one."""
        specs = {n: partial(self._build, n) for n, spec in enumerate(self.given) if isinstance(spec, LayerSpec)}
        specs |= {n: partial(self._build, self._alike[spec.key, spec.typename]) for n, spec in self.tied.items()}
        return [specs.get(n) or (g if isinstance(g, nn.Module) else nn.Identity()) for n, g in enumerate(self.given)]

    def forwards(self) -> dict[int, Callable[[Any, Any], Any]]:
        """What is called with a layer and its input, in the layer's place: forward_fn, or a function among layers."""
        own = {number: spec.forward_fn for number, spec in self.tied.items() if spec.forward_fn}
        functions = ((n, g) for n, g in enumerate(self.given) if not isinstance(g, nn.Module | LayerSpec))
        return own | {number: lambda _, x, act=act: act(x) for number, act in functions}

    def _build(self, number: int) -> nn.Module:
        """The layer of a spec, once on this rank."""
        if number not in self._built:
            with self._generators():
                self._seed_fn(self.seed + number)
                self._built[number] = self.given[number].build()
        return self._built[number]

    def _sketch(self, number: int) -> nn.Module:
        """A layer without memory; with it, where its class computes with values. A function has no parameters."""
        layer = self.given[number]
        if not isinstance(layer, LayerSpec):
            return layer if isinstance(layer, nn.Module) else nn.Module()
        with self._generators(), suppress(Exception), torch.device("meta"):
            return layer.build()
        with self._generators():
            return layer.build()

    def costs(self, method: str) -> list[float]:
        """What each layer costs by a partition method."""
        kind, _, pattern = method.lower().partition(":")
        sketches = map(self._sketch, range(len(self.given))) if kind == "parameters" else ()
        costs = [float(sum(p.numel() for p in layer.parameters() if p.requires_grad)) for layer in sketches]
        if kind in ("uniform", "type"):
            types = [getattr(layer, "typename", type(layer)) for layer in self.given]
            costs = [float(bool(re.search(pattern, getattr(one, "__name__", "").lower()))) for one in types]
        if not any(costs):
            refuse(f"partition_method={method!r}", "'parameters', 'uniform', or 'type:REGEX' of layers' classes")
        return costs

    def ties(self) -> dict[str, str]:
        """{parameter: the one that it is}: all of a layer of the same type, those that the spec names of another."""
        found: dict[str, str] = {}
        for number, spec in self.tied.items():
            alike, first = self._alike[spec.key, spec.typename], self._first[spec.key]
            if number == first:
                continue
            layer = self._sketch(number)
            if number != alike:
                self._refuse_unlike(number, alike, _shapes(layer), _shapes(self._sketch(alike)))
                found |= {f"{number}.{name}": f"{alike}.{name}" for name in _shapes(layer)}
            if alike != first:
                of_first = self._sketch(first)
                names, others = spec.tied_names(layer), self.tied[first].tied_names(of_first)
                mine, its = _shapes(layer), _shapes(of_first)
                self._refuse_unlike(number, first, [mine[name] for name in names], [its[name] for name in others])
                found |= {f"{number}.{name}": f"{first}.{other}" for name, other in zip(names, others, strict=True)}
        return found

    def _refuse_unlike(self, number: int, first: int, mine: object, its: object) -> None:
        if mine != its:
            seen = f"TiedLayerSpec {self.tied[number].key!r}: layer {number} has {mine}, layer {first} {its}"
            refuse(seen, "parameters of the same shapes, or keys that differ")


def _shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in layer.named_parameters(remove_duplicate=False)}


class PipelineEngine(LoopEngine):
    """What `initialize` returns for a PipelineModule."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """A step on the next `gradient_accumulation_steps` micro-batches; their mean loss, on all ranks."""
        micros = self._micros(data_iter, self.settings.steps)
        self.module.train()
        with name_failed_rank(self.mesh):
            stats = self.optimizer.stats = self.engine.train_step(micros)
        self._stepped(stats)
        self.micro_steps += len(micros)
        if self.lr_scheduler is not None and not stats.skipped:
            self.lr_scheduler.step()
        return torch.tensor(stats.loss, dtype=torch.float64, device=self.device)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """The mean loss of the next micro-batches, on all ranks, in eval mode and without gradients."""
        if return_logits or not compute_loss or reduce_output != "avg":
            refuse("eval_batch of outputs", "eval_batch(data_iter), which returns the mean loss", self.mesh)
        micros = self._micros(data_iter, num_micro_batches or self.settings.steps)
        self.module.eval()
        with name_failed_rank(self.mesh):
            loss = self.engine.evaluate(micros).loss
        self.module.train()
        return torch.tensor(loss, dtype=torch.float64, device=self.device)

    def _micros(self, given: Iterator[Any] | None, count: int) -> list[Any]:
        """The next micro-batches; where a rank has not as many, all ranks say so, and nothing has begun."""
        source = self.training_dataloader if given is None else given

        def load() -> list[Any]:
            if not isinstance(source, Iterator):
                expected = "iter(loader) on every rank, or training_data in initialize"
                refuse(f"a {type(source).__name__} as data_iter", expected, self.mesh)
            micros = [self._micro(batch) for batch in islice(source, count)]
            if len(micros) < count:
                seen = f"a data iterator that ended after {len(micros)} of {count} micro-batches of a step"
                refuse(seen, "as many on every rank, as of RepeatingLoader(loader)", self.mesh)
            return micros

        def spelled(error: Exception) -> IsogradError:
            seen, where = f"a data iterator that raised {type(error).__name__}: {error}", self.mesh.describe_rank()
            return IntegrationError("IG868", seen=seen, expected="batches on every rank", where=where)

        with name_failed_rank(self.mesh):
            return run_or_raise_on_all_ranks(load, self.mesh, IntegrationError, spelled)

    def _micro(self, batch: Any) -> Any:
        """A batch of a loader as (inputs, labels) on this device."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            refuse(f"a batch that is a {type(batch).__name__}", "(inputs, labels), each a tensor or a tuple", self.mesh)
        pair = tuple(tuple(part) if isinstance(part, list) else part for part in batch)
        return tree.tree_map_only(Tensor, lambda t: t.to(self.device), pair)

    def deepspeed_io(self, *args: Any, **kwargs: Any) -> Any:
        """An iterator over this data rank's batches, in order, again and again, of which `train_batch()` takes some."""
        return RepeatingLoader(super().deepspeed_io(*args, **{"shuffle": False, **kwargs}))

    def _by_parts(self, *_: Any, **__: Any) -> NoReturn:
        refuse("forward, backward, step or no_sync with a pipeline", "engine.train_batch(data_iter)", self.mesh)

    forward = backward = step = no_sync = set_gradient_accumulation_boundary = _by_parts


class PipelineModule(Stages):
    """Layers in stages: specs, modules and functions. A micro-batch is (inputs, labels)."""

    engine_class = PipelineEngine

    def __init__(
        self,
        layers: Iterable[LayerSpec | nn.Module | Callable[[Any], Any]],
        num_stages: int | None = None,
        topology: str | Mesh | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = partial(checkpoint, use_reentrant=False),  # noqa: B008
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        """DeepSpeed's arguments. topology: a layout, or an isograd mesh, which layers under tp are given, too.

        loss_fn: of (outputs, labels), the mean, or (the mean, its weight); left out, the last layer returns that.
        seed_layers: layer i is built from base_seed + i, as by DeepSpeed; else from a number drawn on rank 0, plus i.
        dynamic_shape: shapes may differ between micro-batches, whatever it says.
        """
        if isinstance(loss_fn, nn.Module) and any(parameter.requires_grad for parameter in loss_fn.parameters()):
            refuse("a loss_fn with trained parameters, which every stage would have", "them in the last layer")
        if not isinstance(topology or num_stages, int | str | Mesh):
            expected = "num_stages=2; or as topology PipeDataParallelTopology(num_pp=2, num_dp=2), or an ig.Mesh"
            refuse(f"num_stages={num_stages}, topology={topology!r}", expected)
        mesh = topology if isinstance(topology, Mesh) else mesh_for(topology or f"pp{num_stages}", "dp tp pp")
        seed = all_gather_object(base_seed if seed_layers else int(torch.randint(2**31, ())), mesh)[0]
        given = _Layers(list(layers), mesh, seed, seed_fn or torch.manual_seed)
        costs, ties = given.costs(partition_method), given.ties()
        super().__init__(given.modules(), mesh, loss=self._weighed, costs=costs, ties=ties)
        self.loss_fn, self._forwards, self._speaks = loss_fn, given.forwards(), not mesh.index("dp tp")
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func, self.checkpointable_layers = activation_checkpoint_func, checkpointable_layers
        trained = all_gather_object(sum(p.requires_grad for p in self.parameters()), mesh, "pp")
        if 0 in trained:
            seen = f"stages of {partition_method!r} that have {trained} trained parameters"
            refuse(seen, "some on each: partition_method='parameters', or fewer stages", mesh)

    def _piece(self, stage: int, x: Any, micro: Any) -> Any:
        x, part, is_last = micro[0] if stage == 0 else x, self.parts[stage], stage == len(self.parts) - 1
        interval = self.activation_checkpoint_interval if torch.is_grad_enabled() else 0
        for start in range(0, len(part), interval or len(part)):
            numbers = part[start : start + (interval or len(part))]
            run, inputs = partial(self._layers, numbers, isinstance(x, tuple)), x if isinstance(x, tuple) else (x,)
            recomputes = interval and self._recomputes(numbers)
            x = self.activation_checkpoint_func(run, *inputs) if recomputes else run(*inputs)
        if isinstance(x, tuple) and len(x) == 1 and not is_last:
            refuse(f"a tuple of one tensor after layer {part.stop - 1}, between stages", "the tensor", self.mesh)
        return self._weighed(x, micro) if is_last else x

    def _layers(self, numbers: range, is_tuple: bool, *inputs: Any) -> Any:
        # A copy: layers may change their input in place, which here is another stage's output, or the script's batch.
        copies = tuple(t.clone() if isinstance(t, Tensor) else t for t in inputs)
        x: Any = copies if is_tuple else copies[0]
        for number in numbers:
            layer = self.kept[str(number)]
            x = self._forwards[number](layer, x) if number in self._forwards else layer(x)
        return x

    def _recomputes(self, numbers: range) -> bool:
        layers, names = [self.kept[str(number)] for number in numbers], self.checkpointable_layers
        if names is not None:
            return all(type(layer).__name__ in names for layer in layers)
        return any(next(layer.parameters(), None) is not None for layer in layers)

    def _weighed(self, output: Any, micro: tuple[Any, Any]) -> Any:
        """A loss and what it is the mean of: as loss_fn says; the labels that torch's own loss counts; else rows."""
        labels, loss = micro[1], self.loss_fn
        found = output if loss is None else loss(output, labels)
        if not isinstance(found, Tensor):
            return found
        if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and not labels.is_floating_point():
            counted = labels[labels != loss.ignore_index]
            return found, counted.numel() if loss.weight is None else loss.weight[counted].sum()
        if self._speaks:
            print("isograd: loss_fn returns no (loss, weight): losses weigh their rows", file=sys.stderr)
        self._speaks = False
        return found, rows_in(micro) or 0
