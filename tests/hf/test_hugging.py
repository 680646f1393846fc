"""Models of transformers, cut over tp by their own plans, have by name the gradients of transformers on one device.

fp64, 1e-9, two steps of two micro-batches with uneven labels. The reference is transformers' own model, given the whole
batch: it never sees isograd.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isograd as ig
from isograd.core.contract import assemble
from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import ModelError
from isograd.hf import export_hf, styles
from isograd.hf.build import build
from isograd.hf.force_fp64 import ForceFP64, in_fp64
from isograd.hf.proof import compare
from isograd.hf.tensor_parallel import cut
from isograd.io.safetensors_reader import SafetensorsReader

VOCAB, LENGTH, MICROS, STEPS = 61, 9, 2, 2
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 21, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 1}  # fmt: skip
# What each shows: plain; biases, a tie, key heads that tp does not divide; norms of heads; a window, caps and one key
# head; fused and gathered; ...
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "qwen2": {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
    "qwen3": {},
    "gemma2": {"sliding_window": 4, "num_key_value_heads": 1, "query_pre_attn_scalar": 8},
    "phi3": {},
    "olmo2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "gpt_neox": {"attention_bias": True, "rotary_pct": 0.5},
}  # fmt: skip
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 1, "topk_group": 1,
          "num_key_value_heads": 4, "head_dim": 4, "first_k_dense_replace": 1}  # fmt: skip
# Families that isograd's own decoder does not have; what it had of them, it had under these layouts.
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "sliding_window": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 12},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 12, "num_hidden_layers": 3,
                    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
                    "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
                                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2}}},
    "phi3": {"sliding_window": 6, "original_max_position_embeddings": 6, "max_position_embeddings": 64,
             "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e2, "partial_rotary_factor": 0.75,
                                 "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.3, 4.0, 7.0]}},
    "olmo2": {"num_key_value_heads": 4},
    "smollm3": {"no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "olmoe": {**EXPERTS, "num_experts": 4},
}  # fmt: skip
OF_FAMILIES = ("dp2 zero3", "tp2", "tp2 sp zero1", "cp2 ulysses", "cp2 ring", "pp2")
MORE = ["deepseek_v3", "mistral", "gemma", "gemma3_text", "smollm3", "starcoder2", "cohere2", "glm", "granite"]


def config_of(kind: str, **more: Any) -> Any:
    from transformers import AutoConfig

    special = LATENT if kind == "deepseek_v3" else MODELS.get(kind, FAMILIES.get(kind, {}))
    config = AutoConfig.for_model(kind, **{**SIZES, **special, **more})
    config._experts_implementation = "eager"  # grouped products of matrices have no fp64
    return config


def batch(step: int, data_rank: int, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * data_rank + number)
    tokens = torch.randint(2, VOCAB, (2, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, : 1 + (3 * data_rank + 5 * number + step) % 7] = -100
    if (step, data_rank, number) == (1, 0, 1):
        labels[:] = -100
    return {"input_ids": tokens, "labels": labels}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loss_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    with ForceFP64():
        loss: Tensor = model(**inputs).loss
    return loss


def one_device(config: Any, start: dict[str, Tensor], ranks: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The gradients of each step, and the parameters after them, of transformers alone."""
    from transformers import AutoModelForCausalLM

    with ForceFP64():  # also the frequencies of rotary positions
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])
    optimizer, found = sgd(model.parameters()), []
    for step in range(STEPS):
        batches = [batch(step, rank, number) for rank in range(ranks) for number in range(MICROS)]
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
        optimizer.zero_grad()
        for given, count in zip(batches, counts, strict=True):
            if count:
                (loss_of(model, given) * count / sum(counts)).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return found, {name: p.detach() for name, p in model.named_parameters()}


def whole(engine: Engine) -> dict[str, Tensor]:
    with engine.full_parameters():
        return {r.name: assemble(r.parameter.detach(), r.contract, engine.mesh).clone() for r in engine.table}


