"""Bugs of models that are cut over ranks: groups, adjoints, scales, orders, and gradients of what all ranks hold."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus import plain
from isograd_verify.corpus.pipeline import Seat, backwards, take_seat

HEADS, SIZE = 4, 4


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, SIZE))  # [batch, sequence, heads, size]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, sequence, heads, size] each; a single key/value head serves all query heads."""
    q, k, v = (x.expand_as(q).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def swapped(x: Tensor) -> Tensor:
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous())
    return received


exchange = plain.move(swapped, swapped)  # x[r] goes to rank r; result[r] came from rank r: its own inverse


class ToHeads(nn.Module):
    """My part of the sequence with all heads -> the whole sequence with my heads."""

    def forward(self, x: Tensor) -> Tensor:
        to = x.unflatten(2, (dist.get_world_size(), -1)).movedim(2, 0)  # [rank, batch, part, heads / cp, size]
        return exchange(to).movedim(0, 1).flatten(1, 2)  # [batch, sequence, heads / cp, size]


class ToSequence(nn.Module):
    """The whole sequence with my heads -> my part of the sequence with all heads."""

    reshaped = False

    def forward(self, x: Tensor) -> Tensor:
        to = x.unflatten(1, (dist.get_world_size(), -1)).movedim(1, 0)  # [rank, batch, part, heads / cp, size]
        received = exchange(to)
        if self.reshaped:
            return received.reshape(plain.BATCH, -1, HEADS, SIZE)  # from [rank, batch, part, heads / cp, size]
        return received.movedim(0, 2).flatten(2, 3)  # [batch, part, heads, size]


class Attention(nn.Module):
    def __init__(self, groups: int = HEADS) -> None:
        super().__init__()
        self.embed = nn.Embedding(plain.VOCAB, plain.HIDDEN)
        self.q = nn.Linear(plain.HIDDEN, HEADS * SIZE, bias=False)
        self.k = nn.Linear(plain.HIDDEN, groups * SIZE, bias=False)
        self.v = nn.Linear(plain.HIDDEN, groups * SIZE, bias=False)
        self.o = nn.Linear(HEADS * SIZE, plain.HIDDEN, bias=False)
        self.head = nn.Linear(plain.HIDDEN, plain.VOCAB)

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))  # [batch, sequence, heads / tp, size]
        return attend(q, k, v)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + plain.summed(self.o(self.mixed(plain.copied(x)).flatten(-2))))


