"""A small model, rows with uneven labels, and a Trainer of them: stock in one process, or with the integration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from isograd.comm.device import device

VOCAB, LENGTH, STEP = 61, 12, 8  # STEP: rows of a step, over all ranks and micro-batches


class Rows(Dataset[dict[str, Tensor]]):
    """Each row has labels only behind a prompt of random length; the first rows have nearly none."""

    def __init__(self, rows: int = 40) -> None:
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
        prompt = torch.randint(LENGTH - 2, (rows, 1), generator=generator)
        prompt[:2] = LENGTH - 1
        self.labels = self.text.masked_fill(torch.arange(LENGTH) < prompt, -100)

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        mask = (torch.arange(LENGTH) < LENGTH - row % 5).long()  # padding, of other lengths in each micro-batch
        labels = self.labels[row].masked_fill(mask == 0, -100)
        return {"input_ids": self.text[row], "attention_mask": mask, "labels": labels}


def model(kind: str = "dense") -> Any:
    """In fp64. "experts": Mixtral, whose norms and router compute in fp32; "lora": GPT-2 with an adapter."""
    from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    if kind == "experts":
        experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
        experts |= {"experts_implementation": "eager"}  # torch groups matrices of fp32 and less only
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        return MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, num_key_value_heads=1, **shape, **experts)).double()
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **off
    )
    whole = GPT2LMHeadModel(config).double()
    if kind != "lora":
        return whole
    from peft import LoraConfig, get_peft_model

    parts = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return get_peft_model(whole, parts).double()


def exact(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The Trainer's own loss, in fp64 (transformers casts logits to fp32)."""
    logits, wanted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def arguments(folder: str, micro: int, ranks: int, **options: Any) -> Any:
    """A step has STEP rows, however many ranks share them."""
    from transformers import TrainingArguments

    standard: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": device().type == "cpu",
        "max_steps": 3,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": STEP // (micro * ranks),
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 1,
    }
    return TrainingArguments(**(standard | options))


def trained(found: Any) -> dict[str, Any]:
    """What a Trainer has made: parameters by name, and its log."""
    log = [
        {n: row[n] for n in ("loss", "grad_norm", "learning_rate")} for row in found.state.log_history if "loss" in row
    ]
    return {"parameters": {n: p.detach().clone() for n, p in found.model.named_parameters()}, "log": log}
