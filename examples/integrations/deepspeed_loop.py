"""A loop of DeepSpeed with gradient accumulation, on random text: each label weighs the same.

    torchrun --nproc-per-node 2 examples/integrations/deepspeed_loop.py

Each loss is the mean over its own labels, and weighs as many: on any number of ranks, the gradient is that of the mean
over all labels of a step.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from isograd.integrations import deepspeed

VOCAB, LENGTH, IGNORED = 101, 24, -100
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
}


def dataset(rows):
    """Each row has labels only behind a prompt of random length."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)
    prompt = torch.randint(LENGTH - 1, (rows, 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompt, IGNORED)
    return TensorDataset(text[:, :-1], labels)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCAB))
    engine, _, loader, _ = deepspeed.initialize(model=model, config=CONFIG, training_data=dataset(64))

    for epoch in range(3):
        for inputs, labels in loader:
            logits = engine(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
            engine.backward(loss, weight=(labels != IGNORED).sum())
            engine.step()
        if engine.global_rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, gradient norm {float(engine.get_global_grad_norm()):.3f}")


if __name__ == "__main__":
    main()
