"""transformers models and LoRA, unmodified, at every ZeRO stage: each gradient is one device's, by name, in fp64.

Two ranks with uneven labels, one of which has none in one of the steps. Nothing is told to the Engine about a model.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.core.mesh import Mesh
from isograd.engine import Engine, empty_parameters

VOCAB, LENGTH, STEPS = 61, 7, 2
LLAMA = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 44}  # fmt: skip


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA, **changes))  # type: ignore[no-any-return]


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def recomputed_llama() -> nn.Module:
    model: Any = llama()
    model.gradient_checkpointing_enable()
    return model  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))  # type: ignore[no-any-return]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **dropout, intermediate_size=40, max_position_embeddings=32))  # type: ignore[no-any-return]


def lora(recompute: bool = False) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    base: Any = llama()
    if recompute:
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    return get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]))  # type: ignore[no-any-return]


MODELS = {
    "llama": llama,
    "llama, tied": tied_llama,
    "llama, recomputed": recomputed_llama,
    "gpt2": gpt2,
    "bert": bert,
    "lora": lora,
    "lora, recomputed": partial(lora, True),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(5)
    model = MODELS[name]().double().train()
    with torch.no_grad():  # away from 1 and 0 (LoRA's B, biases, norms), so that a wrong one shows
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.1)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_wide_rms_norm, module)  # type: ignore[method-assign]
    return model


def _wide_rms_norm(module: Any, x: Tensor) -> Tensor:
    """transformers normalises in fp32 even in fp64 models, which leaves 1e-7; the same formula without that cast."""
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))  # type: ignore[no-any-return]


def batch(step: int, index: int, masked: bool) -> tuple[dict[str, Tensor], int]:
    """(what the model is called with, number of labels). In the second step, one micro-batch has none."""
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + index))
    labels = tokens.clone()
    labels[0, : 1 + (3 * index + step) % 5] = -100
    if step == 1 and index == 2:
        labels[:] = -100
    return {"input_ids": tokens, "labels": labels}, int((labels[:, 0 if masked else 1 :] != -100).sum())


def loss_of(model: nn.Module, inputs: dict[str, Tensor], masked: bool) -> Tensor:
    """What the models' own losses are, without their cast to fp32, which leaves 1e-8; NaN over no label as theirs."""
    logits, labels = model(input_ids=inputs["input_ids"]).logits, inputs["labels"]
    shifted = (logits, labels) if masked else (logits[:, :-1], labels[:, 1:])
    return F.cross_entropy(shifted[0].flatten(0, 1), shifted[1].flatten())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@lru_cache
def one_device(name: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    model, gradients = make(name), []
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        batches = [batch(step, index, name == "bert") for index in range(4)]
        total = sum(labels for _, labels in batches)
        optimizer.zero_grad()
        for inputs, labels in batches:
            if labels:
                (loss_of(model, inputs, name == "bert") * labels / total).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return gradients, {n: p.detach().clone() for n, p in model.named_parameters()}


def trained(name: str) -> dict[int, tuple[list[dict[str, Tensor]], dict[str, Tensor]]]:
    """The same at every stage."""
    found = {}
    for zero in range(4):
        mesh, model, gradients = Mesh(f"dp2 zero{zero}"), make(name), []
        dtypes = {n: b.dtype for n, b in model.named_buffers()}
        engine = Engine(model, mesh, sgd, bucket_mb=0.01)
        for step in range(STEPS):
            for index in (mesh.rank, mesh.rank + 2):
                inputs, labels = batch(step, index, name == "bert")
                engine.backward(loss_of(model, inputs, name == "bert"), weight=labels)
            gradients.append({n: g.clone() for n, g in engine.grads().items()})
            engine.step()
        assert dtypes == {n: b.dtype for n, b in model.named_buffers()}
        with engine.full_parameters():
            found[zero] = gradients, {n: p.detach().clone() for n, p in model.named_parameters()}
    return found


def distance(found: Tensor, expected: Tensor, floor: float) -> float:
    """Relative; a gradient that is truly zero (a key bias) is judged on the norm of all."""
    return float((found - expected).norm()) / max(float(expected.norm()), floor)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_one_devices_at_every_stage(worlds, name: str) -> None:
    truth, after = one_device(name)
    for stages in worlds(2).run(trained, name):
        for zero, (gradients, parameters) in stages.items():
            for ours, theirs in zip(gradients, truth, strict=True):
                floor = 1e-6 * float(torch.stack([g.norm() for g in theirs.values()]).norm())
                assert ours.keys() == theirs.keys()
                wrong = [n for n, g in theirs.items() if not distance(ours[n], g, floor) <= 1e-9]
                assert not wrong, f"zero{zero}: {wrong}"
            wrong = [n for n, p in after.items() if not distance(parameters[n], p, 1e-6) <= 1e-9]
            assert not wrong, f"zero{zero}: parameters {wrong}"


def generated(name: str) -> tuple[list[int], list[int]]:
    mesh, model = Mesh("dp2 zero3"), make(name).eval()
    prompt = batch(0, 0, False)[0]["input_ids"][:1]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(input_ids=prompt, **options)[0].tolist()  # type: ignore[operator]
    Engine(model, mesh, sgd)
    return alone, model.generate(input_ids=prompt, **options)[0].tolist()  # type: ignore[operator]


@pytest.mark.parametrize("name", ["llama", "lora"])
def test_a_sharded_model_generates(worlds, name: str) -> None:
    for alone, sharded in worlds(2).run(generated, name):
        assert alone == sharded
        assert len(alone) == LENGTH + 5


def from_disk(folder: str, name: str) -> float:
    """The largest difference between losses of a model and of one whose ranks have read it by rows."""
    with empty_parameters():
        model = MODELS[name]()
    inputs, labels = batch(0, 0, False)
    engine = Engine(model.train(), Mesh("dp2 zero3"), sgd, weights=folder)
    engine.backward(model(**inputs).loss, weight=labels)
    torch.manual_seed(3)
    return abs(engine.step().loss - float(MODELS[name]()(**inputs).loss))


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "bert"])
def test_saved_models_are_read_by_rows(worlds, tmp_path: Path, name: str) -> None:
    torch.manual_seed(3)
    MODELS[name]().save_pretrained(tmp_path)  # type: ignore[operator]
    assert worlds(2).run(from_disk, str(tmp_path), name) == [0.0, 0.0]
