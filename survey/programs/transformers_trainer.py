"""transformers' Trainer on a tiny random model, as its documentation shows it, with each of the usual arguments."""

import tempfile

import tiny
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

SWITCHES = ("moe", "average-per-rank", "lora", "checkpointing")


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


def truth(model, batch):
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    made = model(input_ids=batch["input_ids"])
    aux = [] if getattr(made, "aux_loss", None) is None else [model.config.router_aux_loss_coef * made.aux_loss]
    return *tiny.summed(made.logits, labels), *aux


def main():
    args = tiny.options(*SWITCHES)
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            output_dir=place, use_cpu=True, max_steps=args.steps, per_device_train_batch_size=2,
            gradient_accumulation_steps=args.accumulate, average_tokens_across_devices=not args.average_per_rank,
            gradient_checkpointing=args.checkpointing, save_strategy="no", report_to="none", disable_tqdm=True,
            logging_steps=1,
        )  # fmt: skip
        Trainer(plain(args), arguments, train_dataset=tiny.Text(args.uneven)).train()


if __name__ == "__main__":
    main()
