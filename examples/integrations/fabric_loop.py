"""A loop of Lightning's Fabric with gradient accumulation, on random text: each label weighs the same.

    torchrun --nproc-per-node 2 examples/integrations/fabric_loop.py

Each loss is the mean over its own labels, and weighs as many: on any number of ranks, the gradient is that of the mean
over all labels of a step.
"""

import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from isograd.integrations import FabricStrategy

VOCAB, LENGTH, IGNORED, MICROS = 101, 24, -100, 2


def dataset(rows):
    """Each row has labels only behind a prompt of random length."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)
    prompt = torch.randint(LENGTH - 1, (rows, 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompt, IGNORED)
    return TensorDataset(text[:, :-1], labels)


def main():
    seed_everything(0)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy=FabricStrategy("zero1"))
    fabric.launch()
    model = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCAB))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(dataset(64), batch_size=4, shuffle=True))

    for epoch in range(3):
        for number, (inputs, labels) in enumerate(loader):
            accumulates = (number + 1) % MICROS != 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
                fabric.backward(loss, weight=(labels != IGNORED).sum())
            if not accumulates:
                norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")


if __name__ == "__main__":
    main()
