"""Families beside Llama, with scaled rotary positions and windows: transformers' logits and gradients in fp64 are ours,
on one device and under every layout, with uneven labels.
"""

from __future__ import annotations

import dataclasses
import json
import re
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import ConfigError
from isograd.hf.configs import from_hf_config, load_config, to_hf_config
from isograd.hf.export import export_hf
from isograd.hf.families import HuggingFace, load_hf, to_hf
from isograd.hf.force_fp64 import in_fp64
from isograd.models import Transformer, TransformerConfig

VOCAB, LENGTH, ROWS = 61, 11, 4
BASE = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 44, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e2, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "llama3": {"model_type": "llama", **BASE, "rope_parameters": LLAMA3},
    "mistral": {"model_type": "mistral", **BASE, "sliding_window": 3, "rope_parameters": YARN},
    "qwen2": {"model_type": "qwen2", **BASE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}  # fmt: skip
LAYOUTS = ("tp2", "tp2 sp zero1", "pp2", "cp2 ulysses", "cp2 ring", "dp2 zero3")


@lru_cache
def theirs(name: str) -> Any:
    """In fp64 throughout, but for the angles of rotary positions, which are of fp32 in every model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(SMALL[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().train()
    with torch.no_grad():  # norms and biases away from 1 and 0, and scores large enough for a cap to show
        for parameter in model.parameters():
            parameter.mul_(6).add_(torch.randn(parameter.shape) * 0.1)
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "Attention")):
            module.forward = in_fp64(module.forward)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """(tokens, labels): each row has another number of labels, one has none."""
    window = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    labels = window[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : row * 3] = -100
    labels[2] = -100
    return window[:, :-1].contiguous(), labels


@lru_cache
def truth(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Their logits and gradients."""
    tokens, labels = batch()
    model = theirs(name)
    model.zero_grad()
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1)).backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def ours(layouts: tuple[str, ...], config: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Any]:
    """By layout: (logits, gradients in their names, whether weights survive the round trip bit for bit)."""
    tokens, labels = batch()
    found: dict[str, Any] = {}
    for layout in layouts:
        mesh = Mesh(layout)
        mine = slice(mesh.index("dp"), None, mesh.size("dp"))
        model = Transformer(from_hf_config(config), mesh, dtype=torch.float64, seed=1)
        model.loss_chunk = 5
        load_hf(model, state)
        back = to_hf(model) if mesh.size("pp") == 1 else state  # whole models only
        same = back.keys() == state.keys() and all(torch.equal(back[n], state[n]) for n in back)
        engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
        logits = None
        if mesh.size("pp") > 1:
            engine.accumulate([{"tokens": tokens[row], "labels": labels[row]} for row in (slice(0, 1), slice(1, None))])
        else:
            with torch.no_grad():
                logits = model(tokens)
            loss, count = model(tokens[mine], labels[mine])
            engine.backward(loss, weight=count)
        gradients = {n: g.clone() for n, g in engine.grads().items()}
        found[layout] = (logits, to_hf(model, gradients), same)
    return found


def off(found: dict[str, Any], name: str) -> list[str]:
    """What differs from transformers."""
    logits, gradients = truth(name)
    tied = set(theirs(name).all_tied_weights_keys)
    wrong = []
    whole = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    for layout, (our_logits, our_gradients, same) in found.items():
        if our_logits is not None and float((our_logits - logits).abs().max()) > 1e-9 * float(logits.abs().max()):
            wrong.append(f"{layout}: logits {float((our_logits - logits).abs().max()):.1e}")
        if our_gradients.keys() != gradients.keys() - tied:
            wrong.append(f"{layout}: gradients of {sorted(our_gradients.keys() ^ gradients.keys())} on one side only")
        for n in our_gradients.keys() & gradients.keys():
            error, size = float((our_gradients[n] - gradients[n]).norm()), float(gradients[n].norm())
            if not error <= 1e-9 * max(size, 1e-6 * whole):
                wrong.append(f"{layout}: {n} by {error / max(size, 1e-30):.1e}")
        wrong += [] if same else [f"{layout}: weights changed on the way there and back"]
    return wrong


def full_config(name: str) -> dict[str, Any]:
    return theirs(name).config.to_dict()


def weights(name: str) -> dict[str, Tensor]:
    model = theirs(name)
    return {n: t.detach() for n, t in model.named_parameters() if n not in model.all_tied_weights_keys}


@pytest.mark.parametrize("name", SMALL)
def test_a_family_has_transformers_logits_and_gradients_under_every_layout(threads, name: str) -> None:
    alone = threads(1).run(ours, ("1",), full_config(name), weights(name))[0]
    assert not off(alone, name)
    for found in threads(2).run(ours, LAYOUTS, full_config(name), weights(name)):
        assert not off(found, name)


