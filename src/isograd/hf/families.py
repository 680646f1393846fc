"""Hugging Face weights <-> ours: GPT-2, GPT-NeoX, Llama, Mistral, SmolLM (a tied Llama), Qwen 2 and 3, Qwen3-MoE.
configs.py reads and writes their configs.

A family is a list of rules (ours, theirs, how their tensor becomes ours). Reading: each rank takes only its box of each
tensor, whatever the layout. Writing: full tensors on every rank, in the names `transformers` expects.
Only safetensors files are read; a pickled .bin can run code and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from isograd.core.contract import assemble
from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.hf.configs import model_type_of
from isograd.io.safetensors_reader import Box, SafetensorsReader
from isograd.models.config import TransformerConfig
from isograd.models.transformer import Transformer

# Buffers that older checkpoints hold among their weights.
NOT_WEIGHTS = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rule:
    """Our parameter is a view (transposed, strided) of one of their tensors; reading and writing go through it."""

    ours: str
    theirs: str
    view: View = lambda t: t
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda s: s  # of their tensor, from ours
    expert: int | None = None  # their tensor is this row of our parameter, which holds all experts


def _nth(n: int, parts: Callable[[Tensor], Sequence[Tensor]]) -> View:
    return lambda t: parts(t)[n]


def rules(config: TransformerConfig, model_type: str) -> list[Rule]:
    """How each parameter of ours is read from the tensors of a Hugging Face model of this type."""
    ours, theirs = ("score", "score") if config.score else ("head", "lm_head")
    head = [Rule(f"{ours}.weight", f"{theirs}.weight")] if config.score or not config.tied else []
    return [*{"gpt2": _gpt2, "gpt_neox": _neox}.get(model_type, _llama)(config), *head]


def _llama(config: TransformerConfig) -> Iterator[Rule]:
    yield Rule("embed.weight", "model.embed_tokens.weight")
    yield Rule("norm.weight", "model.norm.weight")
    for i in range(config.layers):
        us, them = f"blocks.{i}.", f"model.layers.{i}."
        yield Rule(f"{us}norm1.weight", f"{them}input_layernorm.weight")
        yield Rule(f"{us}norm2.weight", f"{them}post_attention_layernorm.weight")
        biases = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "out": config.out_bias}
        for (ours, bias), theirs in zip(biases.items(), ("q_proj", "k_proj", "v_proj", "o_proj"), strict=True):
            for leaf in ("weight", "bias") if bias else ("weight",):
                yield Rule(f"{us}attention.{ours}.{leaf}", f"{them}self_attn.{theirs}.{leaf}")
        if config.qk_norm:
            yield Rule(us + "attention.q_norm.weight", them + "self_attn.q_norm.weight")
            yield Rule(us + "attention.k_norm.weight", them + "self_attn.k_norm.weight")
        experts = config.experts if config.has_experts(i) else None
        if experts is not None:
            yield Rule(us + "mlp.router.weight", f"{them}mlp.gate.weight")
        for ours in ("gate", "up", "down"):
            for e in range(experts.number) if experts is not None else ():  # their files have one tensor for each
                name = f"{them}mlp.experts.{e}.{ours}_proj.weight"
                yield Rule(f"{us}mlp.experts.{ours}", name, shape=lambda s: s[1:], expert=e)
            for leaf in () if experts is not None else ("weight", "bias") if config.mlp_bias else ("weight",):
                yield Rule(f"{us}mlp.{ours}.{leaf}", f"{them}mlp.{ours}_proj.{leaf}")


def _gpt2(config: TransformerConfig) -> Iterator[Rule]:
    """Their linear weights are [inputs, outputs], and q, k, v are one tensor."""
    yield Rule("embed.weight", "transformer.wte.weight")
    yield Rule("positions.weight", "transformer.wpe.weight")
    for leaf in ("weight", "bias"):
        yield Rule(f"norm.{leaf}", f"transformer.ln_f.{leaf}")
    for i in range(config.layers):
        us, them = f"blocks.{i}.", f"transformer.h.{i}."
        for leaf in ("weight", "bias"):
            yield Rule(f"{us}norm1.{leaf}", f"{them}ln_1.{leaf}")
            yield Rule(f"{us}norm2.{leaf}", f"{them}ln_2.{leaf}")
        for n, name in enumerate("qkv"):
            yield Rule(
                f"{us}attention.{name}.weight",
                f"{them}attn.c_attn.weight",
                _nth(n, lambda t: t.t().chunk(3, 0)),
                lambda s: (s[1], 3 * s[0]),
            )
            third = _nth(n, lambda t: t.chunk(3, 0))
            yield Rule(f"{us}attention.{name}.bias", f"{them}attn.c_attn.bias", third, lambda s: (3 * s[0],))
        for ours, theirs in (("attention.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
            yield Rule(f"{us}{ours}.weight", f"{them}{theirs}.weight", lambda t: t.t(), lambda s: s[::-1])
            yield Rule(f"{us}{ours}.bias", f"{them}{theirs}.bias")


def _neox(config: TransformerConfig) -> Iterator[Rule]:
    """Their q, k, v are one tensor in which each head's three parts stand together: [heads, 3, d, hidden]."""
    yield Rule("embed.weight", "gpt_neox.embed_in.weight")
    for leaf in ("weight", "bias"):
        yield Rule(f"norm.{leaf}", f"gpt_neox.final_layer_norm.{leaf}")
    for i in range(config.layers):
        us, them = f"blocks.{i}.", f"gpt_neox.layers.{i}."
        for leaf in ("weight", "bias"):
            yield Rule(f"{us}norm1.{leaf}", f"{them}input_layernorm.{leaf}")
            yield Rule(f"{us}norm2.{leaf}", f"{them}post_attention_layernorm.{leaf}")
            if leaf == "weight" or config.qkv_bias:
                for n, name in enumerate("qkv"):
                    yield Rule(
                        f"{us}attention.{name}.{leaf}",
                        f"{them}attention.query_key_value.{leaf}",
                        _nth(n, lambda t: t.view(config.heads, 3, -1, *t.shape[1:]).unbind(1)),
                        lambda s: (3 * s[0], *s[1:]),
                    )
            if leaf == "weight" or config.out_bias:
                yield Rule(f"{us}attention.out.{leaf}", f"{them}attention.dense.{leaf}")
            yield Rule(f"{us}mlp.up.{leaf}", f"{them}mlp.dense_h_to_4h.{leaf}")
            yield Rule(f"{us}mlp.down.{leaf}", f"{them}mlp.dense_4h_to_h.{leaf}")


