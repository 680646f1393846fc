"""What the survey's programs share: a small language model and random text. Nothing is downloaded.

Even: every row has the same number of labels. Uneven: a row has labels only behind a prompt of random length, so that
ranks and micro-batches have different numbers of them.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, LENGTH, ROWS, HIDDEN, HEADS = 64, 12, 3, 16, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (p(x).view(rows, length, -1, HIDDEN // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(HIDDEN), Attention(), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers=2, vocab=VOCAB):
        super().__init__()
        self.embed = nn.Embedding(vocab, HIDDEN)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(layers)})
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, vocab)

    def forward(self, x):
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def model(layers=2, vocab=VOCAB):
    torch.manual_seed(0)
    return Model(layers, vocab)


def text(index, uneven, rows=ROWS, length=LENGTH, vocab=VOCAB):
    """(tokens, labels) number `index`: the rows of one micro-batch."""
    generator = torch.Generator().manual_seed(1000 + index)
    ids = torch.randint(vocab, (rows, length + 1), generator=generator)
    prompt = torch.randint(1, length, (rows, 1), generator=generator) if uneven else 0
    return ids[:, :-1], ids[:, 1:].masked_fill(torch.arange(length) < prompt, -100)


class Text(torch.utils.data.Dataset):
    """The same rows one by one, as libraries with a data loader of their own want them."""

    def __init__(self, uneven, rows=64, length=LENGTH):
        self.tokens, self.labels = text(0, uneven, rows, length)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, row):
        return {"input_ids": self.tokens[row], "labels": self.labels[row]}


def options(*more, steps=6):
    """The arguments that all programs have; `more`: names of switches of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=steps)
    for name in more:
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def summed(logits, labels):
    """(sum of the losses, number of labels): what truths are made of."""
    flat = labels.flatten()
    return F.cross_entropy(logits.flatten(0, 1), flat, reduction="sum"), int((flat != -100).sum())
