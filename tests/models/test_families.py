"""Hugging Face models and ours are the same functions: logits in fp32, every gradient in fp64, on several layouts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import ConfigError, ModelError
from isograd.hf.configs import from_hf_config, to_hf_config
from isograd.hf.families import HuggingFace, load_hf, to_hf
from isograd.models import Transformer

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "neox": {"model_type": "gpt_neox", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 32, "rotary_pct": 0.5,
             "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "neox-serial": {"model_type": "gpt_neox", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "intermediate_size": 48, "use_parallel_residual": False},
    "llama": {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 44},
    "llama-bias": {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2,
                   "num_attention_heads": 4, "intermediate_size": 44, "attention_bias": True, "mlp_bias": True},
    "smollm": {"model_type": "llama", "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 44,
               "tie_word_embeddings": True, "rope_theta": 100000.0},
    "mistral": {"model_type": "mistral", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 44, "sliding_window": 64},
    "qwen3": {"model_type": "qwen3", "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 44,
              "tie_word_embeddings": True},
    "qwen3-moe": {"model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3,
                  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 44,
                  "moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
                  "mlp_only_layers": [0]},
}  # fmt: skip


@lru_cache
def theirs(name: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(SMALL[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", experts_implementation="eager")
    model = model.to(dtype).train()
    with torch.no_grad():  # norms and biases away from 1 and 0, so that a wrong one shows
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_wide_rms_norm, module)
            if type(module).__name__.endswith("TopKRouter"):
                module.forward = partial(_wide_router, module)
    return model


def _wide_rms_norm(module: Any, x: Tensor) -> Tensor:
    """transformers normalises in fp32 even in fp64 models, which leaves 1e-7; the same formula without that cast."""
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))


def _wide_router(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for the scores of experts."""
    logits = x.reshape(-1, x.shape[-1]) @ module.weight.t()
    weights, chosen = logits.softmax(-1).topk(module.top_k, -1)
    if getattr(module, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, chosen


def as_in_files(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers holds all experts of a layer in one tensor; its files have one tensor for each."""
    found: dict[str, Tensor] = {}
    for key, tensor in named.items():
        layer, _, leaf = key.partition(".mlp.")
        home, names = f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
        if leaf == "experts.gate_up_proj":
            for e, both in enumerate(tensor):
                for which, part in zip(names, both.chunk(2), strict=False):
                    found[f"{home}.experts.{e}.{which}.weight"] = part
        elif leaf == "experts.down_proj":
            found |= {f"{home}.experts.{e}.{names[2]}.weight": part for e, part in enumerate(tensor)}
        else:
            found[key] = tensor
    return found


def tokens_of(rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(1))


@lru_cache
def their_logits_and_gradients(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = tokens_of()
    with torch.no_grad():
        logits = theirs(name, torch.float32)(tokens).logits
    model = theirs(name, torch.float64)
    out = model(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(out.reshape(-1, 61), tokens[:, 1:].reshape(-1)).backward()
    return logits, as_in_files({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def ours(layout: str, name: str, config: dict[str, Any], state32: dict[str, Tensor], state64: dict[str, Tensor]) -> Any:
    """(logits, gradients in their names, whether weights survive the round trip bit for bit)."""
    mesh, tokens = Mesh(layout), tokens_of()
    model = Transformer(from_hf_config(config), mesh)
    load_hf(model, state32)
    with torch.no_grad():
        logits = model(tokens)
    double = Transformer(from_hf_config(config), mesh, dtype=torch.float64, seed=1)
    load_hf(double, state64)
    engine = Engine(double, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    loss, count = double(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    engine.backward(loss, weight=count)
    gradients = to_hf(double, {n: g.clone() for n, g in engine.grads().items()})
    back = to_hf(double)
    same = all(torch.equal(back[n], state64[n]) for n in back)
    return logits, gradients, same


def stored(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights by the names of their files."""
    return as_in_files({n: t.detach() for n, t in theirs(name, dtype).named_parameters()})


def full_config(name: str) -> dict[str, Any]:
    return theirs(name, torch.float32).config.to_dict()


@pytest.mark.parametrize("layout", ["1", "tp2", "tp2 sp zero1", "tp4 sp"])
@pytest.mark.parametrize("name", SMALL)
def test_a_hugging_face_model_and_ours_have_the_same_logits_and_gradients(threads, name: str, layout: str) -> None:
    logits, gradients = their_logits_and_gradients(name)
    states = [stored(name, dtype) for dtype in (torch.float32, torch.float64)]
    ranks = Mesh.unbound(layout).layout.world_size
    for our_logits, our_gradients, same in threads(ranks).run(ours, layout, name, full_config(name), *states):
        assert float((our_logits - logits).abs().max()) < 1e-5 * max(1.0, float(logits.abs().max()))
        assert our_gradients.keys() == gradients.keys()
        whole = float(torch.stack([g.norm() for g in gradients.values()]).norm())
        for n, expected in gradients.items():
            error = float((our_gradients[n] - expected).norm())
            assert error <= 1e-10 * max(float(expected.norm()), 1e-6 * whole), n
        assert same


@pytest.mark.parametrize("name", SMALL)
def test_configs_survive_the_way_to_hugging_face_and_back(name: str) -> None:
    from transformers import AutoConfig

    mine = from_hf_config(full_config(name))
    exported = to_hf_config(mine)
    assert from_hf_config(exported) == mine
    values = dict(exported)
    theirs_again = AutoConfig.for_model(values.pop("model_type"), **values)
    assert from_hf_config(theirs_again) == mine


def test_a_directory_of_safetensors_loads_and_a_pickle_is_refused(tmp_path) -> None:
    model = theirs("smollm", torch.float32)
    model.save_pretrained(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "pytorch_model.bin").write_bytes(b"not read")
    mesh = Mesh.unbound("1")
    mine = Transformer(from_hf_config(model.config), mesh, seed=9)
    load_hf(mine, tmp_path / "good")
    with torch.no_grad():
        assert float((mine(tokens_of()) - model(tokens_of()).logits).abs().max()) < 1e-5
    with pytest.raises(ModelError, match="IG421"):
        load_hf(mine, tmp_path / "bad")


def test_of_a_folder_with_an_index_its_shards_are_read_and_no_other_file(tmp_path) -> None:
    model = theirs("llama", torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shutil.copy(shards[0], tmp_path / "consolidated.safetensors")
    config = from_hf_config(model.config)
    weights = HuggingFace(tmp_path, config)
    assert torch.equal(weights.read("norm.weight", (32,), [(3, 9)]), model.model.norm.weight[3:9])
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"IG424(.|\n)*{shards[1].name}"):
        HuggingFace(tmp_path, config)


@pytest.mark.parametrize("name", SMALL)
def test_any_box_of_any_parameter_is_read_by_itself(name: str) -> None:
    state = stored(name)
    config, one = from_hf_config(full_config(name)), Mesh.unbound("1")
    model, weights = Transformer(config, one, seed=3), HuggingFace(state, config)
    load_hf(model, state)
    for record in contracts(model, one):
        shape = record.contract.shape
        for first in ((0, shape[0]), (3, 11), (5, 5)):
            box = [first, *((1, size - 2) for size in shape[1:])]
            expected = record.parameter[tuple(slice(*ends) for ends in box)]
            assert torch.equal(weights.read(record.name, shape, box), expected), record.name


def test_quantised_models_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="IG611: this llama is quantised"):
        from_hf_config({**full_config("llama"), "quantization_config": {"quant_method": "gptq", "bits": 4}})


def test_weights_of_another_model_are_refused_with_every_point_named() -> None:
    state = {n: t.detach() for n, t in theirs("llama", torch.float32).named_parameters()}
    state["model.norm.weight"] = torch.ones(5)
    state["extra"] = state.pop("model.layers.1.mlp.up_proj.weight")
    model = Transformer(from_hf_config(full_config("llama")), Mesh.unbound("1"))
    before = model.norm.weight.detach().clone()
    with pytest.raises(ModelError) as error:
        load_hf(model, state)
    for point in ("model.norm.weight is (5,), not (32,)", "up_proj.weight is missing", "extra is not used"):
        assert point in str(error.value)
    assert torch.equal(model.norm.weight, before)


def test_unknown_families_and_rotary_scalings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        from_hf_config({"model_type": "lama"})
    scaled = {**full_config("llama"), "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}
    with pytest.raises(ConfigError, match="dynamic"):
        from_hf_config(scaled)