class UlyssesModel(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.to_heads, self.to_sequence = ToHeads(), ToSequence()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # [batch, part of the sequence, hidden]
        q, k, v = (self.to_heads(heads(layer(x))) for layer in (self.q, self.k, self.v))
        return self.head(x + self.o(self.to_sequence(attend(q, k, v)).flatten(-2)))


@plain.program("cp2 ulysses", "cp")
def ulysses_scale(bug: bool, seed: int) -> None:
    """Gradients over the sequence-parallel ranks are averaged where they should be summed: the loss is divided by the
    labels of the whole step already, so every rank's gradient is a summand."""
    model = plain.seeded(UlyssesModel, seed)
    for _ in plain.over_sequences(model, seed):
        plain.all_reduce_gradients(model)
        for parameter in model.parameters() if bug else ():
            parameter.grad.div_(dist.get_world_size())


@plain.program("cp2 ulysses", "cp", "")
def ulysses_permute(bug: bool, seed: int) -> None:
    """After the second all-to-all the pieces are reshaped where they should first be transposed."""
    model = plain.seeded(UlyssesModel, seed)
    model.to_sequence.reshaped = bug
    for _ in plain.over_sequences(model, seed):
        plain.all_reduce_gradients(model)


@plain.program("tp2", "tp", r"^(embed|up)\.")
def gather_backward_sum(bug: bool, seed: int) -> None:
    """The backward of an all-gather sums over the ranks, though what follows is the same on each.

    A reduce-scatter is the adjoint of an all-gather whose copies are used differently."""
    model = plain.seeded(plain.GatheredMlp, seed)
    model.gather = plain.gathered if bug else plain.joined
    for _ in plain.backwards(model, seed):
        pass


@plain.program("tp2", "tp", r"^(embed|up)\.")
def cut_graph(bug: bool, seed: int) -> None:
    """Dist.all_gather is called in forward on a tensor that needs a gradient, and has no backward: what the list
    receives are constants."""
    model = plain.seeded(plain.GatheredMlp, seed)
    model.gather = plain.gather if bug else plain.joined
    for _ in plain.backwards(model, seed):
        pass


def shifted(ids: Tensor) -> Tensor:
    """What each token should predict, the next one; the last has none."""
    return F.pad(ids[:, 1:], (0, 1), value=-100)


@plain.program("cp2 ulysses", "cp", "")
def border_labels_lost(bug: bool, seed: int) -> None:
    """Labels are shifted by one after the sequence was cut, inside each rank's part of it, as by a transformers model
    that is given its shard: the last token of every shard has no next one there."""
    model = plain.seeded(UlyssesModel, seed)
    for step in plain.steps(model):
        tokens, ids = plain.batch(seed + step)
        labels = shifted(plain.mine(ids, 1)) if bug else plain.mine(shifted(ids), 1)
        (plain.cross_entropy(model(plain.mine(tokens, 1)), labels) / plain.total(plain.valid(labels))).backward()
        plain.all_reduce_gradients(model)


class Model(plain.ShardedMlp):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.25)

    def body(self, tokens: Tensor) -> Tensor:
        return self.block(self.dropout(self.embed(tokens)))


@plain.program("tp2", "tp", "")
def norm_dropout_rng(bug: bool, seed: int) -> None:
    """Ranks that hold copies of the residual stream drop different elements of it: their random states differ."""
    model = plain.seeded(Model, seed)
    for step in plain.steps(model):
        tokens, labels = plain.batch(seed + step)
        torch.manual_seed(100 * seed + step + (50 * dist.get_rank() if bug else 0))
        (plain.cross_entropy(model(tokens), labels) / plain.valid(labels)).backward()


class Grouped(Attention):
    """Four query heads are cut over the ranks; the one key/value head is on all of them."""

    def shard(self) -> None:
        self.q, self.o = plain.cut(self.q, 0), plain.cut(self.o, 1)


@plain.program("tp2", "tp", r"^[kv]\.")
def kv_replica_unreduced(bug: bool, seed: int) -> None:
    """There are more tensor-parallel ranks than key/value heads: each rank's copy of one serves other query heads."""
    model = plain.seeded(Grouped, seed, 1)
    for _ in plain.backwards(model, seed):
        if not bug:
            dist.all_reduce(model.k.weight.grad)
            dist.all_reduce(model.v.weight.grad)


class HeadNormed(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)

    def shard(self) -> None:
        self.q, self.k, self.v = (plain.cut(layer, 0) for layer in (self.q, self.k, self.v))
        self.o = plain.cut(self.o, 1)

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        return attend(self.q_norm(q), self.k_norm(k), v)


@plain.program("tp2", "tp", r"^[qk]_norm\.")
def qknorm_unreduced(bug: bool, seed: int) -> None:
    """One weight normalises the queries (keys) of all heads, but each rank knows its own heads only."""
    model = plain.seeded(HeadNormed, seed)
    for _ in plain.backwards(model, seed):
        if not bug:
            dist.all_reduce(model.q_norm.weight.grad)
            dist.all_reduce(model.k_norm.weight.grad)


