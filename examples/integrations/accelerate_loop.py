"""A loop of accelerate with gradient accumulation, on random text: each label weighs the same.

    torchrun --nproc-per-node 2 examples/integrations/accelerate_loop.py

Each loss is the mean over its own labels, and weighs as many: on any number of ranks, the gradient is that of the mean
over all labels of a step.
"""

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from isograd.integrations import Accelerator

VOCAB, LENGTH, IGNORED = 101, 24, -100


def dataset(rows):
    """Each row has labels only behind a prompt of random length."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)
    prompt = torch.randint(LENGTH - 1, (rows, 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompt, IGNORED)
    return TensorDataset(text[:, :-1], labels)


def main():
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader = DataLoader(dataset(64), batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    for epoch in range(3):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
                accelerator.backward(loss, weight=(labels != IGNORED).sum())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")


if __name__ == "__main__":
    main()