def trained(kind: str, layout: str, **more: Any) -> list[str]:
    """The names of gradients and parameters that are not one device's, on this rank."""
    config, mesh = config_of(kind, **more), Mesh(layout)
    with ForceFP64():
        model: Any = build(config, mesh, torch.float64, noise=0.1)
    engine, found = Engine(model, mesh, sgd), []
    start = whole(engine)
    for step in range(STEPS):
        for number in range(MICROS):
            part = ig.hf.shard(batch(step, mesh.index("dp"), number), mesh)
            engine.backward(loss_of(model, part.inputs), weight=part.weight)
        found.append(dict(engine.grads().items()))
        engine.step()
    expected, after = one_device(config, start, mesh.size("dp"))
    wrong = [name for name, p in whole(engine).items() if not distance(p, after[name], 1e-6) <= 1e-9]
    for ours, theirs in zip(found, expected, strict=True):
        floor = 1e-6 * float(torch.stack([g.norm() for g in theirs.values()]).norm())
        assert ours.keys() == theirs.keys()
        wrong += [f"grad {n}" for n, g in theirs.items() if not distance(ours[n], g, floor) <= 1e-9]
    return wrong


def distance(found: Tensor, expected: Tensor, floor: float) -> float:
    return float((found - expected).norm()) / max(float(expected.norm()), floor)


@pytest.mark.medium
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_and_parameters_are_one_devices(worlds, kind: str) -> None:
    layout = "tp2 zero1" if kind in ("qwen2", "phi3") else "tp2"
    assert worlds(2).run(trained, kind, layout) == [[], []]


def proven(kind: str) -> list[str]:
    """What is not one device's: by the proof at start, and by transformers on whole batches."""
    found = []
    for layout in (*OF_FAMILIES, *(["dp2 ep2"] if kind in ("mixtral", "olmoe") else [])):
        proof = compare(config_of(kind, **FAMILIES[kind]), Mesh(layout))
        assert len(proof.errors) > 10
        found += [f"{layout}: {name}" for name in proof.wrong]
    return found + [f"cp2 ring: {name}" for name in trained(kind, "cp2 ring", **FAMILIES[kind])]


@pytest.mark.medium
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_that_only_transformers_has_are_proven_under_every_layout(worlds, kind: str) -> None:
    assert worlds(2).run(proven, kind) == [[], []]


def attached(kind: str, layout: str) -> list[str]:
    """A model that is built already, cut in place: the names of gradients that are not its own on one device."""
    from transformers import AutoModelForCausalLM

    config, mesh = config_of(kind), Mesh(layout)
    torch.manual_seed(7)
    with ForceFP64():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    frozen = next(p for name, p in model.named_parameters() if name.endswith("o_proj.weight"))
    frozen.requires_grad_(False)
    assert ig.hf.attach(model, mesh) is model
    batches = [batch(0, mesh.index("dp"), number) for number in range(MICROS)]
    engine = Engine(model, mesh, sgd)
    if engine.pipeline is not None:
        engine.pipeline.chunks = {stage: in_fp64(chunk) for stage, chunk in engine.pipeline.chunks.items()}
        engine.accumulate(batches)
    for given in batches if engine.pipeline is None else ():
        part = ig.hf.shard(given, mesh)
        engine.backward(loss_of(model, part.inputs), weight=part.weight)
    ours, (theirs, _) = dict(engine.grads().items()), one_device(config, start, mesh.size("dp"))[0]
    assert mesh.size("pp") > 1 or len(theirs) == len(ours) + 1  # without the frozen one
    return [name for name, gradient in ours.items() if not distance(gradient, theirs[name], 1e-6) <= 1e-9]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen3", "tp2"), ("qwen3", "dp2 zero3"), ("qwen2", "tp2 sp zero1"), ("qwen3", "pp2"), ("qwen3_moe", "dp2 ep2")],
)
def test_a_model_that_is_built_is_cut_in_place(worlds, kind: str, layout: str) -> None:
    assert worlds(2).run(attached, kind, layout) == [[], []]


def recomputed() -> list[str]:
    """The names of gradients that change when forwards are run again in backward."""
    found = []
    for recompute in (False, True):
        mesh = Mesh("tp2")
        model: Any = build(config_of("qwen3"), mesh, torch.float32, noise=0.1)
        if recompute:
            model.gradient_checkpointing_enable()
        engine = Engine(model, mesh, sgd)
        for number in range(MICROS):
            part = ig.hf.shard(batch(0, 0, number), mesh)
            engine.backward(model(**part.inputs).loss, weight=part.weight)
        found.append({name: gradient.clone() for name, gradient in engine.grads().items()})
    return [name for name, gradient in found[0].items() if not torch.equal(gradient, found[1][name])]


