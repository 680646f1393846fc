"""Losses of TRL where ranks share their rows or their model: each has the log probabilities of whole rows.

TRL gives a model a forward that makes the log probability of each label by the head's weight, and computes any loss of
them. Under cp that forward gets this rank's part of the rows, and what it returns is gathered; under tp it gets the
head's whole weight. Then all ranks of a group compute the same loss, by TRL's own code: under cp it enters the step
once per rank, each time with the same weight; under tp once. Under pp every stage calls TRL's code, which ends in the
forward of all stages but the last.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from isograd.comm import ops
from isograd.comm.consensus import all_gather_object
from isograd.core.contract import contract_of
from isograd.core.mesh import Mesh
from isograd.engine.validation import pipeline_of
from isograd.hf import shard
from isograd.hf.context_parallel import without_adapters
from isograd.hf.losses import IGNORE, KEYS
from isograd.integrations.shared_rows import cut_whole_model

OF_LOG_PROBS, OF_SCORES = ("SFTTrainer", "DPOTrainer", "GRPOTrainer"), ("RewardTrainer",)  # of what losses are made
OTHER_KEYS = ("use_cache", "fused_lm_head", "output_router_logits")  # of a forward, beside those of a batch
FUSED = {"fused_lm_head": True}


def has_shared_loss(kind: type, mesh: Mesh) -> bool:
    """Whether the loss of a Trainer class is one of TRL's that all ranks which share rows compute."""
    others = (one for one in kind.__mro__ if not one.__module__.startswith("isograd."))
    loss = next((one for one in others if "compute_loss" in vars(one)), object)
    known = OF_LOG_PROBS + (OF_SCORES if mesh.size("cp") == 1 or mesh.size("pp") == 1 else ())
    return loss.__module__.startswith("trl.trainer.") and loss.__name__ in known


class SharedLoss:
    """TRL's loss in one of its Trainers, whose model is cut; its reference is cut here as well."""

    def __init__(self, trainer: Any, mesh: Mesh) -> None:
        self.trainer, self.mesh = trainer, mesh
        self._copies = mesh.size("cp") * mesh.size("tp")  # of a row, in stages
        _give_forward(trainer.model, mesh)
        reference = getattr(trainer, "ref_model", None)
        if reference is not None:
            cut_whole_model(reference, mesh, prove=False)
            _give_forward(reference, mesh)
        if mesh.size("pp") > 1:
            _in_stages(trainer.model, self._loss)
            if reference is not None:
                _in_stages(reference, trainer.compute_ref_log_probs)
        self._references = None if reference is None else pipeline_of(reference, mesh)

    def _loss(self, model: Any, micro: Mapping[str, Any]) -> tuple[Tensor, float | Tensor]:
        """Of a micro-batch, by TRL's code; its weight."""
        trainer, inputs = self.trainer, dict(micro)
        if "references" in inputs:
            inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = inputs.pop("references").pair
        weight = trainer.loss_weight(inputs)
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, inputs, num_items_in_batch=weight), weight

    @contextmanager
    def in_stages(self, micros: list[dict[str, Any]]) -> Iterator[None]:
        """In here a pipeline runs: the last stage has the reference's log probabilities, and alone TRL's metrics. These
        are afterwards on all ranks: the means over data ranks."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        if self._references is not None:
            for micro, pair in zip(micros, self._references.evaluate(micros), strict=False):  # none on other stages
                micro["references"] = SimpleNamespace(pair=pair)  # in no tensor: all stages have these alike
        metrics, mode = trainer._metrics, "train" if trainer.model.training else "eval"
        before, tokens = metrics[mode], trainer._total_train_tokens
        metrics[mode], trainer.precompute_ref_logps = defaultdict(list), self._references is not None
        accelerator.gather = accelerator.gather_for_metrics = lambda value: value  # no stage waits for another one
        try:
            yield
        finally:
            del accelerator.gather, accelerator.gather_for_metrics
            found, metrics[mode], trainer.precompute_ref_logps = metrics[mode], before, False
        told = all_gather_object((dict(found), trainer._total_train_tokens - tokens), self.mesh)
        trainer._total_train_tokens = tokens + sum(new for _, new in told) // self._copies
        for name in {name for said, _ in told for name in said}:
            before[name] += [value for said, _ in told for value in said.get(name, ())]
        before["num_tokens"] = [trainer._total_train_tokens]


def _in_stages(model: Any, loss_of: Callable[..., Any]) -> None:
    """TRL's loss of a model in stages, in the place of the library's own."""
    given = vars(model).pop("forward", None)  # by TRL; the stages' own is the class's
    model._isograd_flow.loss_of = lambda library, micro: loss_of(given or library, micro)


def _give_forward(model: Any, mesh: Mesh) -> None:
    model = without_adapters(model)
    given = model.forward
    if "forward" not in vars(model):  # TRL has given it none: a score has no head of the vocabulary's size
        return

    @functools.wraps(type(model).forward)  # `generate` reads its signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        rows = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
        if not fused_lm_head:
            return _in_equal_parts(given, rows, mesh)
        with _gathered_head(self, mesh):
            if mesh.size("cp") == 1:
                return _in_equal_parts(given, rows | FUSED, mesh)
            options = {name: rows.pop(name) for name in OTHER_KEYS if name in rows}
            part = shard(rows, mesh)
            inputs = {name: value for name, value in part.inputs.items() if name not in ("labels", "use_cache")}
            output = given(**inputs, **options, **FUSED)
            for name, value in output.items():
                if isinstance(value, Tensor) and value.dim() > 1:
                    output[name] = part.gather_sequence(value)[:, :-1]  # the last token has no label
            return output

    model.forward = MethodType(forward, model)


def _in_equal_parts(run: Callable[..., Any], inputs: dict[str, Any], mesh: Mesh) -> Any:
    """The forward of whole rows, padded at their end where sp has to divide them: training, and generation."""
    tokens = inputs.get("input_ids")
    pads = -tokens.shape[1] % mesh.size("tp") if mesh.layout.sp and tokens is not None else 0
    if not pads:
        return run(**inputs)
    given = {name: value for name, value in inputs.items() if value is not None and name != "logits_to_keep"}
    for name in given.keys() & KEYS:
        given[name] = F.pad(given[name], (0, pads), value=IGNORE if "labels" in name else 0)
    output = run(**given)
    for name in given.keys() & {"cache", "past_key_values"}:  # as transformers names it since 5.24, and before
        given[name].crop(-pads)
    for name, value in output.items():
        if isinstance(value, Tensor) and value.dim() > 1:
            output[name] = value[:, :-pads]
    return output


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
