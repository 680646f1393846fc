"""LoRA under a layout: by name the gradients of one device, and folders that peft and transformers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import isograd as ig
from isograd.core.contract import Contract, Shard
from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import CheckpointError, ModelError
from isograd.hf import export_adapters, export_hf, tensor_parallel
from isograd.hf.build import build
from isograd.hf.proof import compare
from tests.hf.test_hugging import MICROS, batch, config_of, distance, loss_of, sgd

peft = pytest.importorskip("peft")


def lora(**more: Any) -> Any:
    return peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | more)


def proofs() -> dict[str, list[str]]:
    found = {name: list(compare(config_of("qwen2"), Mesh(name), lora()).wrong) for name in ("dp2 zero3", "pp2 1f1b")}
    declare = tensor_parallel.declare

    def without_debts(parameter: Any, mesh: Mesh, **said: Any) -> Any:
        return declare(parameter, mesh, **{**said, "partial_over": ()})

    tensor_parallel.declare = without_debts  # type: ignore[assignment]
    try:
        found["no debts"] = list(compare(config_of("llama"), Mesh("tp2"), lora()).wrong)
    finally:
        tensor_parallel.declare = declare
    return found


@pytest.mark.medium
def test_the_proof_covers_adapters_and_names_those_whose_sum_is_missing(worlds) -> None:
    layer = "model.layers.0."
    for found in worlds(2).run(proofs):
        assert found["dp2 zero3"] == found["pp2 1f1b"] == []
        assert f"{layer}self_attn.q_proj.lora_A.default.weight" in found["no debts"]
        assert f"{layer}self_attn.o_proj.lora_B.default.weight" in found["no debts"]
        assert f"{layer}mlp.down_proj.lora_A.default.weight" not in found["no debts"]


def trained(folder: str) -> float:
    """Writes the adapters before a step, after it, and the whole model after it."""
    mesh, out = Mesh("tp2 zero1"), Path(folder)
    model: Any = build(config_of("qwen2"), mesh, torch.float64, folder=out / "base", adapter=lora(), noise=0.1)
    engine = Engine(model, mesh, sgd)
    export_adapters(engine, out / "start")
    for number in range(MICROS):
        part = ig.hf.shard(batch(0, 0, number), mesh)
        engine.backward(loss_of(model, part.inputs), weight=part.weight)
    loss = engine.step().loss
    export_adapters(engine, out / "end")
    export_hf(engine, out / "merged")
    return loss


@pytest.mark.medium
def test_a_step_is_pefts_and_what_is_written_is_what_peft_and_transformers_read(worlds, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(config_of("qwen2"), dtype=torch.float64).save_pretrained(tmp_path / "base")
    loss = worlds(2).run(trained, str(tmp_path))[0]

    def of(name: str, **more: Any) -> Any:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
        return peft.PeftModel.from_pretrained(base, tmp_path / name, autocast_adapter_dtype=False, **more)

    model = of("start", is_trainable=True)
    batches = [batch(0, 0, number) for number in range(MICROS)]
    counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
    losses = [loss_of(model, given) * count / sum(counts) for given, count in zip(batches, counts, strict=True)]
    sum(losses).backward()
    assert abs(float(sum(losses).detach()) - loss) < 1e-12
    sgd([p for p in model.parameters() if p.requires_grad]).step()
    ours, wrong = dict(of("end").named_parameters()), []
    for name, parameter in model.named_parameters():
        if not distance(ours[name].detach(), parameter.detach(), 1e-6) <= 1e-9:
            wrong.append(name)
    assert wrong == []
    assert sum(".lora_" in name for name in ours) == 28
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    expected = model.merge_and_unload().state_dict()
    assert all(distance(tensor, expected[name], 1e-6) <= 1e-9 for name, tensor in merged.state_dict().items())


def test_adapters_of_a_cut_layer_are_cut_with_it() -> None:
    mesh = Mesh.unbound("tp2 zero1")
    table = contracts(build(config_of("qwen2"), mesh, torch.float32, adapter=lora()), mesh)
    layer = "model.layers.0.mlp."
    halves = ((0, 11), (11, 21))
    assert table[layer + "up_proj.lora_A.default.weight"] == Contract((3, 48), (), ("tp",))
    assert table[layer + "up_proj.lora_B.default.weight"] == Contract((21, 3), (Shard("tp", 0, halves),))
    assert table[layer + "down_proj.lora_A.default.weight"] == Contract((3, 21), (Shard("tp", 1, halves),))
    assert table[layer + "down_proj.lora_B.default.weight"] == Contract((48, 3), (), ("tp",))


def test_first_values_are_equal_under_every_layout() -> None:
    alone = dict(build(config_of("qwen2"), Mesh.unbound("1"), torch.float32, adapter=lora()).named_parameters())
    mesh = Mesh.unbound("tp2", 1)
    for record in contracts(build(config_of("qwen2"), mesh, torch.float32, adapter=lora()), mesh):
        box = tuple(slice(*ends) for ends in record.contract.local(mesh))
        assert torch.equal(record.parameter, alone[record.name][box]), record.name
        assert record.parameter.requires_grad == (".lora_" in record.name)
        assert bool(record.parameter.any()) != (".lora_B." in record.name) or ".bias" in record.name


@pytest.mark.parametrize(
    "more",
    [{"layer_replication": [(0, 1)]}, {"init_lora_weights": "pissa"}, {"target_modules": ["embed_tokens"]},
     {"bias": "all"}, {"modules_to_save": ["lm_head"]}],
)  # fmt: skip
def test_what_is_no_plain_lora_is_refused_by_name(more: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="IG473"):
        build(config_of("llama"), Mesh.unbound("1"), torch.float32, adapter=lora(**more))


def test_quantised_weights_with_adapters_and_a_model_without_adapters_are_refused() -> None:
    config = config_of("llama")
    engine = Engine(build(config, Mesh("1"), torch.float32), Mesh("1"), sgd)
    with pytest.raises(CheckpointError, match="IG947"):
        export_adapters(engine, "nowhere")
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ModelError, match=r"IG462[\s\S]*base_bits=4"):
        ig.hf.load(config, Mesh.unbound("1"), adapter=lora())
