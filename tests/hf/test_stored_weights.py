"""A folder as transformers writes it, with experts one by one under the hub's names, is read box by box."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.hf.build import build
from isograd.hf.initial_values import Folder
from isograd.io.safetensors_reader import SafetensorsReader
from tests.hf.test_hugging import config_of

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 11, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 6},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 12, "head_dim": 6, "n_group": 1, "topk_group": 1},
}


def saved(kind: str, folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=61, intermediate_size=32, **shape, **MIXTURES[kind])
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.medium
@pytest.mark.parametrize("kind", MIXTURES)
def test_boxes_of_each_parameter_are_those_of_the_model_that_was_saved(tmp_path: Path, kind: str) -> None:
    model = saved(kind, tmp_path)
    read = Folder(SafetensorsReader(tmp_path), model, "").read
    names = set(load_file(tmp_path / "model.safetensors"))
    assert any(".experts.3." in name for name in names) and not names & {
        name for name, _ in model.named_parameters() if ".experts." in name
    }
    for name, parameter in model.named_parameters():
        ends = [sorted({0, 1, size // 2, size}) for size in parameter.shape]
        for box in itertools.product(*(list(itertools.combinations_with_replacement(e, 2)) for e in ends)):
            true = parameter.detach()[tuple(slice(*pair) for pair in box)]
            assert torch.equal(read(name, box), true), (name, box)


@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path: Path, kind: str) -> None:
    config = config_of(kind)
    build(config, Mesh.unbound("1"), torch.float32).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    for change in (None, stored[name][:-1].clone()):
        others = {n: t for n, t in stored.items() if n != name}
        save_file(others if change is None else others | {name: change}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.gate_up_proj is missing") as caught:
            build(config, Mesh.unbound("1"), torch.float32, folder=tmp_path)
        assert caught.value.code == "IG467" and "experts.0.up_proj.weight is not used" in str(caught.value)
