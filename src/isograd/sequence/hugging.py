"""Hugging Face causal language models, unmodified, on sequences cut over cp.

    ig.sequence.attach(model, mesh)                   # once; refuses models that would not be exact
    engine = ig.Engine(model, mesh, ...)
    for batch in loader:                              # the same whole sequences on every rank of a cp group
        part = ig.sequence.shard(batch, mesh)         # this rank's tokens, positions and shifted labels
        engine.backward(model(**part.inputs).loss, weight=part.weight)

A decoder's tokens are mixed by attention only, and transformers lets its function be chosen by name. Ours is
`attention` below. It keeps no state: what it must know of a batch (a `Cut`) is a keyword that travels through the
model's own layers. So recompute, several forwards before a backward, and several models with several meshes all get
the right Cut. A layer that gets no Cut raises an error instead of attending to the local tokens.

The loss of a part is the sum over its labels / max(1, their number): the exact mean, and 0 instead of 0 / 0 on a rank
without labels. That rank still runs backward, because other ranks' queries attended to its keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.contract import contract_of
from isograd.errors import ModelError, did_you_mean
from isograd.mesh import Mesh
from isograd.sequence.attend import attend, heads_here, places_for
from isograd.sequence.places import Places, document_starts
from isograd.sequence.same import gather_whole, refuse_unlike
from isograd.sequence.try_out import NAME, TRIAL, trial_mask, try_out

IGNORE = -100  # the label that does not count, as transformers has it
KEYS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
# Keywords that transformers passes to attention and that attention does not need.
UNUSED = ("position_ids", "use_cache", "labels", "shift_labels", "num_items_in_batch", "output_hidden_states",
          "return_dict", "cache_position")  # fmt: skip

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Cut:
    """How one batch is cut: all that attention must know about it."""

    mesh: Mesh
    places: Places
    starts: Tensor | None  # [b, padded]: start of each token's document; None: one document per row
    given: tuple[Tensor, ...]  # the whole batch, for the comparison of ranks

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, window: int | None) -> Tensor:
        """q [b, heads, local, d]; k, v [b, kv_heads, local, d], of my tokens -> [b, local, heads, d]."""
        where = self.mesh.where()
        if mask is not None:
            raise ModelError(
                "IG442", "the model made its own attention mask", seen=f"a mask {tuple(mask.shape)}",
                expected="none: a mask over this rank's tokens does not cover the other ranks' tokens", where=where,
            )  # fmt: skip
        if window is not None and self.places.length > window:
            raise ModelError(
                "IG412", "sliding-window attention is not built for sequences longer than the window",
                seen=f"{self.places.length} tokens", expected=f"at most {window}", where=where,
            )  # fmt: skip
        if {t.shape[2] for t in (q, k, v)} != {self.places.local}:
            raise ModelError(
                "IG443",
                "attention was called with tokens that are not those of the part",
                seen=f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}",
                expected=f"{self.places.local} tokens of each sequence",
                fix="call model(**part.inputs) as shard made them, without a cache of past keys",
                where=where,
            )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))

        def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            seen = None
            if self.starts is not None:
                seen = (self.starts[:, :, None] == self.starts[:, None, :]).tril()[:, None]
            share = q.shape[1] != k.shape[1]
            y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=share)
            return y.transpose(1, 2)

        return attend(whole, q, k, v, self.mesh, self.places, self.starts, scale)


@dataclass(frozen=True, eq=False)
class Part:
    """One rank's part of a batch."""

    inputs: dict[str, Any]  # for model(**inputs)
    weight: Tensor  # the number of this rank's labels, which the loss is the mean of
    cut: Cut

    def whole(self, x: Tensor) -> Tensor:
        """This rank's part [b, local, ...] of e.g. logits -> [b, length, ...] in order, on every cp rank."""
        return gather_whole(x, self.cut.mesh, self.cut.places)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    isograd: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls in every layer. query [b, heads, s, d] -> [b, s, heads, d]."""
    if isograd is None:
        raise _no_part("keywords that reached attention without the part's 'isograd'")
    rate = getattr(module, "attention_dropout", 0.0)
    wrong = {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and name not in UNUSED
    }
    if dropout or (isinstance(rate, float) and rate):
        wrong["dropout of attention probabilities"] = max(dropout, rate)
    if not (getattr(module, "is_causal", None) if is_causal is None else is_causal):
        wrong["is_causal"] = False
    if value.shape[-1] != query.shape[-1]:
        wrong["size of value heads"] = value.shape[-1]
    if wrong:
        raise ModelError(
            "IG442",
            f"{type(module).__name__} needs an attention that is not supported for cut sequences",
            seen=", ".join(
                f"{name}={value if isinstance(value, float | int | str) else '...'}" for name, value in wrong.items()
            ),
            expected="causal softmax attention, heads of one size, no dropout, caps, sinks or biases of its own",
            fix="turn it off in the config if possible; without cp the model trains as it is",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return isograd.attend(query, key, value, scale, attention_mask, sliding_window), None


def attach(model: Model, mesh: Mesh, *, tried: nn.Module | None = None) -> Model:
    """Give a transformers model attention over sequences that this mesh cuts. A trial first proves that nothing else in
    the model mixes tokens. With a mesh without cp, the model gets its own attention back, for example to generate.

    tried: a whole small copy for the trial, of a model that is cut into stages.
    """
    cut = {shard.axis for p in model.parameters() if (found := contract_of(p)) for shard in found.shards}
    axes = [f"{axis}{mesh.size(axis)}" for axis in ("tp", "pp", "ep") if mesh.size(axis) > 1 and axis not in cut]
    if tried is not None:
        axes = []
    if axes:
        raise ModelError(
            "IG440",
            f"a Hugging Face model is not cut over {', '.join(axes)}",
            seen=str(mesh.layout),
            expected="a layout of dp, cp and zero: a module that declares no contracts is whole on every rank",
            fix="leave those axes out, or cut the model by its own plans: ig.hugging.load(folder, mesh)",
            where=mesh.where(),
        )
    _detach(model)
    if mesh.size("cp") == 1:
        return model
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    if isinstance(heads, int):
        here = heads // mesh.size("tp")
        heads_here(here, here, mesh)  # refuses too few
    configs, own = _register_and_try(model, model if tried is None else tried)
    base: Any = getattr(model, "base_model", model)
    gate = base.register_forward_pre_hook(_gate(mesh, configs), with_kwargs=True)
    model._isograd_attached = (gate, own)  # type: ignore[assignment]
    return model


def _register_and_try(model: Any, tried: Any) -> tuple[list[Any], str]:
    """The model's configs, which now name our attention, and the name of its previous attention."""
    name = type(model).__name__
    if not hasattr(model, "set_attn_implementation"):
        raise ModelError(
            "IG441",
            f"the attention of {name} cannot be reached",
            seen="a module without set_attn_implementation",
            expected="a transformers model",
            fix="isograd.models.Transformer, or isograd.sequence.attend inside the model's own attention",
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    for known in (NAME, TRIAL):
        AttentionInterface.register(known, attention)
    AttentionMaskInterface.register(TRIAL, trial_mask)  # under NAME none is made at all
    configs, own = _own_configs(model), model.config._attn_implementation
    try:
        try_out(tried)
        model.set_attn_implementation(NAME)
    except BaseException:
        model.set_attn_implementation(own)
        raise
    return configs, own


def _own_configs(model: Any) -> list[Any]:
    """Give the model its own copy of its config: the config names the attention, and other models may share it."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in copies:
            module.config = copies[id(config)]
    return [module.config for module in model.modules() if hasattr(module, "config")]


def _detach(model: Any) -> None:
    gate, own = model.__dict__.pop("_isograd_attached", (None, None))
    if gate is not None:
        gate.remove()
        model.set_attn_implementation(own)


def _gate(mesh: Mesh, configs: list[Any]) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """Checks each call of the attached model. At the first call, ranks compare the batches they were given."""
    compared = False

    def gate(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal compared
        cut = kwargs.get("isograd")
        if not isinstance(cut, Cut):
            raise _no_part(f"keywords {sorted(n for n, v in kwargs.items() if v is not None)}", mesh)
        if cut.mesh.layout != mesh.layout:
            raise _no_part(f"a part for {str(cut.mesh.layout)!r}; the model is attached to {str(mesh.layout)!r}", mesh)
        if kwargs.get("attention_mask") is not None or len(args) > 1:
            raise _no_part("an attention_mask or positional arguments beside the part", mesh)
        if any(config._attn_implementation != NAME for config in configs):
            raise _no_part("another attention than attach gave the model", mesh)
        ids = kwargs.get("input_ids")
        if ids is not None and ids.shape[1] != cut.places.local:
            raise _no_part(f"{ids.shape[1]} tokens per row; the part has {cut.places.local}", mesh)
        if not compared:
            refuse_unlike(mesh, *cut.given)
            compared = True

    return gate


def _no_part(seen: str, mesh: Mesh | None = None) -> ModelError:
    return ModelError(
        "IG443",
        "a model that is attached to a cp mesh was called without a part",
        seen=seen,
        expected="part = isograd.sequence.shard(batch, mesh); model(**part.inputs)",
        fix="to generate, call attach(model, mesh) with a mesh without cp first: it restores the model's own attention",
        where=mesh.where() if mesh else None,
    )


def shard(batch: Mapping[str, Any], mesh: Mesh) -> Part:
    """This rank's part of whole sequences. It does not communicate, so it may run in a loader's thread.

    batch: input_ids [b, s]; labels [b, s] as transformers has them, aligned with input_ids and shifted here, before
    anything is cut, or shift_labels, which are shifted already; attention_mask with padding at the END of rows only;
    position_ids: where they restart, a new document begins, which attends only to itself. Other keys are refused.
    """
    given = {name: tensor for name, tensor in batch.items() if tensor is not None}
    _refuse_unknown(given, mesh)
    tokens: Tensor = given["input_ids"]
    rows, length = tokens.shape
    places, rank = places_for(length, 1, mesh), mesh.index("cp")  # under sp, tp divides the tokens of each row
    labels = torch.full_like(tokens, IGNORE)
    if "shift_labels" in given:
        labels = given["shift_labels"]
    elif "labels" in given:
        labels = F.pad(given["labels"][:, 1:], (0, 1), value=IGNORE)
    mask = given.get("attention_mask")
    if mask is not None:
        _refuse_padding(mask.bool(), labels, mesh)
    positions = given.get("position_ids", torch.arange(length, device=tokens.device).expand(rows, -1))
    cut = Cut(mesh, places, _starts(given.get("position_ids"), mask, places, mesh), (tokens, labels, positions))
    mine = places.shard(labels, rank, IGNORE).contiguous()  # transformers views labels
    weight = (mine != IGNORE).sum()
    inputs = {
        "input_ids": places.shard(tokens, rank),
        "position_ids": places.shard(positions, rank),
        "use_cache": False,
    }
    if "labels" in given or "shift_labels" in given:
        inputs |= {"labels": mine, "shift_labels": mine, "num_items_in_batch": weight.clamp(min=1)}
    return Part(inputs | ({"isograd": cut} if places.cp > 1 else {}), weight, cut)


def _refuse_unknown(given: dict[str, Any], mesh: Mesh) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items() if isinstance(tensor, Tensor)}
    unknown = sorted(given.keys() - set(KEYS))
    if unknown or "input_ids" not in given or len(set(shapes.values())) != 1 or len(shapes["input_ids"]) != 2:
        hint = did_you_mean(unknown[0], KEYS) if unknown else ""
        raise ModelError(
            "IG444",
            f"a batch that cannot be cut: {'unknown ' + ', '.join(unknown) if unknown else 'its shapes differ'}{hint}",
            seen=", ".join(f"{name} {shapes.get(name, '')}" for name in given),
            expected=f"input_ids [batch, sequence] and, of the same shape, any of {', '.join(KEYS[1:])}",
            where=mesh.where(),
        )


def _refuse_padding(real: Tensor, labels: Tensor, mesh: Mesh) -> None:
    """Padding at the end needs no mask, since no earlier token attends to it. Padding elsewhere is refused."""
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ModelError(
            "IG445",
            "padding that is not at the end of the rows",
            seen="an attention_mask in which a 1 follows a 0",
            expected="pads on the right, or packed documents by position_ids",
            fix="tokenizer.padding_side = 'right'",
            where=mesh.where(),
        )
    if bool((~real & (labels != IGNORE)).any()):
        raise ModelError(
            "IG445",
            "labels that padding would have to predict",
            seen="a label other than -100 after a token that attention_mask excludes",
            expected="-100 there",
            fix="labels = input_ids.masked_fill(attention_mask == 0, -100)",
            where=mesh.where(),
        )


def _starts(positions: Tensor | None, mask: Tensor | None, places: Places, mesh: Mesh) -> Tensor | None:
    """Where documents begin, if some row has several: wherever a position is not the previous one + 1."""
    if positions is None:
        return None
    anew = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
    if mask is not None and bool((anew & mask.bool()).any()):
        raise ModelError(
            "IG445",
            "position_ids that restart, together with an attention_mask",
            seen="both: transformers keeps documents apart by position_ids only without a mask",
            expected="packed documents without attention_mask, or one padded document per row",
            where=mesh.where(),
        )
    if mask is not None or not bool(anew.any()):
        return None
    return document_starts(places.pad(anew.cumsum(1), -1))
