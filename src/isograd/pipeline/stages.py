"""A pipeline of any modules: a list of stages, and which parameters they share.

    model = ig.pipeline.Stages([embed, *blocks, head], mesh, loss=lambda output, micro: (mean, count))
    engine = ig.Engine(model, mesh, ...)
    engine.train_step((inputs, labels), micro_batches=4)

Every rank makes the same list and keeps its own entries. A parameter that several stages use (a tie) stays one
parameter: each rank that uses it holds a copy under the name of its first use, and the copies' gradients are summed.
Entries may be functions that make a module; only the rank that holds the entry calls them. Ties between such modules
cannot be detected and are given by name.

One device: the modules in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from isograd.core.contract import declare
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.errors import PipelineError
from isograd.pipeline.split import balanced, ranges

Make = Callable[[], nn.Module]
Loss = Callable[[Any, Any], tuple[Tensor, Tensor | float] | Terms]


class Stages(nn.Module):
    """A list of modules, cut into the stages of a pipeline."""

    def __init__(
        self,
        modules: Sequence[nn.Module | Make],
        mesh: Mesh,
        *,
        loss: Loss,
        inputs: Callable[[Any], Any] = lambda micro: micro[0],
        split: Sequence[int] | None = None,
        costs: Sequence[float] | None = None,
        ties: Mapping[str, str] | None = None,
        weights: Callable[[Any], Mapping[str, Tensor | float]] | None = None,
    ) -> None:
        """`loss(output, micro)` returns (mean, weight) or `ig.Terms`; `inputs(micro)` the input of the first module.

        split: how many modules each of the pp * vpp stages gets; left out, the stages balance `costs`, which are equal
            unless given.
        ties: {"9.weight": "0.weight"}: parameters of modules made by functions that are the same as other parameters.
        weights: for a loss of several terms, {name: weight} of a micro-batch; it is called on every stage.
        """
        super().__init__()
        self.mesh, self.loss, self.inputs, self.weights = mesh, loss, inputs, weights
        stages = mesh.layout.pp * mesh.layout.vpp
        chosen = split or balanced(list(costs or [1.0] * len(modules)), stages, ranks=mesh.layout.pp)
        self.parts = ranges(chosen, stages, len(modules))
        pp, place = mesh.layout.pp, mesh.index("pp")
        mine = [number for stage in range(place, stages, pp) for number in self.parts[stage]]
        rank_of = {number: stage % pp for stage, part in enumerate(self.parts) for number in part}
        shared = _shared(modules)
        for later, name in (ties or {}).items():
            shared.setdefault(name, [name]).append(later)
        made = {i: _made(m) for i, m in enumerate(modules) if i in mine or isinstance(m, nn.Module)}
        self.kept = nn.ModuleDict()
        self._adopt(shared, rank_of, made, modules)
        for number in mine:
            self.kept[str(number)] = made[number]
        self.to(mesh.device)

    def _adopt(
        self,
        shared: dict[str, list[str]],
        rank_of: dict[int, int],
        made: dict[int, nn.Module],
        modules: Sequence[nn.Module | Make],
    ) -> None:
        """Register each shared parameter under the name of its first use, and declare the debt of its copies."""
        place = self.mesh.index("pp")
        for name, uses in shared.items():
            users = sorted({rank_of[_number(use)] for use in uses})
            here = [use for use in uses if rank_of[_number(use)] == place]
            if not here:
                continue
            first = made.get(_number(name))
            if first is None:  # another rank makes the module of the first use: its values are needed here, too
                first = _made(modules[_number(name)])
            parameter = first.get_parameter(name.partition(".")[2])
            for use in here:
                owner, _, leaf = use.partition(".")[2].rpartition(".")
                setattr(made[_number(use)].get_submodule(owner), leaf, parameter)
            if len(users) > 1:
                debt = (f"pp:{'+'.join(map(str, users))}",)
                declare(parameter, self.mesh, shape=tuple(parameter.shape), partial_over=debt)
            if rank_of[_number(name)] != place:
                _hold(self.kept, name, parameter)

    @property
    def chunks(self) -> dict[int, Callable[[Any, Any], Any]]:
        """The stages of this rank, by number."""
        return pieces(self, self.mesh)

    def term_weights(self, *args: Any, **kwargs: Any) -> Mapping[str, Tensor | float] | None:
        """The weights of the terms of a micro-batch, which an Engine must know before its first backward."""
        return None if self.weights is None else self.weights(kwargs or args)

    def _piece(self, stage: int, x: Any, micro: Any) -> Any:
        x = self.inputs(micro) if stage == 0 else x
        for number in self.parts[stage]:
            x = self.kept[str(number)](*x) if isinstance(x, tuple) else self.kept[str(number)](x)
        return self.loss(x, micro) if stage == len(self.parts) - 1 else x

    def forward(self, *args: Any, stage: int | None = None, passed: Any = None, **kwargs: Any) -> Any:
        """The whole model on one rank, which returns (mean, weight); or one stage of it, when a pipeline calls it."""
        if stage is None and len(self.parts) > 1:
            layout = str(self.mesh.layout)
            raise PipelineError("IG808", where=self.mesh.describe_rank(), layout=layout, batch="batch")
        return self._piece(stage or 0, passed, kwargs or args)


def pieces(model: nn.Module, mesh: Mesh) -> dict[int, Callable[[Any, Any], Any]]:
    """This rank's stages of a model whose forward takes `stage`, and in `passed` the output of the stage before."""

    def run(stage: int, passed: Any, micro: Any) -> Any:
        if isinstance(micro, dict):
            return model(**micro, stage=stage, passed=passed)
        return model(*(micro if isinstance(micro, tuple) else (micro,)), stage=stage, passed=passed)

    return {
        stage: partial(run, stage)
        for stage in range(mesh.index("pp"), mesh.layout.pp * mesh.layout.vpp, mesh.layout.pp)
    }


def _made(module: nn.Module | Make) -> nn.Module:
    return module if isinstance(module, nn.Module) else module()


def _number(name: str) -> int:
    return int(name.partition(".")[0])


def _shared(modules: Sequence[nn.Module | Make]) -> dict[str, list[str]]:
    """Names of each parameter that several modules hold: {first use: all uses}."""
    uses: dict[int, list[str]] = {}
    for number, module in enumerate(modules):
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                uses.setdefault(id(parameter), []).append(f"{number}.{name}")
    return {names[0]: names for names in uses.values() if len({_number(n) for n in names}) > 1}


def _hold(kept: nn.ModuleDict, name: str, parameter: Tensor) -> None:
    """Register a parameter under this name, although another rank holds its module."""
    home: nn.Module = kept
    *path, leaf = name.split(".")
    for part in path:
        if part not in home._modules:
            home.add_module(part, nn.Module())
        home = home.get_submodule(part)
    home.register_parameter(leaf, parameter if isinstance(parameter, nn.Parameter) else nn.Parameter(parameter))
