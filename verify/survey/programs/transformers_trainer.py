"""transformers' Trainer on a tiny random model, as its documentation shows it, with each of the usual arguments."""

import sys
import tempfile

import tiny
import torch
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

SWITCHES = ("moe", "average-per-rank", "lora", "checkpointing", "smoothing")
SMOOTH, SMOOTHING = "--smoothing", 0.1


def plain(args):
    set_seed(0)
    small = {
        "vocab_size": tiny.VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    if args.moe:
        model = MixtralForCausalLM(
            MixtralConfig(**small, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.02)
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**small))
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model


def labels_of(batch):
    """With smoothing, Trainer takes the labels out of what it gives to the model."""
    text = tiny.Text("--uneven" in sys.argv)
    return torch.stack([text.labels[(text.tokens == ids).all(1)][0] for ids in batch["input_ids"]])


def truth(model, batch):
    labels = F.pad(batch["labels"] if "labels" in batch else labels_of(batch), (0, 1), value=-100)[:, 1:]
    made = model(input_ids=batch["input_ids"])
    aux = [] if getattr(made, "aux_loss", None) is None else [model.config.router_aux_loss_coef * made.aux_loss]
    loss, count = tiny.summed(made.logits, labels)
    if SMOOTH in sys.argv:
        uniform = -made.logits.log_softmax(-1)[labels != -100].mean(-1).sum()
        loss = (1 - SMOOTHING) * loss + SMOOTHING * uniform
    return loss, count, *aux


def main():
    args = tiny.options(*SWITCHES)
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            output_dir=place, use_cpu=True, max_steps=args.steps, per_device_train_batch_size=2,
            gradient_accumulation_steps=args.accumulate, average_tokens_across_devices=not args.average_per_rank,
            gradient_checkpointing=args.checkpointing, save_strategy="no", report_to="none", disable_tqdm=True,
            logging_steps=1, label_smoothing_factor=SMOOTHING if args.smoothing else 0.0,
        )  # fmt: skip
        Trainer(plain(args), arguments, train_dataset=tiny.Text(args.uneven)).train()


if __name__ == "__main__":
    main()
