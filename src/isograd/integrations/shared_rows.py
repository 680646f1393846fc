"""Ranks of a cp, tp or pp group, which work on the same rows: the rows they get, and what their loop must not do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from isograd.comm import ops, raw
from isograd.comm.consensus import all_gather_object
from isograd.core.contract import assemble, contract_of
from isograd.core.mesh import Mesh
from isograd.engine.validation import pipeline_of
from isograd.errors import IntegrationError
from isograd.hf import BatchPart, attach, shard
from isograd.hf.context_parallel import scores_rows
from isograd.hf.losses import CAUSAL, EMBEDS, IGNORE, KEYS, library_of_model
from isograd.integrations.world import mesh_for, refuse, rejoin
from isograd.sequence import refuse_unlike

OTHERWISE = "ig.integrations.Accelerator, or ig.Engine in a loop of your own"


class RowParts:
    """A forward that is called with whole rows and computes this rank's part of them. Without gradients, as in a
    validation, its loss is the mean over the labels of all parts, and its logits are of all tokens."""

    def __init__(self, forward: Callable[..., Any], mesh: Mesh, waiting: list[dict[str, Any]]) -> None:
        """waiting: gets the whole rows of a step under pp, whose stages run at its end."""
        self.whole_rows, self._mesh, self._waiting = forward, mesh, waiting
        self._model: Any = getattr(forward, "__self__", None)
        self._scores = mesh.size("pp") == 1 and scores_rows(self._model)
        self.loss: Tensor | None = None  # of the last forward, until its backward
        self.weight = torch.zeros(())  # how many labels it is the mean of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "stage" in kwargs:  # called by a pipeline
            return self.whole_rows(*args, **kwargs)
        rows = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
        if self._mesh.size("pp") > 1:
            return self._for_stages(rows)
        if self._scores:  # gathered, of whole rows, and so is the loss: each rank of a group has it
            output = self.whole_rows(**rows)
            self.loss = output.get("loss")
            self.weight = self.weight if self.loss is None else rows["labels"].ne(IGNORE).sum()
            return output
        part = shard(rows, self._mesh)
        output = self.whole_rows(**part.inputs)
        if not torch.is_grad_enabled():
            return _of_all_parts(output, part, self._mesh)
        self.loss, self.weight = output.get("loss"), part.weight
        return output

    def _for_stages(self, rows: dict[str, Any]) -> Any:
        """A loss that is NaN until the step; without gradients the mean over the labels of these rows."""
        from transformers.modeling_outputs import CausalLMOutput

        if torch.is_grad_enabled():
            self._waiting.append(rows)
            self.loss = torch.full((), math.nan, device=self._mesh.device)
            return _LossOfStep(self.loss, self._mesh)
        stages = pipeline_of(self._model, self._mesh)
        found: Any = stages and stages.evaluate([rows])  # of the last stage
        sums = [float(found[0][0] * found[0][1]), float(found[0][1])] if found else [0.0, 0.0]
        total = torch.tensor(sums, dtype=torch.float64, device=self._mesh.device)
        for axis in ("pp", "cp"):
            total = raw.all_reduce(total, self._mesh.group(axis))
        return CausalLMOutput(loss=total[0] / total[1].clamp(min=1))


class WholeRows(RowParts):
    """Such a forward of one of several models: what it gives is of whole rows, too, and alike on the ranks that share
    them, so that a loss is made of it as on one device. Every rank of a cp group has this loss, which enters the step
    once per rank, each time with the same weight: gathers have sums as adjoints. Under tp it enters once."""

    def __init__(self, forward: Callable[..., Any], mesh: Mesh, waiting: list[dict[str, Any]]) -> None:
        super().__init__(forward, mesh, waiting)
        cuts = mesh.size("cp") > 1 or mesh.layout.sp
        self._cuts = cuts and not self._scores and library_of_model(self._model, mesh)[1] == CAUSAL

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
        if (embeds := rows.get(EMBEDS)) is not None:  # each time: what a step draws may differ in any of them
            refuse_unlike(self._mesh, embeds, axis="cp tp")
        if not self._cuts:
            return self.whole_rows(**rows)
        part = shard({name: rows.pop(name) for name in (*KEYS, EMBEDS) if name in rows}, self._mesh)
        output, group = self.whole_rows(**rows | part.inputs), self._mesh.group("cp")
        if output.get("loss") is not None:
            total = ops.all_gather((output["loss"] * part.weight)[None], group).sum()
            output["loss"] = total / raw.all_reduce(part.weight, group).clamp(min=1)
        for name, value in output.items():
            if isinstance(value, tuple):
                output[name] = tuple(self._joined(name, one, part) for one in value)
            elif isinstance(value, Tensor) and value.dim():
                output[name] = self._joined(name, value, part)
        return output

    def _joined(self, name: str, value: Tensor, part: BatchPart) -> Tensor:
        if value.shape[1] != part.cut.places.local:
            raise IntegrationError(
                "IG861",
                "an output of which no rank has this part of the sequences",
                seen=f"output.{name}, {tuple(value.shape)}, under {str(self._mesh.layout)!r}",
                expected=f"{part.cut.places.local} tokens on each rank, as logits have",
                fix="call the model without output_hidden_states=True and the like; or a layout without sp",
                where=self._mesh.describe_rank(),
            )
        return part.gather_sequence(value)


class _LossOfStep:
    """Returned by a forward under pp: the loss, which has no value before the step, and nothing else."""

    def __init__(self, loss: Tensor, mesh: Mesh) -> None:
        self.loss, self._mesh = loss, mesh

    def __getattr__(self, name: str) -> NoReturn:
        raise _not_the_loss(
            f"output.{name}, which no stage has made yet", "return self.model(**batch).loss", self._mesh
        )


def _not_the_loss(seen: str, line: str, mesh: Mesh) -> IntegrationError:
    return IntegrationError(
        "IG861",
        "under cp, tp or pp, a backward of something else than the loss of a prepared model",
        seen=seen,
        expected="the mean over the labels of this rank's part, undivided, which it weighs by itself",
        fix=line,
        where=mesh.describe_rank(),
    )


class CutModels:
    """The models that one loop trains, cut in place for its mesh, and what their losses weigh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.shares_rows = mesh.size("cp") * mesh.size("tp") * mesh.size("pp") > 1
        self._parts: list[RowParts] = []
        self.waiting: list[dict[str, Any]] = []  # under pp: the micro-batches of the step
        self._replaced = WeakIdKeyDictionary()

    def cut(self, module: nn.Module) -> nn.Module:
        """A model of transformers, or the one that stands in a module of the script's: it is cut under tp, ep and pp,
        attached under cp, and its forward is given whole rows. Returns it, or the module."""
        model: nn.Module = next((part for part in module.modules() if hasattr(part, "set_attn_implementation")), module)
        if isinstance(model.forward, RowParts):  # by another loop
            model.forward = model.forward.whole_rows
        if not self.shares_rows and not cuts_model(self.mesh):
            return model
        own = {id(parameter) for parameter in model.parameters()}
        others = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in own]
        refuse(
            {f"trained parameters outside of {type(model).__name__}: {others[:4]}": others},
            "ranks that share their rows train one model of transformers",
            f"{others[0] if others else ''}.requires_grad_(False); or a layout of dp and zero0 to zero3",
            self.mesh,
        )
        self.waiting.clear()  # of a fit that an exception has ended
        self._cut(model, RowParts)
        return model

    def cut_each(self, module: nn.Module) -> list[nn.Module]:
        """The models of transformers in a module that train, each with an optimizer of its own: they are cut in the
        same way, and give whole rows. What else trains in the module has whole rows on each rank."""
        trained = [part for part in module.modules() if any(p.requires_grad for p in part.parameters())]
        models = [part for part in trained if hasattr(part, "set_attn_implementation")]
        within = {part for model in models for part in model.modules() if part is not model}
        models = [model for model in models if model not in within]
        cut = self.shares_rows or cuts_model(self.mesh)
        bare = {f"a {type(one).__name__}, without a head": one.base_model is one for one in models if cut}
        refuse(
            {f"{type(module).__name__} without one": not models and cut} | bare,
            "ranks that share their rows train models of transformers with a head",
            "AutoModelForCausalLM, whose output_hidden_states=True gives hidden states; or dp and zero0 to zero3",
            self.mesh,
        )
        for model in models:
            if isinstance(model.forward, RowParts):
                model.forward = model.forward.whole_rows
            if cut:
                self._cut(model, WholeRows)
        return models

    def _cut(self, model: nn.Module, forward: type[RowParts]) -> None:
        whole = forward is WholeRows
        self._replaced.update(cut_whole_model(model, self.mesh, logits=whole))
        if self.mesh.size("cp") > 1 and self.mesh.size("pp") == 1:
            attach(model, self.mesh)
        if self.shares_rows:
            self._parts.append(forward(model.forward, self.mesh, self.waiting))
            model.forward = self._parts[-1]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that was made for whole models gets the parts that have taken their place."""
        follow_cut(optimizer, self._replaced)

    def weight_of(self, loss: object, weight: object, line: str) -> Tensor:
        """How many labels of this rank's part the loss of a model's last forward is the mean of. line: that is right
        where this loss, or a weight, is refused."""
        made = [part for part in self._parts if part.loss is loss]
        if weight is not None or len(made) != 1:
            seen = f"weight={weight}" if made else "a loss that no prepared model has returned last"
            raise _not_the_loss(seen, line, self.mesh)
        made[0].loss = None
        return made[0].weight


class CutStrategy:
    """What Lightning's and Fabric's strategies share: the mesh of a layout, and whose rows each rank gets."""

    layout: str | None
    model_axes, loop = "dp cp tp ep", "Fabric"  # of a layout; whose strategy it is

    @cached_property
    def mesh(self) -> Mesh:
        """Of the layout, over the ranks that the library has started."""
        return mesh_for(self.layout, self.model_axes)

    @cached_property
    def _cut_models(self) -> CutModels:
        return CutModels(self.mesh)

    def setup_environment(self) -> None:
        """Lightning's. Where an exception has ended a loop, here or on another rank, all ranks meet in a new world."""
        if rejoin():
            for made in ("mesh", "_cut_models"):
                self.__dict__.pop(made, None)
        super().setup_environment()  # type: ignore[misc]

    def _refuse(self, seen: str, expected: str, fix: str = OTHERWISE) -> NoReturn:
        where = self.mesh.describe_rank()
        raise IntegrationError("IG866", seen=seen, expected=expected, fix=fix, where=where, loop=self.loop)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks of a cp, tp or pp group get the same rows."""
        return {"num_replicas": self.mesh.size("dp"), "rank": self.mesh.index("dp")}


def prepare_data_loader(accelerator: Any, mesh: Mesh, loader: Any, device_placement: bool | None = None) -> Any:
    """accelerate's, which deals batches to ranks; here to those of dp: a cp or tp group's ranks get the same rows."""
    from accelerate.data_loader import prepare_data_loader

    if getattr(loader, "_is_accelerate_prepared", False):
        return loader
    prepared = prepare_data_loader(
        loader, accelerator.device, num_processes=mesh.size("dp"), process_index=mesh.index("dp"),
        split_batches=accelerator.split_batches, rng_types=accelerator.rng_types.copy(), dispatch_batches=False,
        put_on_device=accelerator.device_placement if device_placement is None else device_placement,
        even_batches=accelerator.even_batches, use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed, non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )  # fmt: skip
    accelerator._dataloaders.append(prepared)
    return prepared


def gather_data_ranks(value: Any, mesh: Mesh) -> Any:
    """accelerate's gather of data ranks: the others have copies of their rows."""
    from accelerate.utils import recursively_apply

    group = mesh.group("dp")

    def all_rows(tensor: Tensor) -> Tensor:
        rows = tensor.detach() if tensor.dim() else tensor.detach()[None]
        return raw.all_gather(rows, group, [len(rows)] * group.size)

    return recursively_apply(all_rows, value, error_on_other_type=True)


