"""Hugging Face causal language models, unmodified, on sequences cut over cp.

A decoder's tokens are mixed by attention only, and transformers lets its function be chosen by name. Ours is
`attention` below. It keeps no state: what it must know of a batch (a `SequenceCut`) is a keyword that travels through
the model's own layers. So recompute, several forwards before a backward, and several models with several meshes all get
the right one. A layer that gets none raises an error instead of attending to the local tokens.

The loss of a part is the sum over its labels / max(1, their number): 0 instead of 0 / 0 on a rank without labels. That
rank still runs backward, because other ranks' queries attended to its keys.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.hf.probe_cp import NAME, TRIAL, probe_cp, trial_mask
from isograd.sequence import whole
from isograd.sequence.attend import attend, heads_here, refuse_unlike
from isograd.sequence.token_layout import TokenLayout

# Keywords that transformers passes to attention and that attention does not need.
UNUSED = ("position_ids", "use_cache", "labels", "shift_labels", "num_items_in_batch", "output_hidden_states",
          "return_dict", "cache_position", "margin")  # fmt: skip


@dataclass(frozen=True, eq=False)
class SequenceCut:
    """How one batch is cut: all that attention must know about it."""

    mesh: Mesh
    places: TokenLayout
    starts: Tensor | None  # [b, padded]: start of each token's document; None: one document per row
    given: tuple[Tensor, ...]  # the whole batch, for the comparison of ranks

    @cached_property
    def bounds(self) -> Tensor | None:
        """Asked once for all layers."""
        return whole.document_bounds(self.starts)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, window: int | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """q [b, heads, local, d]; k, v [b, kv_heads, local, d], of my tokens -> [b, local, heads, d].

        window: how many tokens each sees, itself included. softcap: scores become softcap * tanh(scores / softcap).
        """
        where = self.mesh.describe_rank()
        if mask is not None:
            raise ModelError(
                "IG442", "the model made its own attention mask", seen=f"a mask {tuple(mask.shape)}",
                expected="none: a mask over this rank's tokens does not cover the other ranks' tokens", where=where,
            )  # fmt: skip
        window = None if window is None or window >= self.places.length else window
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

        def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = whole.attention(
                q, k, v, scale=scale, window=window, softcap=softcap, starts=self.starts, bounds=self.bounds
            )
            return y.transpose(1, 2)

        return attend(full_attention, q, k, v, self.mesh, self.places, self.starts, scale, window, softcap)


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
    softcap: float | None = None,
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
            expected="causal softmax attention, heads of one size, no dropout, sinks or biases of its own",
            fix="turn it off in the config if possible; without cp the model trains as it is",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return isograd.attend(query, key, value, scale, attention_mask, sliding_window, softcap), None


def attach_attention(model: Any, mesh: Mesh, tried: Any) -> None:
    """Give a model of transformers the attention above, after a trial that nothing else in it mixes tokens. With a mesh
    without cp, it gets its own attention back.

    tried: the model, or a whole small copy of it. Of one that scores rows its base is attached.
    """
    handles, own = model.__dict__.pop("_isograd_attached", ((), None))
    model.cuts_batches = mesh.size("cp") > 1 and mesh.size("pp") == 1  # a pipeline is given the parts
    for handle in handles:
        handle.remove()
    if handles:
        model.set_attn_implementation(own)
    if mesh.size("cp") == 1:
        return
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    if isinstance(heads, int):
        here = heads // mesh.size("tp")
        heads_here(here, here, mesh)  # refuses too few
    configs, own = _register_and_try(model, tried)
    gate = _Gate(mesh, configs)
    base: Any = base_of(model)
    handles = [base.register_forward_pre_hook(gate.check, with_kwargs=True)]
    for module in base.modules():
        if getattr(module, "rope_type", None) == "longrope":
            handles.append(module.register_forward_pre_hook(gate.add_last_position, with_kwargs=True))
            handles.append(module.register_forward_hook(gate.drop_last_position))
    model._isograd_attached = (handles, own)


def _register_and_try(model: Any, tried: Any) -> tuple[list[Any], str]:
    """The model's configs, which now name our attention, and the name of its previous attention."""
    name = type(model).__name__
    if not hasattr(model, "set_attn_implementation"):
        raise ModelError("IG441", seen="a module without set_attn_implementation", name=name)
    from transformers import AttentionInterface, AttentionMaskInterface

    for known in (NAME, TRIAL):
        AttentionInterface.register(known, attention)
    AttentionMaskInterface.register(TRIAL, trial_mask)  # under NAME none is made at all
    configs, own = _own_configs(model), model.config._attn_implementation
    try:
        probe_cp(base_of(tried) if scores_rows(tried) else tried)
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


def scores_rows(model: Any) -> bool:
    """Whether a model of transformers, with adapters or without, ends in a score of each row's last token."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

    inner: Any = without_adapters(model)
    library: Any = CLASSES.get(type(inner.config), None) if hasattr(inner, "score") else None
    return library is not None and library is type(inner)


def without_adapters(model: Any) -> Any:
    """The model of transformers in one of peft's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def base_of(model: Any) -> Any:
    """The layers below a model's head."""
    inner = without_adapters(model)
    return getattr(inner, "base_model", inner)


@dataclass(eq=False)
class _Gate:
    """Hooks of an attached model."""

    mesh: Mesh
    configs: list[Any]
    cut: SequenceCut | None = None  # of the running forward

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each call. At the first one, ranks compare the batches they were given."""
        mesh, cut, first = self.mesh, kwargs.get("isograd"), self.cut is None
        if not isinstance(cut, SequenceCut):
            raise _no_part(f"keywords {sorted(n for n, v in kwargs.items() if v is not None)}", mesh)
        if cut.mesh.layout != mesh.layout:
            raise _no_part(f"a part for {str(cut.mesh.layout)!r}; the model is attached to {str(mesh.layout)!r}", mesh)
        if kwargs.get("attention_mask") is not None or len(args) > 1:
            raise _no_part("an attention_mask or positional arguments beside the part", mesh)
        if any(config._attn_implementation != NAME for config in self.configs):
            raise _no_part("another attention than attach gave the model", mesh)
        ids = kwargs.get("input_ids")
        if ids is not None and ids.shape[1] != cut.places.local:
            raise _no_part(f"{ids.shape[1]} tokens per row; the part has {cut.places.local}", mesh)
        if first:
            refuse_unlike(cut.mesh, *cut.given)  # attached, perhaps, to one whose connections a failure has closed
        self.cut = cut

    def add_last_position(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of rotary angles that depend on the largest position of a batch, which may be on another rank."""
        assert self.cut is not None
        x, positions = (*args, *kwargs.values())[:2]
        largest = self.cut.given[2].max().to(positions).expand(len(positions), 1)
        return (x, torch.cat((positions, largest), 1)), {}

    def drop_last_position(self, module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> Any:
        """(cos, sin) of this rank's tokens."""
        return tuple(half[:, :-1] for half in output)


def _no_part(seen: str, mesh: Mesh | None = None) -> ModelError:
    return ModelError(
        "IG443",
        "a model that is attached to a cp mesh was called without a part",
        seen=seen,
        expected="part = isograd.hf.shard(batch, mesh); model(**part.inputs)",
        fix="to generate, call attach(model, mesh) with a mesh without cp first: it restores the model's own attention",
        where=mesh.describe_rank() if mesh else None,
    )
