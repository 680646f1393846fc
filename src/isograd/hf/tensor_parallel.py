"""Cuts a model of transformers over tp by its own tensor plan: its parameters, with contracts, and hooks around them.

    style                            parameters                    hooks (styles.py)
    colwise                          dim 0 cut                     Entrance
    colwise_gather_output            dim 0 cut                     Entrance, GatherHook
    rowwise                          dim 1 cut, bias whole         SumHook
    rowwise_split_input              dim 1 cut, bias whole         SliceHook, SumHook
    embedding_rowwise                dim 0 cut                     VocabRows
    embedding_colwise                dim 1 cut                     GatherHook
    replicated_with_grad_allreduce   whole, owes tp
    moe_tp_experts                   dim 0 cut: whole experts      ExpertRange
    mla_kv_a_proj                    whole                         SharedTail
    all_reduce                                                     Total
    ep_dispatch_experts              dim 0 cut over ep             Exchange (expert_parallel.py)

Key and value heads fewer than tp ranks are replicas with a debt ("tp/2"). What has no entry is whole, and computed on
every rank from equal values, so that it owes nothing. All of this happens on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isograd.comm.group import even_sizes
from isograd.core.contract import Shard, contract_of, declare, metadata_of, set_metadata
from isograd.core.input_checks import IdCheck
from isograd.core.mesh import DATA, EXPERT_DATA, Mesh
from isograd.errors import ModelError
from isograd.hf import styles
from isograd.hf.adapters import NAME
from isograd.hf.expert_parallel import DISPATCHED, deal_out, dispatched, number_of, shard_of, without_experts
from isograd.hf.fused_head_loss import FusedHeadLoss
from isograd.hf.sequence_parallel import Sequences, register, sequences_of
from isograd.hf.sub_configs import text_of
from isograd.hf.tp_plan import CLOSED, CUTS, EXPERTS, is_below, names_of_towers, read_plan, without_split_ties

QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "num_query_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
OF_KEYS = ("k_proj", "v_proj", ".key", ".value")  # the ends of the names of projections to key and value heads
OF_ATTENTION = ("head_dim", "head_size", "num_key_value_groups", "qk_head_dim", *QUERY_HEADS)


def cut(model: nn.Module, mesh: Mesh, joined: FusedHeadLoss | None = None) -> None:
    """Cut a model whose parameters are on the meta device. With one tp rank and one ep rank it stays as it is.

    joined: the loss function of a model whose logits need not be gathered.
    """
    if mesh.size("tp") == 1 and mesh.size("ep") == 1:
        return
    plan: dict[str, str] = {}
    experts = dispatched(model, mesh) if mesh.size("ep") > 1 else []
    if mesh.size("tp") > 1:
        _refuse_dropout(model, mesh)
        plan = without_split_ties(model, without_experts(read_plan(model, mesh), experts), mesh)
    sequences = sequences_of(model, plan, experts, mesh)
    plan = {n: style for n, style in plan.items() if not (style in CLOSED and sequences.are_cut(n))}
    cutter = _Cutter(model, mesh, plan, joined, sequences)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    for name in experts:
        cutter.over_ep(name, modules[name])
    for name, style in plan.items():
        if name in parameters:
            cutter.bare(name, style)
        elif style != "replicated_with_grad_allreduce":
            cutter.module(name, modules[name], style)
        else:
            for module in modules[name].modules():
                for leaf in module._parameters:
                    cutter.replace(module, leaf, None, partial_over=("tp",))
    register(model, sequences, mesh)
    for name, module in modules.items():
        if sequences.are_cut(name):
            cutter.declare_partial(module)
        if own := [p for p in module.parameters(recurse=False) if contract_of(p) is not None]:
            module._isograd_marks = Marks(own)


class Marks:
    """Keeps the contracts of a module's parameters in a deep copy of it, where torch drops them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> Marks:
        copies = [copy.deepcopy(parameter, memo) for parameter in self.parameters]
        for parameter, made in zip(self.parameters, copies, strict=True):
            set_metadata(made, metadata_of(parameter))
        return Marks(copies)


@dataclass(frozen=True)
class _Heads:
    """How many heads an attention has on one device."""

    count: int
    keys: int  # key and value heads
    sizes: tuple[int, ...]  # query heads on each rank