def gather_by_data_rank(accelerator: Any, mesh: Mesh) -> None:
    """What accelerate gathers, and this process's number in it, are those of data ranks."""
    kind = type(accelerator)
    changed = {
        "process_index": property(lambda _: mesh.index("dp")),
        "gather": lambda _, tensor: gather_data_ranks(tensor, mesh),
    }
    accelerator.__class__ = type(kind.__name__, (kind,), changed)


def cuts_model(mesh: Mesh) -> bool:
    """Whether a rank has a part of the model alone, beside what ZeRO shards."""
    return mesh.size("tp") * mesh.size("ep") * mesh.size("pp") > 1


def cut_whole_model(model: nn.Module, mesh: Mesh, *, prove: bool = True, logits: bool = False) -> WeakIdKeyDictionary:
    """Under tp, ep and pp each rank gets its part of a whole model, which cp attaches; prove, logits: as in `attach`.
    Returns {parameter before: after}, with None after one that is in another stage."""
    contracts = [contract_of(parameter) for parameter in model.parameters()]
    cut = {shard.axis for contract in contracts if contract is not None for shard in contract.shards}
    cut |= {"pp"} if hasattr(model, "chunks") else set()
    before: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    if any(mesh.size(axis) > 1 and axis not in cut for axis in ("tp", "ep", "pp")):
        attach(model, mesh, prove=prove, logits=logits)
    if mesh.size("cp") > 1 and not hasattr(model, "_isograd_attached"):  # ig.hf.load has attached its own
        attach(model, mesh)
    after = dict(model.named_parameters(remove_duplicate=False))
    return WeakIdKeyDictionary({p: after.get(name) for name, p in before.items() if after.get(name) is not p})