class WeightSource(Protocol):
    """Tensors by transformers' names, of which any part is read by itself."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of all tensors."""
        ...

    def look(self, name: str, take: View) -> Tensor:
        """A copy of what `take` picks from a tensor."""
        ...


class _StateDictReader:
    """A state dict, looked at as stored tensors are."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def look(self, name: str, take: View) -> Tensor:
        return take(self.tensors[name]).clone()


class HuggingFace:
    """A Hugging Face folder, or a state dict, as our parameters: Engine(..., weights=HuggingFace(folder, config)).

    Any part of any parameter is read by itself, so no rank holds a whole tensor, on whatever layout or ZeRO stage.
    """

    def __init__(self, source: str | Path | Mapping[str, Tensor] | WeightSource, config: TransformerConfig) -> None:
        """Raises at once, with every point, when these are not the weights of this config."""
        given = SafetensorsReader(source) if isinstance(source, str | Path) else source
        self._source: WeightSource = _StateDictReader(given) if isinstance(given, Mapping) else given
        stored = self._source.shapes
        self._places = _prefixed(list(stored), config)
        every = rules(config, model_type_of(config))
        self._rules: dict[str, list[Rule]] = {}
        for rule in every:
            self._rules.setdefault(rule.ours, []).append(rule)
        one = Mesh.unbound("1")
        self.shapes = {r.name: r.contract.shape for r in contracts(Transformer(config, one, device="meta"), one)}
        numbers = [int(match[1]) for name in self._places if (match := re.search(r"\.experts\.(\d{1,6})\.", name))]
        held, wanted = max(numbers, default=-1) + 1, config.experts.number if config.experts else 0
        wrong = [f"{held} experts are stored, the config has {wanted}"] if held != wanted else []
        for rule in {rule.theirs: rule for rule in every}.values():
            expected = rule.shape(self.shapes[rule.ours])
            if rule.theirs not in self._places:
                wrong.append(f"{rule.theirs} is missing")
            elif (found := stored[self._places[rule.theirs]]) != expected:
                wrong.append(f"{rule.theirs} is {found}, not {expected}")
        used = {rule.theirs for rule in every} | ({"lm_head.weight"} if config.tied else set())
        wrong += [f"{name} is not used" for name in self._places if name not in used and not name.endswith(NOT_WEIGHTS)]
        if wrong:
            raise ModelError(
                "IG420",
                f"these weights are not this model's ({len(wrong)} points)",
                seen="; ".join(wrong[:20]),
                expected=f"the tensors of a {model_type_of(config)} with this config",
            )

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the folder's weights hold this parameter of ours; another shape is an error."""
        if name in self.shapes and self.shapes[name] != shape:
            raise ModelError("IG423", name=name, shape=shape, stored=self.shapes[name])
        return name in self._rules

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """A copy of the box of one of our parameters."""
        rules = self._rules[name]
        if rules[0].expert is None:
            return self._source.look(self._places[rules[0].theirs], partial(_box_of, rules[0], shape, box))
        inner = tuple(slice(start, stop) for start, stop in box[1:])
        parts = [self._source.look(self._places[rule.theirs], lambda t: t[inner]) for rule in rules[slice(*box[0])]]
        return torch.stack(parts) if parts else torch.empty(0, *(stop - start for start, stop in box[1:]))


