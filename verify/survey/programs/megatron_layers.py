"""Megatron-Core's tensor-parallel layers and cross entropy on gloo: vocabulary-parallel embedding, attention whose
heads are divided, MLP, vocabulary-parallel head, and the mean over a micro-batch's labels that its schedules take."""

import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from torch import nn

SWITCHES = ("per-token",)  # as calculate_per_token_loss: sums, divided by the labels of the step
WIDTH, HEADS = 16, 4


def READERS(world):
    return [0]


def fill(weight):
    with torch.no_grad():
        generator = torch.Generator().manual_seed(weight.size(0))
        return weight.copy_(torch.randn(weight.shape, generator=generator) / 4)


class Layers:
    """What makes a layer: Megatron's of the ranks, or torch's of one process, with equal weights."""

    def __init__(self, config=None):
        self.how = {"config": config, "init_method": fill}
        self.parallel = config is not None

    def whole(self, layer):
        fill(layer.weight)
        if getattr(layer, "bias", None) is not None:
            nn.init.zeros_(layer.bias)
        return layer

    def embedding(self):
        if self.parallel:
            return VocabParallelEmbedding(tiny.VOCAB, WIDTH, **self.how)
        return self.whole(nn.Embedding(tiny.VOCAB, WIDTH))

    def column(self, size, bias=True):
        if self.parallel:
            return ColumnParallelLinear(WIDTH, size, bias=bias, gather_output=False, **self.how)
        return self.whole(nn.Linear(WIDTH, size, bias))

    def row(self, size):
        if self.parallel:
            return RowParallelLinear(size, WIDTH, bias=True, input_is_parallel=True, skip_bias_add=False, **self.how)
        return self.whole(nn.Linear(size, WIDTH))


def output(made):
    return made[0] if isinstance(made, tuple) else made  # Megatron's linear layers return their bias, too


class Block(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (layers.column(WIDTH) for _ in range(3))
        self.o, self.up, self.down = layers.row(WIDTH), layers.column(4 * WIDTH), layers.row(4 * WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        h = self.norm1(x)
        parts = (output(p(h)).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(rows, length, -1)
        x = x + output(self.o(y))
        return x + output(self.down(F.gelu(output(self.up(self.norm2(x))))))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed, self.blocks = layers.embedding(), nn.ModuleList(Block(layers) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), layers.column(tiny.VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return output(self.head(self.norm(x)))


def plain(args):
    return Model(Layers())


def batch(rank, world, micro, args):
    return tiny.text(micro, args.uneven)


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def gradients(models):
    found = {}
    for name, parameter in next(iter(models)).named_parameters():
        found[name] = parameter.grad
        if getattr(parameter, "tensor_model_parallel", False):
            parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, parameter.grad)
            found[name] = torch.cat(parts, parameter.partition_dim)
    return found


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    model = Model(Layers(ModelParallelConfig(tensor_model_parallel_size=world, use_cpu_initialization=True)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        micros = [batch(0, 1, step * args.accumulate + i, args) for i in range(args.accumulate)]
        labels = sum(int((targets != -100).sum()) for _, targets in micros)
        for ids, targets in micros:
            mask = (targets != -100).float()
            losses = vocab_parallel_cross_entropy(model(ids), targets.clamp(min=0))
            total = (losses * mask).sum()
            (total / labels if args.per_token else total / mask.sum() / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
