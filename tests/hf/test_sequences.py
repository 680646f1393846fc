"""Models of transformers, with sequences cut over tp within their layers, have by name the gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.hf.build import build
from isograd.hf.small_config import small
from isograd.hf.tensor_parallel import cut
from tests.hf import test_stages
from tests.hf.test_hugging import config_of, trained


# What each shows: a tie, biases and key heads that tp does not divide; experts; latent attention, whose own projections
# are whole; an attention of which all features are gathered.
@pytest.mark.medium
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "deepseek_v3", "olmo2"])
def test_gradients_and_parameters_are_one_devices(worlds, kind: str) -> None:
    assert worlds(2).run(trained, kind, "tp2 sp zero1") == [[], []]


@pytest.mark.medium
@pytest.mark.parametrize(("layout", "ranks"), [("tp2 sp ep2", 2), ("cp2 tp2 sp ring", 4)])
def test_with_other_axes_they_are(worlds, layout: str, ranks: int) -> None:
    assert worlds(ranks).run(trained, "qwen3_moe", layout) == [[]] * ranks


@pytest.mark.medium
def test_stages_pass_on_parts_of_sequences(worlds) -> None:
    assert worlds(4).run(test_stages.trained, "qwen2", "tp2 pp2 sp") == [[]] * 4


def test_what_is_whole_in_a_layer_owes_tp_and_what_is_outside_owes_nothing() -> None:
    from transformers import AutoConfig

    mesh = Mesh.unbound("tp2 sp")
    table = contracts(build(config_of("qwen2"), mesh, torch.float32), mesh)
    owing = {
        r.name.removeprefix("model.layers.0.") for r in table if r.contract.partial_over and ".layers.1." not in r.name
    }
    assert owing == {"input_layernorm.weight", "post_attention_layernorm.weight"}
    table = contracts(build(config_of("olmo2"), mesh, torch.float32), mesh)
    assert not table["model.layers.0.self_attn.q_norm.weight"].partial_over
    assert table["model.layers.0.post_attention_layernorm.weight"].partial_over == ("tp",)
    table = contracts(build(small(AutoConfig.for_model("longcat_flash"), 2), mesh, torch.float32), mesh)
    assert table["model.layers.0.input_layernorm.1.weight"].partial_over == ("tp",)  # in a list, which nobody calls


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("qwen3_moe", {"output_router_logits": True}, "balance loss"),
        ("eurobert", {}, "its loss is masked"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(kind: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        build(config_of(kind, **more), Mesh.unbound("tp2 sp"), torch.float32)
    assert caught.value.code == "IG460"


def test_a_batch_that_was_not_padded_is_refused() -> None:
    model: Any = build(config_of("llama"), Mesh.unbound("tp2 sp"), torch.float32)
    with pytest.raises(ModelError, match="9 tokens are not cut over tp2"):
        model.model.layers[0](torch.zeros(2, 9, 32))


def test_a_cut_region_within_another_is_refused() -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("qwen3_moe"))
    model._tp_plan = {"model.layers.*.mlp.gate": "colwise", "model.layers.*.mlp.experts": "moe_tp_experts"}
    with pytest.raises(ModelError, match="within another"):
        cut(model, Mesh.unbound("tp2 sp"))