def follow_cut(optimizer: torch.optim.Optimizer, replaced: WeakIdKeyDictionary) -> None:
    """An optimizer that was made for the whole model gets the parts that have taken its place."""
    for group in optimizer.param_groups:
        parts = [p if optimizer.state.get(p) else replaced.get(p, p) for p in group["params"]]
        group["params"][:] = [part for part in parts if part is not None]


def reasons_of_shared_rows(trainer: Any, classes: Sequence[type]) -> dict[str, Any]:
    """What a Trainer refuses under cp, tp and pp, and whether it is so: what shifts labels again, and more."""
    args, mesh = trainer.args, trainer.mesh
    loss = next((kind for kind in classes if "compute_loss" in vars(kind)), object)
    own = not loss.__module__.startswith("transformers.") and not trainer.shares_loss
    found = {
        "model_init: give the model": trainer.model_init,
        "compute_loss_func: set model.loss_function, which gets shift_labels": trainer.compute_loss_func,
        f"{loss.__name__}.compute_loss, which may shift labels: leave it out": own,
        "label_smoothing_factor, which shifts labels: set it to 0": args.label_smoothing_factor,
        "compute_metrics: evaluate without it, or in a Trainer of dp alone": trainer.compute_metrics,
        "dispatch_batches: set it to False in accelerator_config": trainer.accelerator.dispatch_batches,
        "precompute_ref_log_probs: set it to False": getattr(args, "precompute_ref_log_probs", False),
    }
    if mesh.size("pp") > 1:
        routed = getattr(trainer.model.config, "output_router_logits", False)
        wrong = "a balance loss of experts: set output_router_logits to False in the model's config, TRL's "
        found |= {f"{wrong}router_aux_loss_coef to 0": routed or getattr(trainer, "aux_loss_enabled", False)}
    axis = next(axis for axis in ("cp", "tp", "pp") if mesh.size(axis) > 1)
    return {f"{axis} with {what}": is_set for what, is_set in found.items()}


