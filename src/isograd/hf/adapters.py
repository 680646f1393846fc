"""LoRA, rsLoRA and DoRA (not under tp): adapters of peft, in the library's model, cut with the layers that they adapt.

Beside a projection whose outputs are cut, B is cut with it, and A is whole and owes tp, because B gives it a part of
its gradient on each rank. Beside one whose inputs are cut, A is cut with it, and B owes tp; what both give is summed
with the layer's own output. First values are functions of a parameter's name: the same under every layout.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isograd.core import rng
from isograd.core.attributes import set_attributes
from isograd.core.mesh import Mesh
from isograd.errors import ModelError, if_not_installed
from isograd.hf.initial_values import Folder, Random

NAME = "default"  # of the adapter, as peft has it
RANK = 4  # of the adapters of a small copy
# Fields of a LoraConfig that may have any value. Every other field must have its default.
FREE = ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora",
        "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
        "loftq_config", "runtime_config", "use_dora")  # fmt: skip
STARTS = (True, "gaussian")


@dataclass(frozen=True)
class Adapters:
    """What a checkpoint and an export must know of a model's adapters."""

    config: dict[str, Any]  # of peft
    scales: dict[str, float]  # by the name of the adapted layer


def insert(model: Any, adapter: Any, dtype: torch.dtype, mesh: Mesh) -> None:
    """Put adapters into a model whose parameters are on the meta device; everything else is frozen."""
    peft = refuse_adapter(adapter, mesh)
    tied = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m for p in m.parameters()}
    peft.inject_adapter_in_model(adapter, model, adapter_name=NAME, low_cpu_mem_usage=True)
    scales = {}
    for name, module in model.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        base = module.base_layer
        if not isinstance(base, nn.Linear) or any(id(p) in tied for p in base.parameters()):
            raise _refusal(f"an adapter of {name}, a {type(base).__name__}", "linear layers but for the head", mesh)
        parts = [module.lora_A[NAME], module.lora_B[NAME]]
        for part in [*parts, module.lora_magnitude_vector[NAME]] if adapter.use_dora else parts:
            made = torch.empty(part.weight.shape, dtype=dtype, device="meta")
            part.weight = nn.Parameter(made)
        scales[name] = float(module.scaling[NAME])
    values = json.loads(json.dumps(adapter.to_dict(), default=lambda v: sorted(v) if isinstance(v, set) else str(v)))
    model._isograd_adapters = Adapters(values, scales)


def need_peft(mesh: Mesh) -> Any:
    """The package peft, or how to install it."""
    said = {"seen": "no module named 'peft'", "expected": "peft beside transformers", "fix": "pip install peft"}
    where = mesh.describe_rank()
    with if_not_installed(lambda _: ModelError("IG473", "adapters need the package peft", **said, where=where)):
        import peft
    return peft


def refuse_adapter(adapter: Any, mesh: Mesh) -> Any:
    """Refuse what is no plain LoRA; gives the package peft."""
    peft = need_peft(mesh)
    if not isinstance(adapter, peft.LoraConfig):
        raise _refusal(f"a {type(adapter).__name__}", "a peft.LoraConfig", mesh)
    plain = peft.LoraConfig()
    other = [
        f"{field.name}={getattr(adapter, field.name)!r}"
        for field in dataclasses.fields(adapter)
        if field.name not in FREE and getattr(adapter, field.name) != getattr(plain, field.name, None)
    ]
    if adapter.init_lora_weights not in STARTS:
        other.append(f"init_lora_weights={adapter.init_lora_weights!r}")
    if other:
        raise _refusal(", ".join(other), f"LoRA or DoRA, with init_lora_weights one of {STARTS}", mesh)
    if adapter.use_dora and mesh.size("tp") > 1:
        raise _refusal(
            f"use_dora=True under {str(mesh.layout)!r}", "DoRA without tp: it takes norms of whole rows", mesh
        )
    return peft


def without_adapters(model: nn.Module) -> AbstractContextManager[None]:
    """Forwards in here are those of the model that the adapters were put into."""
    adapted = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    return set_attributes(*adapted, _disable_adapters=True)


def smaller(adapter: Any) -> Any:
    """The same adapter for the small copy of a model, whose layers have other numbers."""
    if adapter is None:
        return None
    return dataclasses.replace(
        adapter,
        r=min(adapter.r, RANK),
        lora_dropout=0.0,  # a layout and one device draw unlike masks
        layers_to_transform=None,
        layers_pattern=None,
        rank_pattern={},
        alpha_pattern={},
    )


class AdapterValues:
    """First values of a model with adapters: of its own parameters, from the source; of adapters, as peft has them."""

    def __init__(self, source: Random | Folder, model: nn.Module, adapter: Any, seed: int, noise: float) -> None:
        self.source, self.seed, self.noise, self.gaussian = source, seed, noise, adapter.init_lora_weights == "gaussian"
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if ".lora_" in name}
        adapted = {n: m.base_layer.weight for n, m in model.named_modules() if hasattr(m, "base_layer")}
        self.bases = {name: tuple(weight.shape) for name, weight in adapted.items()}  # of the weights beside them

    def __call__(self, name: str, box: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """A box of the parameter of this name."""
        if name not in self.shapes:
            return self.source(name.replace(".base_layer.", "."), box, device)
        whole = torch.zeros(self.shapes[name])
        draws = torch.Generator().manual_seed(rng.key(self.seed, name).seed)
        if ".lora_magnitude_vector." in name:  # of DoRA: the norm of each row, as B is 0
            layer = name.partition(".lora_magnitude_vector.")[0]
            rows = self.source(f"{layer}.weight", [(0, size) for size in self.bases[layer]], torch.device("cpu"))
            whole = torch.linalg.norm(rows.to(torch.promote_types(rows.dtype, torch.float32)), dim=1)
        elif ".lora_A." in name and self.gaussian:
            whole.normal_(std=1 / len(whole), generator=draws)
        elif ".lora_A." in name:
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=draws)
        whole += self.noise * torch.randn(whole.shape, generator=draws)
        return whole[tuple(slice(*ends) for ends in box)].to(device)


def _refusal(seen: str, expected: str, mesh: Mesh) -> ModelError:
    return ModelError(
        "IG473",
        "adapters of this kind are not supported",
        seen=seen,
        expected=expected,
        fix="peft.LoraConfig(r=8, target_modules='all-linear')",
        where=mesh.describe_rank(),
    )