class _Cutter:
    def __init__(
        self, model: Any, mesh: Mesh, plan: dict[str, str], joined: FusedHeadLoss | None, sequences: Sequences
    ) -> None:
        self.model, self.mesh, self.tp, self.plan = model, mesh, mesh.size("tp"), plan
        self.joined, self.sequences = joined, sequences
        self.made: dict[int, nn.Parameter] = {}  # by the id of the whole parameter, which lives as long as `old`
        self.old: list[nn.Parameter] = []
        self.entrances: dict[str, styles.Entrance] = {}
        self.heads: dict[str, _Heads | None] = {}

    def replace(
        self, module: nn.Module, leaf: str, shard: Shard | None, partial_over: tuple[str, ...] = (), data: str = DATA
    ) -> None:
        """Put this rank's part in the place of a whole parameter."""
        old = module._parameters.get(leaf)
        if old is None:
            return
        if id(old) not in self.made:
            shape = list(old.shape)
            if shard is not None:
                start, stop = shard.ranges[self.mesh.index(shard.axis)]
                shape[shard.dim] = stop - start
            part = nn.Parameter(torch.empty(shape, dtype=old.dtype, device="meta"), requires_grad=old.requires_grad)
            shards = () if shard is None else (shard,)
            declare(part, self.mesh, shape=tuple(old.shape), shards=shards, partial_over=partial_over, data=data)
            self.made[id(old)] = part
            self.old.append(old)
        module._parameters[leaf] = self.made[id(old)]

    def declare_partial(self, module: nn.Module) -> None:
        """What is whole in a module, used on a part of the sequences or of the heads, owes its sum over tp."""
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None and contract_of(parameter) is None:
                self.replace(module, leaf, None, partial_over=("tp",))

    def bare(self, name: str, style: str) -> None:
        """A parameter that no module of its own computes with, such as the sinks of an attention."""
        home, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(home)
        parameter = module._parameters[leaf]
        assert parameter is not None
        if style == "replicated_with_grad_allreduce":
            self.replace(module, leaf, None, partial_over=("tp",))
        elif style == "colwise":  # of a stack of matrices, each one's outputs
            dim = max(0, parameter.dim() - 2)
            heads = self._attention(home) if dim == 0 else None
            self.replace(module, leaf, self._whole_heads(name, parameter.shape[dim], dim, heads))
        elif style == "rowwise":
            if parameter.dim() > 1:
                self.replace(module, leaf, self._even(name, parameter.shape[-1], parameter.dim() - 1))
        else:
            raise self._unsupported(name, style, f"a parameter {tuple(parameter.shape)}")

    def module(self, name: str, module: Any, style: str) -> None:
        """Cut its parameters and register its hooks."""
        mesh, own = self.mesh, list(module.named_parameters(recurse=False))
        if style == EXPERTS:
            self._experts(name, module)
        elif style == "all_reduce":
            hooks = styles.Total(mesh, self._region(name, name))
            if any(f"{name}.{leaf}" in self.plan for leaf, _ in own):
                module.register_forward_pre_hook(hooks.before, with_kwargs=True)
            module.register_forward_hook(hooks.after)
        elif style == "mla_kv_a_proj":
            config = text_of(self.model.config)
            tail = getattr(config, "qk_rope_head_dim", None)
            if not isinstance(tail, int):
                raise self._unsupported(name, style, f"{type(config).__name__} without qk_rope_head_dim")
            if not self.sequences.are_cut(name):
                module.register_forward_hook(styles.SharedTail(mesh, tail).after)
        elif style in ("embedding_rowwise", "embedding_colwise"):
            if not isinstance(module, nn.Embedding) or module.max_norm is not None:
                raise self._unsupported(name, style, f"a {type(module).__name__}")
            self._embedding(name, module, style)
        elif not isinstance(getattr(module, "base_layer", module), nn.Linear):
            raise self._unsupported(name, style, f"a {type(module).__name__}")
        elif CUTS[style] == 0:
            self._columns(name, module, gather=style != "colwise")
        else:
            self._rows(name, module, split=style != "rowwise")

    def _columns(self, name: str, module: Any, gather: bool) -> None:
        parent = name.rpartition(".")[0]
        heads = None if gather else self._attention(parent)
        linear = getattr(module, "base_layer", module)
        shard, partial_over = self._of_heads(name, linear.out_features, heads)
        for leaf in ("weight", "bias"):
            self.replace(linear, leaf, shard, partial_over)
        if linear is not module:
            self.replace(module.lora_A[NAME], "weight", None, partial_over=("tp",))
            self.replace(module.lora_B[NAME], "weight", shard, partial_over)
        self._enter(name, module)
        if gather and self.joined is not None and module is self.model.get_output_embeddings():
            self.joined.register(self.model, module, _sizes(shard))
        elif gather:
            module.register_forward_hook(styles.GatherHook(self.mesh, _sizes(shard)).after)
        else:
            linear.out_features = _sizes(shard)[self.mesh.index("tp")]

    def _rows(self, name: str, module: Any, split: bool) -> None:
        heads = None if split else self._attention(name.rpartition(".")[0])
        linear = getattr(module, "base_layer", module)
        shard = self._whole_heads(name, linear.in_features, 1, heads)
        self.replace(linear, "weight", shard)
        if linear is not module:
            self.replace(module.lora_A[NAME], "weight", shard)
            self.replace(module.lora_B[NAME], "weight", None, partial_over=("tp",))
        if split:
            module.register_forward_pre_hook(styles.SliceHook(self.mesh, _sizes(shard)).before, with_kwargs=True)
        summed = styles.SumHook(self.mesh, self._region(name, name.rpartition(".")[0]))
        module.register_forward_pre_hook(summed.before)
        module.register_forward_hook(summed.after, always_call=True)
        linear.in_features = _sizes(shard)[self.mesh.index("tp")]

    def _enter(self, name: str, module: nn.Module) -> None:
        parent = name.rpartition(".")[0]
        if is_below(parent, self.sequences.entered):  # it gathers sequences, or is inside of one that does
            return
        if parent not in self.entrances:
            self.entrances[parent] = styles.Entrance(self.mesh, self.sequences.are_cut(parent))
            above = self.model.get_submodule(parent)
            above.register_forward_hook(self.entrances[parent].forget, always_call=True)
        module.register_forward_pre_hook(self.entrances[parent].before, with_kwargs=True)

    def _region(self, name: str, region: str) -> bool:
        """Whether a cut region begins and ends with parts of sequences."""
        gathered = any(region.startswith(f"{entered}.") for entered in self.sequences.entered)
        if gathered and self.sequences.are_cut(name):
            raise self._unsupported(name, self.plan[name], "a cut region within another, under sp")
        return self.sequences.are_cut(name)

    def _embedding(self, name: str, module: Any, style: str) -> None:
        if style == "embedding_colwise":
            shard = self._even(name, module.embedding_dim, dim=1)
            self.replace(module, "weight", shard)
            module.register_forward_hook(styles.GatherHook(self.mesh, _sizes(shard)).after)
            return
        shard = self._even(name, module.num_embeddings)
        first, stop = shard.ranges[self.mesh.index("tp")]
        self.replace(module, "weight", shard)
        for inner in module.modules():  # such as a norm: it is given this rank's tokens only
            for leaf in inner._parameters if inner is not module else ():
                self.replace(inner, leaf, None, partial_over=("tp",))
        module.wrong = IdCheck("token ids", module.num_embeddings)
        pad = module.padding_idx
        module.padding_idx = pad - first if pad is not None and first <= pad < stop else None
        module.num_embeddings = stop - first
        hooks = styles.VocabRows(self.mesh, first, stop - first)
        module.register_forward_pre_hook(hooks.before, with_kwargs=True)
        module.register_forward_hook(hooks.after)

    def over_ep(self, name: str, module: Any) -> None:
        """Whole experts on each rank of ep; tokens come to them."""
        number = number_of(name, module, self.mesh, DISPATCHED)
        shard = shard_of(name, number, "ep", self.mesh)
        for leaf in list(module._parameters):
            self.replace(module, leaf, shard, data=EXPERT_DATA)
        deal_out(module, number, self.mesh)

    def _experts(self, name: str, module: Any) -> None:
        number = number_of(name, module, self.mesh, EXPERTS)
        shard = shard_of(name, number, "tp", self.mesh)
        for leaf in list(module._parameters):
            self.replace(module, leaf, shard)
        module.num_experts = number // self.tp
        module._is_expert_parallel = True
        hooks = styles.ExpertRange(self.mesh, module.num_experts, self._region(name, name))
        module.register_forward_pre_hook(hooks.before, with_kwargs=True)
        module.register_forward_hook(hooks.after, always_call=True)

    def _attention(self, name: str) -> _Heads | None:
        """The heads of a module that is an attention. The first time, its own counts become this rank's."""
        if name in self.heads:
            return self.heads[name]
        module: Any = self.model.get_submodule(name)
        config = getattr(module, "config", None) or text_of(self.model.config)
        self.heads[name] = None
        if not any(isinstance(getattr(module, attribute, None), int) for attribute in OF_ATTENTION):
            return None
        count = _number(module, QUERY_HEADS) or _number(config, QUERY_HEADS)
        if count is None:
            return None
        groups = _number(module, ("num_key_value_groups",))
        keys = _number(module, KEY_HEADS) or (count // groups if groups else _number(config, KEY_HEADS)) or count
        what = f"the {count} heads of {name}, with {keys} key and value heads,"
        if keys > self.tp and keys % self.tp:  # some ranks have one key head more, with its query heads
            if count % keys or self.mesh.size("cp") > 1:
                raise self._indivisible(what, "a tp that divides them; without cp, key heads that divide the others do")
        elif count % self.tp or (keys < self.tp and self.tp % keys):
            raise self._indivisible(
                what, "a tp that divides the heads, and is below the key heads or a multiple of them"
            )
        dealt = even_sizes(keys, self.tp) if keys > self.tp else (1,) * self.tp
        sizes = tuple(count * size // sum(dealt) for size in dealt)
        heads = self.heads[name] = _Heads(count, keys, sizes)
        here, keys_here = sizes[self.mesh.index("tp")], dealt[self.mesh.index("tp")]
        known = {**dict.fromkeys(QUERY_HEADS, here), **dict.fromkeys(KEY_HEADS, keys_here)}
        for attribute, mine in {**known, "num_key_value_groups": here // keys_here}.items():
            if isinstance(getattr(module, attribute, None), int):
                setattr(module, attribute, mine)
        return heads

    def _of_heads(self, name: str, length: int, heads: _Heads | None) -> tuple[Shard, tuple[str, ...]]:
        """The rows of whole heads. Heads fewer than ranks are held by several, which owe one another their sums."""
        if heads is None:
            return self._even(name, length), ()
        number = heads.keys if name.endswith(OF_KEYS) else heads.count
        if length % number:
            raise self._indivisible(f"{name} of {length}", f"a multiple of its {number} heads")
        if number >= self.tp:
            return self._whole_heads(name, length, 0, heads), ()
        copies, width = self.tp // number, length // number
        ranges = tuple((rank // copies * width, (rank // copies + 1) * width) for rank in range(self.tp))
        return Shard("tp", 0, ranges), (f"tp/{copies}",)

    def _whole_heads(self, name: str, length: int, dim: int, heads: _Heads | None) -> Shard:
        """The features of each rank's heads. Groups of heads that tp does not divide are dealt out unevenly."""
        if heads is None:
            return self._even(name, length, dim)
        if any(length * size % heads.count for size in heads.sizes):
            raise self._indivisible(f"{name} of {length}", f"as many features for each of its {heads.count} heads")
        stops = [length * sum(heads.sizes[: rank + 1]) // heads.count for rank in range(self.tp)]
        return Shard("tp", dim, tuple(zip([0, *stops[:-1]], stops, strict=True)))

    def _even(self, name: str, length: int, dim: int = 0) -> Shard:
        if length < self.tp:
            raise self._indivisible(f"{name} of {length}", f"a multiple of {self.tp}")
        return Shard.even("tp", dim, length, self.tp)

    def _indivisible(self, what: str, expected: str) -> ModelError:
        return ModelError(
            "IG465", seen=str(self.mesh.layout), expected=expected, where=self.mesh.describe_rank(), what_is_cut=what,
            axis="tp", size=self.tp,
        )  # fmt: skip

    def _unsupported(self, name: str, style: str, seen: str) -> ModelError:
        return ModelError("IG464", seen=seen, where=self.mesh.describe_rank(), style=style, name=name)


def _number(holder: Any, names: Iterable[str]) -> int | None:
    for name in names:
        try:
            found = getattr(holder, name, None)
        except Exception:  # a config whose layers differ refuses to be asked for the number of all
            continue
        if isinstance(found, int) and found > 0:
            return found
    return None


def _sizes(shard: Shard) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in shard.ranges)


def dropouts(module: nn.Module) -> dict[str, float]:
    """The rates of a module's own dropout, or of its attention's, by the names of their attributes."""
    of_dropout = "Dropout" in type(module).__name__
    rates = {name: value for name, value in vars(module).items() if isinstance(value, float) and value > 0}
    return {name: rate for name, rate in rates.items() if "dropout" in name or (name == "p" and of_dropout)}


def _refuse_dropout(model: nn.Module, mesh: Mesh) -> None:
    """Ranks of a tp group would draw different masks for the same features, and equal ones for different heads."""
    towers = names_of_towers(model)
    found = [
        f"{name or type(module).__name__}.{attribute}={rate}"
        for name, module in model.named_modules()
        for attribute, rate in (dropouts(module) if not is_below(name, towers) else {}).items()
    ]
    if found:
        raise ModelError(
            "IG466",
            "a model with dropout is not cut over tp: ranks of a tp group would draw unlike masks",
            seen=f"{found[:4]}{' ...' if len(found) > 4 else ''}",
            expected="dropout 0",
            fix="set the dropouts of the config to 0, as models are trained today; or leave tp out",
            where=mesh.describe_rank(),
        )
