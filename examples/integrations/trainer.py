"""transformers' Trainer on two ranks, with a small random GPT-2: nothing is downloaded.

    torchrun --nproc-per-node 2 examples/integrations/trainer.py --isograd "dp2 zero1"

By default the Trainer counts a step's labels over all devices (average_tokens_across_devices). --average-per-rank
turns that off, and a label then weighs more on a rank that has few of them.
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import isograd as ig

Trainer = ig.integrations.trainer(Trainer)

VOCAB, LENGTH = 101, 24


class Prompts(Dataset):
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
    parser.add_argument("--average-per-rank", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    set_seed(0)
    # As for any pretraining from scratch with dropout 0; the rest are GPT-2's own settings, made small.
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            average_tokens_across_devices=not args.average_per_rank,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Prompts(64)).train()


if __name__ == "__main__":
    main()