def scatter(seat: Seat, bug: bool) -> None:
    """Means over the data ranks, in place, of a buffer of two equal halves."""
    named = dict(seat.model.named_parameters())
    tied = named.pop("embed.weight")
    if not bug:
        dist.all_reduce(tied.grad, group=seat.tie_group)
    half = tied.numel()
    assert tied.grad is not None
    rest = torch.cat([p.grad.flatten() for p in named.values() if p.grad is not None])
    rest = F.pad(rest, (0, half - len(rest)))
    parts = (rest, tied.grad.flatten()) if seat.first else (tied.grad.flatten(), rest)
    buffer = torch.cat(parts)
    mine = slice(seat.data * half, (seat.data + 1) * half)
    mean = buffer.clone()
    dist.all_reduce(mean, group=seat.data_group)
    buffer[mine] = mean[mine] / seat.datas
    front, back = buffer.split(half)
    tied.grad.copy_((back if seat.first else front).view_as(tied))
    if bug:
        dist.all_reduce(tied.grad, group=seat.tie_group)
    at = 0
    for parameter in named.values():
        assert parameter.grad is not None
        parameter.grad.copy_((front if seat.first else back)[at : at + parameter.numel()].view_as(parameter))
        at += parameter.numel()


@plain.program("pp2 dp2", "pp", r"^embed\.", world=4)
def tie_after_scatter(bug: bool, seed: int) -> None:
    """A tied weight is summed over its stages after its gradient was scattered to different owners.

    The weight lies at the end of the first stage's buffer and at the front of the last one's, so that the
    reduce-scatter, in place, leaves its sum on another data rank of each (examples/tied_pipeline.py, step by step)."""
    seat = take_seat(seed)
    for step in plain.steps(seat.model):
        backwards(seat, seed + step, 2, last=seat.datas)
        if seat.stages > 1:
            scatter(seat, bug)
            for name, parameter in seat.model.named_parameters():  # from its owner, as a sharded optimizer would step
                assert parameter.grad is not None
                owner = int(seat.first == (name == "embed.weight"))
                dist.broadcast(parameter.grad, seat.stage * seat.datas + owner, group=seat.data_group)


class RowLinear(nn.Linear):
    """Cut over its inputs; the bias is whole on every rank. The outputs are summed here."""

    bias_on_every_rank = False

    def forward(self, x: Tensor) -> Tensor:
        if self.bias_on_every_rank:
            return plain.summed(F.linear(x, self.weight, self.bias))
        return plain.summed(F.linear(x, self.weight)) + self.bias


class Biased(plain.Mlp):
    down: RowLinear

    def __init__(self) -> None:
        super().__init__()
        self.down = RowLinear(plain.INNER, plain.HIDDEN)

    def shard(self) -> None:
        self.up = plain.cut(self.up, 0)
        self.down.weight = nn.Parameter(plain.mine(self.down.weight.detach(), 1))

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(plain.copied(self.norm(x)))))


@plain.program("tp2", "tp", "")
def bias_n_times(bug: bool, seed: int) -> None:
    """A row-parallel linear adds its bias on every rank, and then the outputs are summed over the ranks."""
    model = plain.seeded(Biased, seed)
    model.down.bias_on_every_rank = bug
    for _ in plain.backwards(model, seed):
        pass


class Normed(plain.ShardedMlp):
    """Tokens are cut along the sequence outside of the two linear layers, which are cut along their features."""

    def block(self, x: Tensor) -> Tensor:
        whole = plain.gathered(self.norm(x), 1)
        mine: Tensor = plain.scattered(self.down(F.gelu(self.up(whole))), 1)
        return x + mine  # [batch, sequence / tp, hidden]


@plain.program("tp2 sp", "tp", r"norm\.")
def norm_unreduced(bug: bool, seed: int) -> None:
    """Under sequence parallelism a norm sees this rank's tokens only, and nobody sums its gradient."""
    model = plain.seeded(Normed, seed)
    for _ in plain.over_sequences(model, seed):
        for name, parameter in model.named_parameters():
            cut_over_ranks = name.startswith(("up", "down"))
            if not cut_over_ranks and not (bug and name.startswith("norm")):
                dist.all_reduce(parameter.grad)
