"""DeepSpeed's example of a pipeline, AlexNet as a list of layers, on random images of ten patterns.

    torchrun --nproc-per-node 4 examples/integrations/deepspeed_pipeline.py

Two stages, of two data ranks each. The images are small and the layers narrow: it runs on CPUs in seconds.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from isograd.integrations import deepspeed
from isograd.integrations.deepspeed.pipe import LayerSpec, PipelineModule

CLASSES = 10
CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "betas": [0.9, 0.999], "eps": 1e-8}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}


class AlexNetPipe(PipelineModule):
    def __init__(self, num_classes=CLASSES, dropout=0.5, **kwargs):
        self.num_classes = num_classes
        specs = [
            LayerSpec(nn.Conv2d, 3, 8, kernel_size=5, stride=2, padding=2),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.MaxPool2d, kernel_size=3, stride=2),
            LayerSpec(nn.Conv2d, 8, 24, kernel_size=3, padding=1),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.Conv2d, 24, 32, kernel_size=3, padding=1),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.Conv2d, 32, 32, kernel_size=3, padding=1),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.MaxPool2d, kernel_size=3, stride=2),
            LayerSpec(nn.AdaptiveAvgPool2d, (3, 3)),
            lambda x: x.view(x.size(0), -1),
            LayerSpec(nn.Dropout, dropout),
            LayerSpec(nn.Linear, 32 * 3 * 3, 128),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.Dropout, dropout),
            LayerSpec(nn.Linear, 128, 64),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.Linear, 64, self.num_classes),
        ]
        super().__init__(layers=specs, loss_fn=nn.CrossEntropyLoss(), **kwargs)


def dataset(rows):
    """A pattern for each class, and noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, 32, 32, generator=generator)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    return TensorDataset(patterns[labels] + torch.randn(rows, 3, 32, 32, generator=generator), labels)


def train(net, rows, steps):
    engine, _, _, _ = deepspeed.initialize(
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=dataset(rows),
        config=CONFIG,
    )
    losses = []
    for step in range(steps):
        losses.append(engine.train_batch().item())
        if engine.global_rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    deepspeed.init_distributed()
    torch.manual_seed(1138)
    train(AlexNetPipe(num_stages=2, partition_method="parameters"), rows=512, steps=60)