@pytest.mark.medium
def test_a_recomputed_forward_gives_the_same_gradients(worlds) -> None:
    assert worlds(2).run(recomputed) == [[], []]


@pytest.mark.parametrize("layout", ["dp2 zero3", "dp2 tp2 zero3", "tp4", "cp2 tp2 ulysses", "cp2 tp2 ring zero1"])
def test_of_llama_under_other_layouts(worlds, layout: str) -> None:
    ranks = ig.Layout.parse(layout).world_size
    assert worlds(ranks).run(trained, "qwen3", layout) == [[]] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_other_architectures_are_proven(worlds, kind: str) -> None:
    assert worlds(2).run(trained, kind, "tp2") == [[], []]


def mutants() -> dict[str, str | list[str]]:
    """What the proof says of a model of which one sum is missing, by the sum."""
    mesh, config = Mesh("tp2"), config_of("qwen3")
    found: dict[str, str | list[str]] = {}
    found["none"] = list(compare(config, mesh).wrong)
    entrance = styles.Entrance.before
    styles.Entrance.before = lambda self, module, args, kwargs: None  # type: ignore[assignment, method-assign, return-value]
    try:
        found["Entrance"] = list(compare(config, mesh).wrong)
    finally:
        styles.Entrance.before = entrance  # type: ignore[method-assign]
    plan = type(config).base_model_tp_plan
    kept = {name: style for name, style in plan.items() if not name.endswith("q_norm")}
    type(config).base_model_tp_plan = kept
    try:
        ig.hf.prove(config, mesh)
    except ModelError as error:
        found["q_norm"] = f"{error.code} {error.seen}"
    finally:
        type(config).base_model_tp_plan = plan
    return found


@pytest.mark.medium
def test_the_proof_names_what_a_missing_sum_makes_wrong(worlds) -> None:
    for found in worlds(2).run(mutants):
        assert found["none"] == []
        assert "model.embed_tokens.weight" in found["Entrance"]
        assert found["q_norm"].startswith("IG468 2 of ")
        assert all(f"layers.{i}.self_attn.q_norm.weight" in found["q_norm"] for i in range(2))


def read_from(folder: str, out: str) -> tuple[float, int, str]:
    """(loss, elements read, the refusal of a token outside the vocabulary). Writes the folder `out`."""
    mesh, read, before = Mesh("tp2"), [0], SafetensorsReader.read

    def counting(self: SafetensorsReader, name: str, shape: Any, box: Any) -> Tensor:
        tensor = before(self, name, shape, box)
        read[0] += tensor.numel()
        return tensor

    SafetensorsReader.read = counting  # type: ignore[method-assign]
    try:
        model: Any = ig.hf.load(folder, mesh, prove=False)
    finally:
        SafetensorsReader.read = before  # type: ignore[method-assign]
    engine = Engine(model, mesh, sgd)
    given = batch(0, 0, 0)
    loss = float(model(**given).loss.detach())
    export_hf(engine, out)
    given["input_ids"][0, 0] = VOCAB + 3
    engine.backward(model(**given).loss, weight=1)
    try:
        engine.step()
    except ModelError as error:
        return loss, read[0], error.code
    return loss, read[0], "accepted"


def test_each_rank_reads_its_boxes_of_a_folder_and_the_whole_is_written_again(worlds, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of("llama")).train()
    model.save_pretrained(tmp_path / "in")
    expected = float(model(**batch(0, 0, 0)).loss.detach())
    total = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    results = worlds(2).run(read_from, str(tmp_path / "in"), str(tmp_path / "out"))
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())
    assert sum(read for _, read, _ in results) == total + norms
    for loss, _, refusal in results:
        assert abs(loss - expected) < 1e-5
        assert refusal == "IG417"


def test_random_weights_are_the_same_under_every_layout() -> None:
    config = config_of("qwen2")
    alone = dict(build(config, Mesh.unbound("1"), torch.float32, seed=3).named_parameters())
    for rank in range(2):
        mesh = Mesh.unbound("tp2", rank)
        for record in contracts(build(config, mesh, torch.float32, seed=3), mesh):
            box = tuple(slice(*ends) for ends in record.contract.local(mesh))
            assert torch.equal(record.parameter, alone[record.name][box]), record.name
    other = dict(build(config, Mesh.unbound("1"), torch.float32, seed=4).named_parameters())
    assert not torch.equal(other["model.layers.0.mlp.up_proj.weight"], alone["model.layers.0.mlp.up_proj.weight"])


