"""What a loss of another library is a mean of: labels, where a batch has some; else its rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import EngineError

IGNORED = -100  # the label that losses of torch and transformers leave out


def labels_in(batch: Mapping[str, Any], *, shifted: bool) -> Tensor | None:
    """How many labels count; None where the batch has no labels. shifted: the loss leaves out each row's first one."""
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and shifted and labels.dim() > 1:
            labels = labels[..., 1:]
    return labels.ne(IGNORED).sum() if isinstance(labels, Tensor) else None


def shifts_labels(model: object) -> bool:
    """Whether a model of transformers leaves out each row's first label. GPT-2 and others say no kind of loss, and are
    known by their names."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    name, kind = type(model).__name__, getattr(model, "loss_type", None)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return LOSS_MAPPING.get(str(kind)) is ForCausalLMLoss or (kind is None and ("LMHead" in name or "CausalLM" in name))


def labels_of_loss(model: object, batch: Mapping[str, Any]) -> Tensor | None:
    """How many labels the loss is the mean of that a model of transformers makes of this batch by itself. None: there
    are no labels, or it is not known which of them count."""
    if not hasattr(model, "loss_function"):
        return None
    from transformers.loss.loss_utils import LOSS_MAPPING

    shifts = shifts_labels(model)
    known = shifts or str(getattr(model, "loss_type", None)) in LOSS_MAPPING
    return labels_in(batch, shifted=shifts) if known else None


class LabelCounter:
    """Listens to models' forwards: a loss that a model has made of labels weighs these, any other one its rows."""

    def __init__(self, model: nn.Module, call: str, mesh: Mesh, *others: nn.Module) -> None:
        """others: further models. call: what was called without weight=, for the line by which rank 0 says so once."""
        self._call, self._mesh, self._speaks = call, mesh, mesh.rank == 0
        self._step = (0, -1)  # an engine, and how many steps it had ended
        self._weighed = False  # whether losses of that step have weights: others count other things
        self._rows = 0
        self._made: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}  # each model's last loss, and of how many labels
        for each in (model, *others):
            each.register_forward_hook(self._record_forward, with_kwargs=True)

    def _record_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            self._rows = rows_in((args, kwargs)) or 0
            self._made.pop(model, None)
            if isinstance(output, Mapping) and (loss := output.get("loss")) is not None:
                self._made[model] = (loss, labels_of_loss(model, kwargs))

    def labels_of(self, loss: Tensor) -> Tensor | None:
        """How many labels a model has made this loss of in its last forward; None: another loss."""
        return next((labels for made, labels in self._made.values() if made is loss), None)

    def weight_of(
        self, loss: Tensor, given: float | Tensor | None, engine: Engine, rows: int | None = None
    ) -> float | Tensor:
        """What a loss of the last forward is the mean of: what was given; else what is known of it. rows: of the batch,
        where they are not those of the forward."""
        if given is None:
            given = self.labels_of(loss)
        step, weighed = (id(engine), engine.step_state.now.ended), given is not None
        if step == self._step and weighed != self._weighed:
            seen = "a loss with a weight, and one without, in one step"
            raise EngineError("IG535", seen=seen, where=self._mesh.describe_rank())
        self._step, self._weighed = step, weighed
        if given is not None:
            return given
        if self._speaks:
            print(f"isograd: {self._call} without weight=: losses weigh their rows", file=sys.stderr)
        self._speaks, rows = False, self._rows if rows is None else rows
        if rows:
            engine.step_state.now.note_rows()
        return rows


def rows_in(batch: object) -> int | None:
    """The length of the first tensor in a batch; None where it has none."""
    leaves = torch.utils._pytree.tree_leaves(batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)


def routed_in(batch: Mapping[str, Any]) -> Tensor | int:
    """The tokens that a model of experts routes: those that its balance loss is taken over."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor):
        return mask.ne(0).sum()
    inputs = batch.get("input_ids")
    return inputs.numel() if isinstance(inputs, Tensor) else rows_in(batch) or 0