@pytest.mark.parametrize("name", SMALL)
def test_configs_survive_the_way_to_hugging_face_and_back(name: str) -> None:
    from transformers import AutoConfig

    mine = from_hf_config(full_config(name))
    exported = to_hf_config(mine)
    assert exported["model_type"] == SMALL[name]["model_type"]
    assert from_hf_config(exported) == mine
    assert TransformerConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(mine)))) == mine
    values = dict(exported)
    theirs_again = AutoConfig.for_model(values.pop("model_type"), **values)
    assert from_hf_config(theirs_again) == mine


# An option of a family, and a value that it must not have.
OTHER: dict[str, dict[str, Any]] = {
    "llama3": {"rope_scaling": None},
    "mistral": {"sliding_window": 4, "rope_scaling": None},
    "qwen2": {"full_layers": ()},
}  # fmt: skip


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, options in OTHER.items() for option in options])
def test_without_an_option_of_its_family_a_model_computes_something_else(name: str, option: str) -> None:
    config, (logits, _) = from_hf_config(full_config(name)), truth(name)
    changed = dataclasses.replace(config, **{option: OTHER[name][option]})
    model = Transformer(changed, Mesh.unbound("1"), dtype=torch.float64)
    stored = HuggingFace(weights(name), config)
    with torch.no_grad():
        for record in contracts(model, model.mesh):
            shape = record.contract.shape
            record.parameter.copy_(stored.read(record.name, shape, [(0, n) for n in shape]))
        assert float((model(batch()[0]) - logits).abs().max()) > 1e-6 * float(logits.abs().max())


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "IG609.*'dynamic' changes with"),
        ("llama3", {"rope_parameters": {"rope_type": "lama3", "factor": 2.0}}, "IG609.*did you mean 'llama3'"),
        ("llama3", {"rope_parameters": {**LLAMA3, "high_frequency": 2.0}}, "IG609.*'high_frequency'"),
        ("mistral", {"rope_parameters": {**YARN, "beta_fast": "32"}}, "IG601.*beta_fast"),
        ("llama3", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "IG609.*hf.load"),
        ("llama3", {"model_type": "gemma2"}, "IG607.*hf.load"),
        ("llama3", {"model_type": "qwen4"}, "IG607.*did you mean 'qwen"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "IG609.*layer_types"),
        ("qwen2", {"max_window_layers": "1"}, "IG602.*max_window_layers"),
    ],
)
def test_what_a_family_has_and_is_not_built_is_refused_by_name(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_hf_config({**full_config(name), **change})
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)


def test_options_that_no_family_has_are_refused_at_an_export_and_wrong_ones_at_once() -> None:
    plain = from_hf_config(full_config("llama3"))
    with pytest.raises(ConfigError, match=r"IG616(.|\n)*gated False"):
        to_hf_config(dataclasses.replace(plain, gated=False))
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(plain, full_layers=(2, 1), sliding_window=0, norm="pots", rope_theta=-1.0, head_dim=-1)
    for words in (
        "head_dim must be positive",
        "full_layers must be ascending",
        "sliding_window must be at least 1",
        "'pots'",
        "must be positive",
    ):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="did you mean 'sliding_window'"):
        TransformerConfig.from_dict({**dataclasses.asdict(plain), "sliding_windows": 3})


@pytest.mark.parametrize(
    "change", [{"head_dim": 3}, {"rotary_fraction": 2.0}, {"rotary_fraction": 0.1}, {"init_std": -1.0}]
)
def test_heads_that_rotary_positions_cannot_turn_are_refused(change: dict[str, float]) -> None:
    plain = from_hf_config(full_config("llama3"))
    with pytest.raises(ConfigError, match=r"IG601.*(rotary_fraction|init_std must be 0 or more)"):
        dataclasses.replace(plain, **change)


def test_fewer_layers_keep_one_of_each_kind() -> None:
    qwen = dataclasses.replace(from_hf_config(full_config("qwen2")), layers=12, full_layers=(5, 11))
    assert qwen.with_layers(2).full_layers == (1,)
    assert dataclasses.replace(qwen, full_layers=(0, 1, 2, 3)).with_layers(3).full_layers == (1, 2)


def exported(folders: list[str]) -> None:
    """Read each folder and write it beside itself."""
    for folder in folders:
        model = Transformer(load_config(folder), Mesh("1"))
        load_hf(model, folder)
        export_hf(model, f"{folder}-out")


def test_an_export_has_the_names_and_bits_of_what_was_read_and_generates_the_same(threads, tmp_path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, values in SMALL.items():
        config = AutoConfig.for_model(**values)
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    threads(1).run(exported, [str(tmp_path / name) for name in SMALL])
    tokens = batch()[0][:1]
    for name in SMALL:
        read, written = (AutoModelForCausalLM.from_pretrained(tmp_path / n).eval() for n in (name, f"{name}-out"))
        assert type(written) is type(read)
        assert written.state_dict().keys() == read.state_dict().keys()
        assert all(torch.equal(t, read.state_dict()[n]) for n, t in written.state_dict().items()), name
        said = [m.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (read, written)]
        assert torch.equal(*said), name