def test_a_deep_copy_keeps_contracts_and_has_hooks_of_its_own() -> None:
    mesh = Mesh.unbound("tp2")
    model = build(config_of("qwen3"), mesh, torch.float32)
    twin = copy.deepcopy(model)
    assert [(r.name, r.contract) for r in contracts(twin, mesh)] == [
        (r.name, r.contract) for r in contracts(model, mesh)
    ]
    hooks = [
        next(iter(m.self_attn._forward_hooks.values())).__self__ for m in (model.model.layers[0], twin.model.layers[0])
    ]
    assert hooks[0] is not hooks[1]


def test_debts_and_cuts_are_those_of_the_plan() -> None:
    mesh = Mesh.unbound("tp2")
    table = contracts(build(config_of("qwen3", num_key_value_heads=1), mesh, torch.float32), mesh)
    layer = "model.layers.0.self_attn."
    assert table[layer + "q_norm.weight"].partial_over == ("tp",)
    assert table[layer + "k_proj.weight"].partial_over == ("tp/2",)
    assert table[layer + "k_proj.weight"].shards[0].ranges == ((0, 8), (0, 8))
    assert table[layer + "o_proj.weight"].shards[0].dim == 1
    assert table["model.layers.0.mlp.up_proj.weight"].shards[0].ranges == ((0, 11), (11, 21))
    assert table["model.norm.weight"] == ig.Contract((32,))


def test_key_heads_that_tp_does_not_divide_are_dealt_out_with_their_query_heads() -> None:
    mesh = Mesh.unbound("tp2")
    config = config_of("qwen3", num_attention_heads=9, num_key_value_heads=3)  # as SmolLM2-135M
    table = contracts(build(config, mesh, torch.float32), mesh)
    layer = "model.layers.0.self_attn."
    assert table[layer + "q_proj.weight"].shards[0].ranges == ((0, 48), (48, 72))
    assert table[layer + "k_proj.weight"].shards[0].ranges == ((0, 16), (16, 24))
    assert table[layer + "o_proj.weight"].shards[0].ranges == ((0, 48), (48, 72))


def of_layout(kind: str, layout: str, **more: Any) -> None:
    build(config_of(kind, **more), Mesh.unbound(layout), torch.float32)


@pytest.mark.parametrize(
    ("kind", "layout", "more", "code"),
    [
        ("llama", "tp3", {}, "IG465"),  # 4 heads
        ("llama", "tp4", {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96}, "IG465"),
        ("llama", "tp2", {"attention_dropout": 0.1}, "IG466"),
        ("gpt2", "tp2", {"n_embd": 32, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "IG463"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(kind: str, layout: str, more: dict[str, Any], code: str) -> None:
    with pytest.raises(ModelError) as caught:
        of_layout(kind, layout, **more)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("plan", "code"),
    [({"layers.*.nothing": "colwise"}, "IG463"), ({"layers.*.mlp.up_proj": "diagonal"}, "IG464"),
     ({"layers.*.mlp": "colwise"}, "IG464")],
)  # fmt: skip
def test_a_plan_that_cannot_be_followed_is_refused_by_name(plan: dict[str, str], code: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama"))
    model._tp_plan = {f"model.{name}": style for name, style in plan.items()}
    with pytest.raises(ModelError) as caught:
        cut(model, Mesh.unbound("tp2"))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("files", "code", "said"),
    [
        ({}, "IG461", "no folder of a model"),
        (
            {"config.json": '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}'},
            "IG461",
            "trust_remote_code",
        ),
        ({"config.json": '{"model_type": "lama"}'}, "IG461", "no architecture 'lama'"),
        ({"config.json": '{"model_type": "llama"}', "pytorch_model.bin": ""}, "IG421", "pickled"),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_refused(tmp_path: Path, files: dict[str, str], code: str, said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=said) as caught:
        ig.hf.load(tmp_path, Mesh.unbound("1"))
    assert caught.value.code == code


def test_quantised_and_foreign_weights_are_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = config_of("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    wider = config_of("llama", intermediate_size=22)
    with pytest.raises(ModelError, match="up_proj") as caught:
        build(wider, Mesh.unbound("1"), torch.float32, folder=tmp_path)
    assert caught.value.code == "IG467"
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ModelError, match="IG462"):
        ig.hf.load(config, Mesh.unbound("1"))
