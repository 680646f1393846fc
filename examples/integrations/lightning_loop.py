"""A LightningModule with gradient accumulation, on random text: each label weighs the same.

    torchrun --nproc-per-node 2 examples/integrations/lightning_loop.py

Each loss is the mean over its own labels, and weighs as many: on any number of ranks, the gradient is that of the mean
over all labels of a step.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from isograd.integrations import LightningStrategy

VOCAB, LENGTH, IGNORED = 101, 24, -100


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCAB))

    def training_step(self, batch, _):
        inputs, labels = batch
        loss = F.cross_entropy(self.net(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss, "weight": (labels != IGNORED).sum()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def dataset(rows):
    """Each row has labels only behind a prompt of random length."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)
    prompt = torch.randint(LENGTH - 1, (rows, 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompt, IGNORED)
    return TensorDataset(text[:, :-1], labels)


def main():
    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False, enable_model_summary=False,
        strategy=LightningStrategy("dp2 zero1"),
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(dataset(64), batch_size=4))


if __name__ == "__main__":
    main()
