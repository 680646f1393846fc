"""accelerate's loop as its documentation shows it: prepare, accumulate, backward."""

import tiny
import torch
import transformers_trainer as family
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

SWITCHES = ("gather-labels",)  # as "gradient accumulation with models that have several tokens" in its documentation


def plain(args):
    args.moe = args.lora = False
    return family.plain(args)


truth = family.truth


def main():
    args = tiny.options(*SWITCHES)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    model: LlamaForCausalLM = plain(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tiny.Text(args.uneven), batch_size=2))
    batches = iter(loader)
    for _ in range(args.steps):
        micros = [next(batches) for _ in range(args.accumulate)]
        count = accelerator.gather(sum((b["labels"][:, 1:] != -100).sum() for b in micros)).sum()
        for b in micros:
            with accelerator.accumulate(model):
                if args.gather_labels:
                    loss = model(**b, num_items_in_batch=count).loss
                    loss = loss * accelerator.num_processes * args.accumulate
                else:
                    loss = model(**b).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
