"""transformers' Trainer on two ranks, with a small random Mixtral and its balance loss: nothing is downloaded.

    torchrun --nproc-per-node 2 examples/unmodified/hf_moe_trainer.py [--accumulate 2]

The Trainer divides the loss of the labels by those of all ranks and micro-batches, and multiplies the whole loss by the
number of ranks, because DDP averages. In transformers 5.23 the balance loss (output_router_logits=True), a mean on each
rank already, is multiplied, too, and nothing divides it by the number of micro-batches: transformers issue 48690.
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments, set_seed

VOCAB, LENGTH = 101, 24


class Text(Dataset):
    """Random text; each row has labels only behind a prompt of random length."""

    def __init__(self, rows):
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
        prompt = torch.randint(LENGTH - 1, (rows, 1), generator=generator)
        self.labels = self.text.masked_fill(torch.arange(LENGTH) < prompt, -100)

    def __len__(self):
        return len(self.text)

    def __getitem__(self, row):
        return {"input_ids": self.text[row], "labels": self.labels[row]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()

    set_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=LENGTH,
        output_router_logits=True, router_aux_loss_coef=0.02,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=args.accumulate,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(MixtralForCausalLM(config), arguments, train_dataset=Text(64)).train()


if __name__ == "__main__":
    main()
