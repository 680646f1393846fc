"""What verl's loss functions and trainers are given of a model: numbers at each token, as nested sequences.

At each place stands what belongs to the token after it, as verl has them: `log_probs[i]` is that of token i + 1. The
last place of a sequence has a number that no loss may count. Under cp and sp the model gets this rank's part of the
rows, and its numbers are gathered: every rank of a group has those of whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isograd.core.mesh import Mesh
from isograd.hf import BatchPart, shard

Refused = Callable[[str, str], Exception]


class VerlRows(NamedTuple):
    """Nested sequences side by side."""

    tokens: Tensor  # [rows, longest]
    there: Tensor  # [rows, longest]: what is no padding
    offsets: Tensor  # [rows + 1]: of the nested ones
    part: BatchPart | None  # of this rank, where sequences are cut

    def nested(self, values: Tensor) -> Tensor:
        """Values [rows, here] of whole sequences, without the padding."""
        whole = values if self.part is None else self.part.gather_sequence(values)
        return torch.nested.nested_tensor_from_jagged(whole[self.there], self.offsets)


def run(module: nn.Module, micro: Any, mesh: Mesh, refused: Refused) -> tuple[VerlRows, Tensor]:
    """The sequences of a micro-batch, and what the model says at each token that it is given: [rows, here, ...]."""
    inputs = micro["input_ids"]
    tokens = torch.nn.utils.rnn.pad_sequence(list(inputs.unbind()), batch_first=True)
    there = torch.arange(tokens.shape[1], device=tokens.device) < inputs.offsets().diff()[:, None]
    if len(micro.get("multi_modal_inputs", None) or ()):
        raise refused("a batch with images, sound or video", "multi_modal_inputs")
    given = {"input_ids": tokens, "attention_mask": there.long()}
    places = micro.get("position_ids", None)
    if places is not None:
        if not places.is_nested or places.dim() != 2:
            raise refused("positions in several dimensions", f"position_ids of {places.dim()} dimensions")
        given["position_ids"] = torch.nn.utils.rnn.pad_sequence(list(places.unbind()), batch_first=True)
    part = shard(given, mesh) if mesh.size("cp") > 1 or mesh.layout.sp else None
    logits: Tensor = module(**(given | {"use_cache": False} if part is None else part.inputs)).logits
    return VerlRows(tokens, there, inputs.offsets(), part), logits


def of_language(module: nn.Module, micro: Any, mesh: Mesh, refused: Refused) -> dict[str, Tensor]:
    """log_probs, and what the batch asks for beside them: entropy, sum_pi_squared."""
    from verl.utils import tensordict_utils as tu

    def asked(key: str) -> bool:
        return bool(tu.get_non_tensor_data(data=micro, key=key, default=False))

    if asked("distillation_use_topk"):
        raise refused("distillation from a teacher's k largest log probabilities", "distillation_use_topk")
    rows, logits = run(module, micro, mesh, refused)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    heat = tu.get_non_tensor_data(data=micro, key="temperature", default=1.0)
    if not isinstance(heat, Tensor) or heat.numel() == 1:
        heat = max(float(heat), 1e-8)
    elif heat.shape == rows.tokens.shape[:1]:  # one of each sequence, over its tokens and words
        heat = heat.clamp(min=1e-8)[:, None, None]
    else:
        raise refused("a temperature that is neither one number nor one of each sequence", str(tuple(heat.shape)))
    scores = torch.log_softmax(logits / heat, -1)
    after, part = rows.tokens.roll(-1, 1), rows.part
    after = after if part is None else part.cut.places.shard(after, mesh.index("cp"))
    found = {"log_probs": scores.gather(-1, after[..., None])[..., 0]}
    if asked("calculate_entropy"):
        found["entropy"] = -(scores.exp() * scores).sum(-1)
    if asked("calculate_sum_pi_squared"):
        found["sum_pi_squared"] = (2 * scores).exp().sum(-1)
    return {name: rows.nested(values) for name, values in found.items()}


def of_values(module: nn.Module, micro: Any, mesh: Mesh, refused: Refused) -> dict[str, Tensor]:
    """values, of a model with one number at each token."""
    rows, logits = run(module, micro, mesh, refused)
    return {"values": rows.nested(logits[..., 0])}
