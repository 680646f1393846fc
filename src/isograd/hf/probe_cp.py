"""Decides by a trial, not by the model's name, whether a transformers model can be cut over cp.

The trial is two forwards of four tokens, in eval mode, with an attention in which each token sees only itself:

1. The embedding of token 1 is NaN. Only its own output may be NaN: otherwise something other than the attention that
   we replace mixes tokens (a convolution, a recurrence, an attention of the model's own). A label at that token alone
   must make the loss NaN: otherwise the loss shifts labels itself. The masks that the model asks for must be causal,
   or causal within the window that it passes to attention.
2. A row, and the same row reversed together with its positions. A token's query must depend on its position only, not
   on its place in the row: otherwise the model counts positions itself. Without any label the loss must be 0: otherwise
   a part of it is not a sum over labels (a router's balance loss), and a rank without labels would add something.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isograd.core.attributes import set_attributes
from isograd.errors import ModelError, headline

NAME, TRIAL = "isograd", "isograd_trial"  # names of our attention in transformers' registry
TOKENS, POISONED = 4, 1
NO_WINDOW = 1 << 62


class SelfOnlyAttention:
    """Takes the place of a SequenceCut in the trial: each token attends to itself only."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queries: list[Tensor] = []

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, window: int | None, *_: Any
    ) -> Tensor:
        """Record the queries, check the mask and return the values."""
        self.queries.append(q)
        if mask is not None:
            causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=q.device).tril()
            if not bool(((mask > 0) == causal).all()) or int(mask.max()) != (window or NO_WINDOW):
                raise ModelError(
                    "IG442",
                    f"{self.name} uses an attention mask that is not supported for cut sequences",
                    seen=f"{(mask > 0).long()[0, 0].tolist()} of {TOKENS} tokens, within {int(mask.max())}; "
                    f"the window passed to attention is {window}",
                    expected="a causal mask, or a sliding window that is passed to attention",
                )
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)


def trial_mask(*, mask_function: Any, local_size: int | None = None, **options: Any) -> Tensor:
    """The mask transformers would make, [b, 1, q, k]: 0 where not seen, else the window."""
    from transformers.masking_utils import sdpa_mask

    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    seen: Any = sdpa_mask(mask_function=mask_function, local_size=local_size, **options)
    mask: Tensor = seen.long() * (local_size or NO_WINDOW)
    return mask


@torch.no_grad()
def probe_cp(model: Any) -> None:
    """Run the trial. The model then has our attention, or is refused (IG441, IG442, IG446, IG447)."""
    name = type(model).__name__
    _refuse_growing_positions(model, name)
    try:
        with set_attributes(*model.modules(), training=False):
            _tokens_meet_in_attention_only(model, name)
            _positions_are_told(model, name)
    except Exception as error:
        if isinstance(error, ModelError) and error.code != "IG443":
            raise
        raise ModelError(
            "IG441", seen=error.seen if isinstance(error, ModelError) else headline(error), name=name
        ) from error


def _forward(
    model: Any, ids: Tensor, positions: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor | None, SelfOnlyAttention]:
    """(output [b, s, ...], loss, what attention was called with)."""
    alone, one = SelfOnlyAttention(type(model).__name__), torch.ones((), dtype=torch.long, device=ids.device)
    out = model(
        input_ids=ids, position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=one,
        use_cache=False, isograd=alone,
    )  # fmt: skip
    return out.logits if "logits" in out else out[0], out.get("loss"), alone


def _tokens_meet_in_attention_only(model: Any, name: str) -> None:
    places = torch.arange(TOKENS, device=model.device)[None]
    poisoned = places == POISONED
    model.set_attn_implementation(TRIAL)
    poison = model.get_input_embeddings().register_forward_hook(
        lambda _, __, out: out.masked_fill(poisoned.unsqueeze(-1), torch.nan)
    )
    try:
        out, loss, alone = _forward(model, places, places, torch.where(poisoned, places, -100))
    finally:
        poison.remove()
    reached = [] if out.dim() < 3 else out.isnan().flatten(2).any(2)[0].nonzero().flatten().tolist()
    if not alone.queries or reached != [POISONED]:
        raise ModelError(
            "IG441",
            seen=f"{len(alone.queries)} calls of transformers' attention interface; with each token seeing only "
            f"itself, a NaN at token {POISONED} came out at {reached}",
            name=name,
        )
    if loss is not None and not bool(loss.isnan()):
        seen = "its loss did not use `shift_labels` as they are: the one label given met another token's output"
        raise ModelError("IG447", seen=seen, name=name)


def _positions_are_told(model: Any, name: str) -> None:
    row = torch.arange(TOKENS, device=model.device)
    both = torch.stack([row, row.flip(0)])
    model.set_attn_implementation(NAME)
    _, loss, alone = _forward(model, both, both, torch.full_like(both, -100))
    there, back = alone.queries[0].float()
    apart = float((there - back.flip(1)).norm())
    if not apart <= 0.01 * float(there.norm()):
        raise ModelError(
            "IG446",
            f"{name} computes positions itself",
            seen="a token's query changed with its place in the row although its position_ids did not",
            expected="positions taken from position_ids: a rank holds tokens from the middle of a sequence",
        )
    if loss is not None and float(loss) != 0:
        raise ModelError("IG447", seen=f"without any label its loss is {float(loss)}", name=name)


def _refuse_growing_positions(model: Any, name: str) -> None:
    """Refuse rotary angles that depend on the longest position that any batch had."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind == "dynamic":
                raise ModelError(
                    "IG446",
                    f"the rotary positions of {name} depend on the length",
                    seen=f"rope_type {kind!r}",
                    expected="angles that are a function of a token's position alone",
                    fix="rope_type 'default', 'linear', 'yarn', 'llama3' or 'longrope'",
                )