@torch.no_grad()
def whole_state(state: Mapping[str, Any], model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """A state dict of this rank's parts with whole parameters, on every rank; copies, where ZeRO 3 will drop them."""
    parts = dict(model.named_parameters(remove_duplicate=False)) if cuts_model(mesh) else {}
    contracts = {name: contract for name, p in parts.items() if (contract := contract_of(p)) is not None}
    whole = {
        n: assemble(v.detach(), contracts[n], mesh).contiguous() if n in contracts else v for n, v in state.items()
    }
    if mesh.size("pp") > 1:
        return _of_all_stages(whole, mesh)
    moves = mesh.layout.zero == 3
    return {name: value.clone() if moves and isinstance(value, Tensor) else value for name, value in whole.items()}


def _of_all_stages(state: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The tensors of every stage; of one that several have, the first's."""
    whole, group = dict(state), mesh.group("pp")
    forms = {n: (list(v.shape), str(v.dtype)) for n, v in state.items() if isinstance(v, Tensor)}
    every = all_gather_object(forms, mesh, "pp")
    holders = {name: rank for rank in reversed(range(group.size)) for name in every[rank]}
    for name, source in holders.items():
        shape, dtype = every[source][name]
        value = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=mesh.device)
        whole[name] = state[name].clone(memory_format=torch.contiguous_format) if source == group.index else value
        raw.broadcast_(whole[name], group, source)
    return whole


def part_of_state(state: Mapping[str, Any], model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """A state dict of whole parameters with those parts of them that this rank has."""
    own = model.state_dict(keep_vars=True) if mesh.size("pp") > 1 else state
    parts = {name: value for name, value in state.items() if name in own}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        contract = contract_of(parameter)
        if contract is not None and name in parts and parts[name].shape == contract.shape:
            parts[name] = parts[name][tuple(slice(*span) for span in contract.local(mesh))]
    return parts


@torch.no_grad()
def _of_all_parts(output: Any, part: BatchPart, mesh: Mesh) -> Any:
    """A model's output whose loss is the mean over the labels of all parts, and whose logits are of all tokens."""
    if output.get("loss") is not None:
        sums = torch.stack((output["loss"].double() * part.weight, part.weight.double()))
        total, labels = raw.all_reduce(sums, mesh.group("cp"))
        output["loss"] = (total / labels.clamp(min=1)).to(output["loss"].dtype)
    if output.get("logits") is not None:
        output["logits"] = part.gather_sequence(output["logits"])
    return output


@torch.no_grad()
def evaluated(
    model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, *, logits: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(the mean over the labels of all parts, the logits of all tokens) of whole rows."""
    part = shard(batch, mesh)
    output = model(**part.inputs)
    if not logits:
        output["logits"] = None
    whole = _of_all_parts(output, part, mesh)
    return whole.get("loss") if "labels" in part.inputs else None, whole["logits"]
