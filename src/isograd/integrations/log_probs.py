"""Losses of TRL where ranks share their rows: every rank of a cp or tp group has the log probabilities of whole rows.

TRL gives a model a forward that makes the log probability of each label by the head's weight, and computes any loss of
them. Under cp that forward gets this rank's part of the rows, and what it returns is gathered; under tp it gets the
head's whole weight. Then all ranks of a group compute the same loss, by TRL's own code: under cp it enters the step
once per rank, each time with the same weight; under tp once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

from torch import Tensor

from isograd.comm import ops
from isograd.core.contract import contract_of
from isograd.core.mesh import Mesh
from isograd.hf import attach, shard
from isograd.hf.losses import KEYS
from isograd.integrations.shared_rows import cut_whole_model

TRAINERS = ("SFTTrainer", "DPOTrainer")  # their losses are of log probabilities alone
OTHER_KEYS = ("use_cache", "fused_lm_head", "output_router_logits")  # of a forward, beside those of a batch


def has_loss_of_log_probs(kind: type) -> bool:
    """Whether the loss of a Trainer class is one of TRL's that is computed from log probabilities."""
    others = (one for one in kind.__mro__ if not one.__module__.startswith("isograd."))
    loss = next((one for one in others if "compute_loss" in vars(one)), object)
    return loss.__module__.startswith("trl.trainer.") and loss.__name__ in TRAINERS


def share_log_probs(trainer: Any, mesh: Mesh) -> None:
    """The model of one of TRL's Trainers, which is cut, and its reference, which is cut here as well."""
    trainer._tp_size = mesh.size("cp") * mesh.size("tp")  # TRL divides counts of tokens by it
    _give_forward(trainer.model, mesh)
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        cut_whole_model(reference, mesh, prove=False)
        if mesh.size("cp") > 1:
            attach(reference, mesh)
        _give_forward(reference, mesh)


def _give_forward(model: Any, mesh: Mesh) -> None:
    model = model.get_base_model() if hasattr(model, "peft_config") else model
    given = model.forward

    @functools.wraps(type(model).forward)  # `generate` reads its signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return given(*args, **kwargs)
        with _gathered_head(self, mesh):
            if mesh.size("cp") == 1 and not mesh.layout.sp:
                return given(*args, fused_lm_head=True, **kwargs)
            options = {name: kwargs.pop(name) for name in OTHER_KEYS if name in kwargs}
            part = shard(dict(zip(KEYS, args, strict=False)) | kwargs, mesh)
            inputs = {name: value for name, value in part.inputs.items() if name not in ("labels", "use_cache")}
            output = given(**inputs, **options, fused_lm_head=True)
            for name, value in output.items():
                if isinstance(value, Tensor) and value.dim() > 1:
                    output[name] = part.gather_sequence(value)[:, :-1]  # the last token has no label
            return output

    model.forward = MethodType(forward, model)


@contextmanager
def _gathered_head(model: Any, mesh: Mesh) -> Iterator[None]:
    """The head's weight and bias are whole for code that reads them; every tp rank computes the same with them."""
    head = model.get_output_embeddings()
    contract = contract_of(head.weight)
    shards = () if contract is None else [cut for cut in contract.shards if cut.axis == "tp"]
    if not shards:
        yield
        return
    sizes, group = [stop - start for start, stop in shards[0].ranges], mesh.group("tp")
    parts = {name: getattr(head, name, None) for name in ("weight", "bias")}
    whole = SimpleNamespace(
        **{n: p if p is None else ops.gather_for_identical_use(p, group, 0, sizes) for n, p in parts.items()}
    )
    model.get_output_embeddings = lambda: whole
    try:
        yield
    finally:
        del model.get_output_embeddings
