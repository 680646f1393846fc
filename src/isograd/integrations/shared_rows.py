"""Ranks of a cp or tp group, which work on the same rows: the rows they get, and what their loop must not do.

The model is one of transformers: attached under cp (`ig.hf.attach`), made by `ig.hf.load` under tp. Each rank gets its
part of a batch by `ig.hf.shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import raw
from isograd.core.contract import contract_of
from isograd.core.mesh import Mesh
from isograd.errors import IntegrationError
from isograd.hf import shard


class RowParts:
    """A forward that is called with whole rows and computes this rank's part of them."""

    def __init__(self, forward: Callable[..., Any], mesh: Mesh) -> None:
        self.whole_rows, self._mesh = forward, mesh
        self.loss: Tensor | None = None  # of the last forward, until its backward
        self.weight = torch.zeros(())  # how many labels it is the mean of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = shard(dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs, self._mesh)
        output = self.whole_rows(**part.inputs)
        self.loss, self.weight = output.get("loss"), part.weight
        return output


def prepare_data_loader(accelerator: Any, loader: Any, mesh: Mesh, device_placement: bool | None) -> Any:
    """accelerate's, which deals batches to ranks; here to the ranks of dp, so that those of a cp or tp group get the
    same rows."""
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


def cuts_model(mesh: Mesh) -> bool:
    """Whether a rank has a part of the model alone, beside what ZeRO shards."""
    return mesh.size("tp") * mesh.size("ep") > 1


def refuse_whole_model(model: nn.Module, mesh: Mesh) -> None:
    """Under tp and ep each rank needs its part of a model."""
    contracts = [contract_of(parameter) for parameter in model.parameters()]
    cut = {shard.axis for contract in contracts if contract is not None for shard in contract.shards}
    whole = [axis for axis in ("tp", "ep") if mesh.size(axis) > 1 and axis not in cut]
    if whole:
        layout = str(mesh.layout)
        raise IntegrationError(
            "IG855",
            f"under {' and '.join(whole)}, a model that is whole on every rank",
            seen=f"a {type(model).__name__} that no {' or '.join(whole)} cuts, under {layout!r}",
            expected="a model of ig.hf.load on a mesh of the same layout",
            fix=f"model = ig.hf.load(folder, ig.Mesh({layout!r})), in the place of from_pretrained(folder)",
            where=mesh.describe_rank(),
        )


def reasons_of_shared_rows(trainer: Any, classes: Sequence[type]) -> dict[str, Any]:
    """What a Trainer refuses under cp and tp, and whether it is so: what shifts labels of a part again, and more."""
    args, mesh = trainer.args, trainer.mesh
    loss = next((kind for kind in classes if "compute_loss" in vars(kind)), object)
    own = not loss.__module__.startswith("transformers.")
    found = {
        "model_init: give the model": trainer.model_init,
        "compute_loss_func: set model.loss_function, which gets shift_labels": trainer.compute_loss_func,
        f"{loss.__name__}.compute_loss, which may shift labels: leave it out": own,
        "label_smoothing_factor, which shifts labels: set it to 0": args.label_smoothing_factor,
        "compute_metrics: evaluate without it, or in a Trainer of dp alone": trainer.compute_metrics,
        "dispatch_batches: set it to False in accelerator_config": trainer.accelerator.dispatch_batches,
    }
    return {f"{'cp' if mesh.size('cp') > 1 else 'tp'} with {what}": is_set for what, is_set in found.items()}


@torch.no_grad()
def evaluated(
    model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, *, logits: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(the mean over the labels of all parts, the logits of all tokens) of whole rows."""
    part = shard(batch, mesh)
    output = model(**part.inputs)
    loss = None
    if "labels" in part.inputs:
        sums = torch.stack((output.loss.double() * part.weight, part.weight.double()))
        total, labels = raw.all_reduce(sums, mesh.group("cp"))
        loss = total / labels.clamp(min=1)
    return loss, part.gather_sequence(output.logits) if logits else None
