"""The tensor plan of a model of transformers, name by name, and what in it cannot be used.

A plan is the class's own (`base_model_tp_plan` of its config, and `_tp_plan` of its head), in patterns in which `*` is
the number of a layer. A pattern for a module also stands for the module's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from isograd.core.mesh import Mesh
from isograd.errors import ModelError, did_you_mean
from isograd.hf.sub_configs import towers_of

# The dimension of a matrix that each style cuts.
CUTS = {
    "colwise": 0, "colwise_gather_output": 0, "colwise_rep": 0, "embedding_rowwise": 0, "embedding_colwise": 1,
    "rowwise": 1, "rowwise_split_input": 1, "rowwise_rep": 1,
}  # fmt: skip
# Styles whose module takes and gives whole tensors: it may stay whole without anything else changing.
CLOSED = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "embedding_rowwise",
          "embedding_colwise")  # fmt: skip
EXPERTS = "moe_tp_experts"
OTHERS = ("replicated_with_grad_allreduce", "all_reduce", "mla_kv_a_proj", EXPERTS, "local_params", "replicate")
KNOWN = (*CUTS, *OTHERS)

NORMS_OF_HEADS: dict[str, str | None] = {
    f"model.language_model.layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"
}
# What the plans of transformers 5.23 leave out or cut wrongly, found by the proof. None: whole.
CORRECTED: dict[str, dict[str, str | None]] = {
    # Parameters of the activation between two cut projections.
    "apertus": {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    # Norms over the features of all heads between the projections and the heads, which a rank does not have.
    "esmc": {f"esmc.layers.*.self_attn.{name}_proj": None for name in "qkvo"},
    # Embeddings for all key heads are added to the values.
    "neomme": {
        f"model.layers.*.self_attn.{name}_proj": None
        for name in ("q", "k", "v", "output_projection.gate", "output_projection.o")
    },
    # Norms of heads, of which each rank has some.
    "qwen3_omni_moe_thinker": NORMS_OF_HEADS,
    "qwen3_vl_moe": NORMS_OF_HEADS,
    # The mask is made of all key heads' values.
    "doge": {f"model.layers.*.self_attn.{name}_proj": None for name in ("q", "k", "v", "dt", "o")},
    # Linear attention, whose own projections are whole, has an output projection of the same name.
    "glm5_next": {
        f"model.language_model.layers.*.self_attn.{name}": None
        for name in ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    },
    # Experts whose forward does not leave out what other ranks' experts compute.
    "step3p7": {"model.language_model.layers.*.mlp.experts": None},
    "nemotron_h": {"model.layers.*.mixer.experts": None},
    "llama4_text": {"model.layers.*.feed_forward.experts": None},
    "longcat_flash": {"model.layers.*.mlp.experts": None, "model.layers.*.mlp.experts.identity_expert": None},
    # The activation uses the mean and the deviation of all inner features.
    "gemma3n_text": {f"model.layers.*.mlp.{name}_proj": None for name in ("gate", "up", "down")},
}


def pattern_of(name: str) -> str:
    """'model.layers.3.mlp' -> 'model.layers.*.mlp'."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def names_of_towers(model: Any) -> list[str]:
    """The parts of a model that no text passes through: those for images and sounds. They stay whole."""
    kinds = {type(part) for part in towers_of(model.config)}
    return [n for n, module in model.named_modules() if n and type(getattr(module, "config", None)) in kinds]


def is_below(name: str, homes: Iterable[str]) -> bool:
    """Whether a name is that of one of these modules, or of something in it."""
    return any(name == home or name.startswith(f"{home}.") for home in homes)


def read_plan(model: Any, mesh: Mesh) -> dict[str, str]:
    """{module or parameter: style}; a style without effect is left out."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    corrected = CORRECTED.get(model.config.model_type, {}) if plan else {}
    plan = {n: style for n, style in {**plan, **corrected}.items() if style is not None}
    plan = {n: style for n, style in plan.items() if corrected.get(n.rpartition(".")[0], style) is not None}
    name = type(model).__name__
    if not plan:
        raise ModelError(
            "IG463", seen=f"neither base_model_tp_plan in {type(model.config).__name__} nor _tp_plan",
            where=mesh.describe_rank(), name=name, size=mesh.layout.world_size,
        )  # fmt: skip
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    towers = names_of_towers(model)
    names = [n for n in [n for n, _ in model.named_modules() if n] + sorted(parameters) if not is_below(n, towers)]
    found = {n: plan[pattern_of(n)] for n in names if pattern_of(n) in plan}
    experts = {n for n, style in found.items() if style == EXPERTS}
    inside = {n for n in parameters if n.rpartition(".")[0] in experts}  # a layer of experts is cut as a whole
    found = {n: style for n, style in found.items() if n not in inside}
    unknown = {n: style for n, style in found.items() if style not in KNOWN}
    if unknown:
        where, style = next(iter(unknown.items()))
        raise ModelError(
            "IG464", seen=f"{where}: {style}{did_you_mean(style, KNOWN)}", expected=f"one of {', '.join(KNOWN)}",
            where=mesh.describe_rank(), style=style, name=name,
        )  # fmt: skip
    if not any(style in CUTS or style == EXPERTS for style in found.values()):
        raise ModelError(
            "IG463", seen=f"{sorted(plan)[:6]}, and names such as {[pattern_of(n) for n in sorted(parameters)[:3]]}",
            where=mesh.describe_rank(), name=name, size=mesh.layout.world_size,
        )  # fmt: skip
    return {n: style for n, style in found.items() if style not in ("local_params", "replicate")}


def without_split_ties(model: nn.Module, plan: dict[str, str], mesh: Mesh) -> dict[str, str]:
    """Modules that share a parameter cut it in the same way, or not at all."""
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    plan = dict(plan)
    for names in users.values():
        homes = {name: name.rpartition(".")[0] for name in names}
        styles = {name: plan.get(name, plan.get(home)) for name, home in homes.items()}
        if len({None if style is None else CUTS.get(style) for style in styles.values()}) == 1:
            continue
        open_ones = [name for name, style in styles.items() if style in CUTS and style not in CLOSED]
        if open_ones:
            said = ", ".join(f"{name}: {style or 'whole'}" for name, style in styles.items())
            raise ModelError(
                "IG464", seen=f"modules that share a parameter cut it differently: {said}",
                expected="one way to cut it, or a style that takes and gives whole tensors",
                where=mesh.describe_rank(), style=styles[open_ones[0]], name=open_ones[0],
            )  # fmt: skip
        for name, home in homes.items():
            plan.pop(name, None)
            plan.pop(home, None)
    return plan
