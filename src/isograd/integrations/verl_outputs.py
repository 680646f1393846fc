"""What verl's loss functions and trainers are given of a model: numbers at each token, as nested sequences.

At each place stands what belongs to the token after it, as verl has them: `log_probs[i]` is that of token i + 1. The
last place of a sequence has a number that no loss may count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Refused = Callable[[str, str], Exception]


class VerlRows(NamedTuple):
    """Nested sequences side by side."""

    tokens: Tensor  # [rows, longest]
    there: Tensor  # [rows, longest]: what is no padding
    offsets: Tensor  # [rows + 1]: of the nested ones

    def nested(self, values: Tensor) -> Tensor:
        """Values [rows, longest] without the padding."""
        return torch.nested.nested_tensor_from_jagged(values[self.there], self.offsets)


def rows_of(micro: Any, refused: Refused) -> VerlRows:
    """The sequences of a micro-batch."""
    inputs = micro["input_ids"]
    lengths = inputs.offsets().diff()
    rows = torch.nn.utils.rnn.pad_sequence(list(inputs.unbind()), batch_first=True)
    there = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
    if len(micro.get("multi_modal_inputs", None) or ()):
        raise refused("a batch with images, sound or video", "multi_modal_inputs")
    return VerlRows(rows, there, inputs.offsets())


def logits_of(module: nn.Module, micro: Any, rows: VerlRows, refused: Refused) -> Tensor:
    """[rows, longest, ...]: what the model says at each token."""
    more = {}
    places = micro.get("position_ids", None)
    if places is not None:
        if not places.is_nested or places.dim() != 2:
            raise refused("positions in several dimensions", f"position_ids of {places.dim()} dimensions")
        more["position_ids"] = torch.nn.utils.rnn.pad_sequence(list(places.unbind()), batch_first=True)
    found: Tensor = module(input_ids=rows.tokens, attention_mask=rows.there.long(), use_cache=False, **more).logits
    return found


def of_language(module: nn.Module, micro: Any, refused: Refused) -> dict[str, Tensor]:
    """log_probs, and what the batch asks for beside them: entropy, sum_pi_squared."""
    from verl.utils import tensordict_utils as tu

    def asked(key: str) -> bool:
        return bool(tu.get_non_tensor_data(data=micro, key=key, default=False))

    if asked("distillation_use_topk"):
        raise refused("distillation from a teacher's k largest log probabilities", "distillation_use_topk")
    rows = rows_of(micro, refused)
    logits = logits_of(module, micro, rows, refused)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = torch.log_softmax(logits / _temperature(micro, rows, refused), -1)
    found = {"log_probs": scores.gather(-1, rows.tokens.roll(-1, 1)[..., None])[..., 0]}
    if asked("calculate_entropy"):
        found["entropy"] = -(scores.exp() * scores).sum(-1)
    if asked("calculate_sum_pi_squared"):
        found["sum_pi_squared"] = (2 * scores).exp().sum(-1)
    return {name: rows.nested(values) for name, values in found.items()}


def of_values(module: nn.Module, micro: Any, refused: Refused) -> dict[str, Tensor]:
    """values, of a model with one number at each token."""
    rows = rows_of(micro, refused)
    return {"values": rows.nested(logits_of(module, micro, rows, refused)[..., 0])}


def _temperature(micro: Any, rows: VerlRows, refused: Refused) -> Any:
    """One for all, or one of each sequence, over its tokens and words."""
    from verl.utils import tensordict_utils as tu

    given = tu.get_non_tensor_data(data=micro, key="temperature", default=1.0)
    if not isinstance(given, Tensor) or given.numel() == 1:
        return max(float(given), 1e-8)
    if given.shape != rows.tokens.shape[:1]:
        raise refused("a temperature that is neither one number nor one of each sequence", str(tuple(given.shape)))
    return given.clamp(min=1e-8)[:, None, None]
