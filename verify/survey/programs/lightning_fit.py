"""Lightning's Trainer as its documentation shows it, with DDP and with FSDP2."""

import os
import tempfile

import lightning
import tiny
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

SWITCHES = ("fsdp2", "clip", "manual")
RENAME = [("model.", "")]


def truth(model, batch):
    return tiny.summed(model(batch["input_ids"]), batch["labels"])


class Module(lightning.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.model, self.args = tiny.model(), args
        self.automatic_optimization = not args.manual

    def configure_model(self):
        if self.args.fsdp2:
            for layer in self.model.layers.values():
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def forward(self, input_ids, labels):
        return tiny.loss(self.model(input_ids), labels)

    def training_step(self, batch, index):
        loss = self(**batch)
        if self.args.manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    args = tiny.options(*SWITCHES)
    strategy = DDPStrategy(process_group_backend="gloo")
    if args.fsdp2:
        strategy = ModelParallelStrategy(
            data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1, process_group_backend="gloo"
        )
    with tempfile.TemporaryDirectory() as place:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]),
            strategy=strategy, max_steps=args.steps, accumulate_grad_batches=args.accumulate,
            gradient_clip_val=1.0 if args.clip else None, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, default_root_dir=place,
        )  # fmt: skip
        trainer.fit(Module(args), DataLoader(tiny.Text(args.uneven), batch_size=2))


if __name__ == "__main__":
    main()