def _box_of(rule: Rule, shape: tuple[int, ...], box: Box, theirs: Tensor) -> Tensor:
    """Of their tensor. Where their rows are our rows grouped by head, ours are picked one by one."""
    view = rule.view(theirs)
    parts = tuple(slice(start, stop) for start, stop in box)
    if view.shape == shape:
        return view[parts]
    rows = torch.unravel_index(torch.arange(*box[0]), view.shape[: view.dim() - len(shape) + 1])
    return view[rows][(slice(None), *parts[1:])]


@torch.no_grad()
def load_hf(model: Transformer, source: str | Path | Mapping[str, Tensor]) -> None:
    """Fill the model from a directory of safetensors or a state dict. Every rank takes its box of each tensor."""
    weights = HuggingFace(source, model.config)
    for record in contracts(model, model.mesh):
        part = weights.read(record.name, record.contract.shape, record.contract.local(model.mesh))
        record.parameter.copy_(part)


def _prefixed(names: list[str], config: TransformerConfig) -> dict[str, str]:
    """{name as transformers has it now: name in the source}. Published NeoX weights call the head embed_out, and
    checkpoints of a bare body (GPT-2's own, for one) leave out the first part of every name."""
    prefix = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}.get(model_type_of(config), "model.")
    now = {name.replace("embed_out.", "lm_head."): name for name in names}
    if any(name.startswith(prefix) for name in now):
        return now
    return {name if name.startswith("lm_head") else prefix + name: place for name, place in now.items()}


@torch.no_grad()
def to_hf(model: Transformer, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Full weights (or other tensors by our names, such as gradients) in Hugging Face names. All ranks take part."""
    if tensors is None:
        table = contracts(model, model.mesh)
        tensors = {r.name: assemble(r.parameter.detach(), r.contract, model.mesh) for r in table}
    done: dict[str, Tensor] = {}
    for rule in rules(model.config, model_type_of(model.config)):
        part = tensors[rule.ours] if rule.expert is None else tensors[rule.ours][rule.expert]
        if rule.theirs not in done:
            done[rule.theirs] = part.new_zeros(rule.shape(tuple(tensors[rule.ours].shape)))
        place = rule.view(done[rule.theirs])
        place.copy_(part.reshape(place.shape))
    return done
