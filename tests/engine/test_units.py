"""ZeRO 3 gathers each block when it is used, in whatever order models call them: one device's gradients, ZeRO 1's bits.

Every case trains two steps at zero1, at zero3 and at zero3 with keep_gathered, on uneven data with one empty rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isograd.comm.record import recording
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.engine.plan import cut_rows

from . import toys

WIDTH = 24
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp2 zero1", {}),
    ("dp2 zero3", {}),
    ("dp2 zero3", {"keep_gathered": True}),
)


@dataclass
class Wrapped:
    """What no list or tuple is: some models return their own classes."""

    stream: Tensor
    seen: int


class Block(nn.Module):
    """Residual; with a scalar, and a frozen layer that backward must pass through."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.frozen = nn.Linear(WIDTH, inner), nn.Linear(inner, inner).requires_grad_(False)
        self.down, self.gain = nn.Linear(inner, WIDTH, bias=False), nn.Parameter(torch.tensor(0.7))
        self.plain = False  # without the gain

    def forward(self, x: Tensor) -> Wrapped:
        fed = self.down(torch.tanh(self.frozen(torch.tanh(self.up(x)))))
        return Wrapped(x + (fed if self.plain else self.gain * fed), len(x))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(13, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for inner in (40, 33, 17))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.shift, self.empty = nn.Parameter(torch.full((1,), 0.1)), nn.Parameter(torch.empty(0, WIDTH))
        self.reentrant: bool | None = None
        self.double()

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> dict[str, Tensor]:
        x = self.first(x) + self.shift + self.empty.sum(0)
        for number in order:
            if self.reentrant is None:
                x = self.blocks[number](x).stream
            else:
                x = checkpoint(lambda t, n=number: self.blocks[n](t).stream, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return {"output": self.head(self.norm(x))}


Backward = Callable[[Tensor, int], None]
Play = Callable[
    [nn.Module, int, int, Backward], None
]  # (model, step, rank, backward): forwards and backwards of a step


def loss_of(model: nn.Module, step: int, index: int, order: tuple[int, ...] = (0, 1, 2)) -> tuple[Tensor, int]:
    x, y = toys.micro_batch(step, index)
    return F.mse_loss(model(x, order)["output"], y), len(x)


def orders(of_steps: tuple[tuple[int, ...], ...], model: nn.Module, step: int, rank: int, backward: Backward) -> None:
    for index in (rank, rank + 2):
        backward(*loss_of(model, step, index, of_steps[step]))


def two_forwards(first: int, model: nn.Module, step: int, rank: int, backward: Backward) -> None:
    """Both forwards before both backwards; `first`: which backward comes first."""
    losses = [loss_of(model, step, rank + 2), loss_of(model, step, rank + 4, (1, 0, 2))]
    backward(*losses[first])
    backward(*losses[1 - first])


def one_backward_of_two(model: nn.Module, step: int, rank: int, backward: Backward) -> None:
    (a, n), (b, m) = loss_of(model, step, rank + 2), loss_of(model, step, rank + 4)
    backward((a * n + b * m) / (n + m), n + m)


def evaluated_between(model: nn.Module, step: int, rank: int, backward: Backward) -> None:
    loss, rows = loss_of(model, step, rank + 2)
    with torch.no_grad():
        loss_of(model, step, rank)
        loss_of(model, step, rank, (2, 1))
    backward(loss, rows)


def never_backward(model: nn.Module, step: int, rank: int, backward: Backward) -> None:
    """A forward with a graph that is thrown away, before the backward and after it."""
    loss_of(model, step, rank)
    backward(*loss_of(model, step, rank + 2))
    loss_of(model, step, rank)


def left_out_on_one_rank(model: nn.Module, step: int, rank: int, backward: Backward) -> None:
    """A parameter of each block whose gradient never comes on rank 1: its bucket leaves when rank 0's does."""
    for block in model.blocks:
        block.plain = rank == 1
    backward(*loss_of(model, step, rank + 2))


PLAYS: dict[str, Play] = {
    "in order": partial(orders, ((0, 1, 2), (0, 1, 2))),
    "one block twice": partial(orders, ((0, 1, 0), (0, 1, 0))),
    "blocks again and again": partial(orders, ((0, 1, 2, 1, 0, 2, 0), (0, 0, 1, 2, 2))),
    "another order": partial(orders, ((0, 1, 2), (2, 0, 1))),
    "one left out": partial(orders, ((0, 1, 2), (0, 2))),
    "two forwards, first backward first": partial(two_forwards, 0),
    "two forwards, last backward first": partial(two_forwards, 1),
    "one backward of two forwards": one_backward_of_two,
    "an evaluation in between": evaluated_between,
    "forwards without backward": never_backward,
    "a parameter left out on one rank": left_out_on_one_rank,
}


def one_device(play: Play) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(gradients of the first step, parameters after the second), in plain torch."""
    model, gradients = Chain(), {}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        rows = 0

        def backward(loss: Tensor, weight: int) -> None:
            nonlocal rows
            rows += weight
            if weight:
                (loss * weight).backward()

        optimizer.zero_grad()
        for rank in range(2):
            play(model, step, rank, backward)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= rows
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return gradients, {n: p.detach().clone() for n, p in model.named_parameters()}


def on_engine(
    play: Play,
    layout: str,
    options: dict[str, Any],
    prepare: Callable[[Chain], None] | None = None,
    before: bool = True,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    mesh, model, gradients = Mesh(layout), Chain(), {}
    if prepare and before:
        prepare(model)
    engine = Engine(model, mesh, toys.adamw, bucket_mb=0.01, **options)
    if prepare and not before:
        prepare(model)
    for step in range(2):
        play(model, step, mesh.rank, lambda loss, weight: engine.backward(loss, weight=weight))
        if step == 0:
            gradients = {name: g.clone() for name, g in engine.grads().items()}
        engine.step()
    with engine.full_parameters():
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    left = [name for name, p in model.named_parameters() if "zero3" in layout and not bool(p.isnan().all())]
    assert not left, f"whole outside of a forward: {left}"
    return gradients, parameters


def all_variants(play: Play, prepare: Any = None, before: bool = True) -> list[Any]:
    return [on_engine(play, layout, options, prepare, before) for layout, options in VARIANTS]


def plain_names(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in named.items()}


def assert_right(results: list[list[Any]], play: Play, same_bits: bool = True) -> None:
    truth = one_device(play)
    for result in results:
        for found in result:
            for expected, here in zip(truth, map(plain_names, found), strict=True):
                for name, value in expected.items():
                    error = float((here[name] - value).norm())
                    assert error <= 1e-9 * float(value.norm()), f"{name}: error {error:.2e}"
        first, *others = result
        for other in others if same_bits else ():
            for a, b in zip(first, other, strict=True):
                toys.assert_same_bits(plain_names(a), plain_names(b))


@pytest.mark.parametrize("play", PLAYS.values(), ids=PLAYS)
def test_blocks_may_be_called_in_any_way(worlds, play: Play) -> None:
    assert_right(worlds(2).run(all_variants, play), play)


def recomputing(reentrant: bool, model: Chain) -> None:
    model.reentrant = reentrant


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["in order", "blocks again and again"])
def test_recompute_gathers_again(worlds, name: str, reentrant: bool) -> None:
    results = worlds(2).run(all_variants, PLAYS[name], partial(recomputing, reentrant))
    assert_right(results, PLAYS[name], same_bits=not reentrant)  # which adds up each use of a block by itself


def compile_in_place(model: Chain) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def compile_around(model: Chain) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager")


AROUND = pytest.param(compile_around, True, marks=pytest.mark.slow)


@pytest.mark.parametrize(("prepare", "before"), [(compile_in_place, False), AROUND])
def test_compiled_blocks_train_as_eager_ones_do(worlds, prepare: Any, before: bool) -> None:
    play = PLAYS["in order"]
    assert_right(worlds(2).run(all_variants, play, prepare, before), play)


# -- what is moved -----------------------------------------------------------------------------------------------


class Headed(nn.Module):
    """Six blocks and a root of the size of one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(320, 320) for _ in range(6)))
        self.head = nn.Linear(320, 320)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


def bytes_of_a_step(layout: str, options: dict[str, Any]) -> tuple[int, int]:
    """(sent by this rank in a forward and a backward, bytes of the parameters)."""
    mesh, model = Mesh(layout), Headed()
    engine = Engine(model, mesh, toys.sgd, bucket_mb=0.2, **options)
    x = torch.randn(5, 320)
    for _ in ("the first forward shows which block is the last", "this is counted"):
        with recording() as record:
            for _ in range(3):
                engine.backward(model(x).square().mean(), weight=5)
    sent = sum(entry.bytes for entry in record.entries if not entry.control)
    engine.step()
    return sent // 3, sum(p.numel() * p.itemsize for p in model.parameters())


@pytest.mark.medium
@pytest.mark.parametrize("ranks", [2, 4])
def test_three_times_the_blocks_and_twice_the_rest_cross_the_wire_or_twice_all_when_kept(worlds, ranks: int) -> None:
    """Of six blocks the last one is whole from its forward to its backward, which is the next thing that happens."""
    for options, times in (({}, (3 * 5 + 2 + 2) / 7), ({"keep_gathered": True}, 2)):
        results = worlds(ranks).run(bytes_of_a_step, f"dp{ranks} zero3", options)
        sent, whole = sum(r[0] for r in results) / ranks, results[0][1]
        assert abs(sent / (times * (ranks - 1) / ranks * whole) - 1) < 0.02


# -- outside of a forward ----------------------------------------------------------------------------------------


def memory(engine: Engine) -> list[int]:
    """Bytes of parameters that are whole."""
    assert engine._zero3 is not None
    return [param.now.full.untyped_storage().nbytes() for param in engine._zero3.params.values()]


class Stumbling(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.stumbles = True

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> dict[str, Tensor]:
        if self.stumbles:
            self.blocks[1](self.blocks[0](self.first(x)).stream)
            raise KeyError("stumbled")
        return super().forward(x, order)


def after_an_error(keep_gathered: bool) -> tuple[list[int], list[bool], bool]:
    mesh, model = Mesh("dp2 zero3"), Stumbling()
    engine = Engine(model, mesh, toys.sgd, keep_gathered=keep_gathered)
    model.stumbles = False
    engine.backward(*loss_of(model, 0, 2))
    model.stumbles = True
    with suppress(KeyError):
        loss_of(model, 0, 2)
    left = memory(engine)
    model.stumbles = False
    engine.backward(*loss_of(model, 0, 2))
    stats = engine.step()
    return left, [bool(p.isnan().all()) for p in model.parameters()], stats.skipped


@pytest.mark.parametrize("keep_gathered", [False, True])
def test_an_error_in_a_forward_leaves_nothing_whole(worlds, keep_gathered: bool) -> None:
    for left, absent, skipped in worlds(2).run(after_an_error, keep_gathered):
        assert not any(left)
        assert all(absent)
        assert not skipped


def edited(dtype: torch.dtype, layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float, bool]:
    """Train, look, edit one parameter, train on. Also: a forward inside, a nested look, and a backward inside."""
    mesh, model = Mesh(layout), Chain().to(dtype)
    engine = Engine(model, mesh, toys.sgd)

    def step() -> float:
        x, y = toys.micro_batch(0, mesh.rank + 2)
        engine.backward(F.mse_loss(model(x.to(dtype))["output"], y.to(dtype)), weight=len(x))
        return engine.step().loss

    step()
    masters = {name: m.detach().clone() for name, m in engine._sharded_optimizer.masters.items()}
    with engine.full_parameters(), torch.no_grad():
        model(torch.ones(2, 13, dtype=dtype))
        with engine.full_parameters():
            assert not any(bool(p.isnan().any()) for p in model.parameters())
        model.head.bias.add_(1.0)
    unedited = all(
        torch.equal(m, masters[name]) == (name != "head.bias")
        for name, m in engine._sharded_optimizer.masters.items()
        if m.numel()
    )
    with engine.full_parameters():
        loss = step()
    with engine.full_parameters():
        whole = {n: p.detach().clone() for n, p in model.named_parameters()}
    return whole, masters, loss, unedited


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_full_parameters_are_for_reading_and_editing(worlds, dtype: torch.dtype) -> None:
    truth = worlds(2).run(edited, dtype, "dp2 zero1")[0]
    for whole, _, loss, unedited in worlds(2).run(edited, dtype, "dp2 zero3"):
        toys.assert_same_bits({n: t.view(-1).view(torch.uint8) for n, t in whole.items()},
                              {n: t.view(-1).view(torch.uint8) for n, t in truth[0].items()})  # fmt: skip
        assert loss == truth[2]
        assert unedited
        assert truth[3]


def in_parts() -> tuple[Tensor, Tensor, bool, bool]:
    """Pieces of the model called by themselves, and what a parameter is outside of any."""
    mesh, model = Mesh("dp2 zero3"), Chain()
    x = torch.ones(2, 13, dtype=torch.float64)
    expected = Chain().head(Chain().norm(Chain().blocks[1](Chain().first(x)).stream))
    Engine(model, mesh, toys.sgd)
    with torch.no_grad():
        found = model.head(model.norm(model.blocks[1](model.first(x)).stream))
        outside = x @ model.first.weight.t()
    return found, expected.detach(), bool(outside.isnan().all()), bool(model.first.weight.isnan().all())


def test_pieces_gather_what_they_need_and_what_is_used_outside_of_them_is_nan(worlds) -> None:
    for found, expected, nan_outside, nan_after in worlds(2).run(in_parts):
        assert torch.equal(found, expected)
        assert nan_outside
        assert nan_after


def taken_over(layout: str) -> dict[str, Tensor]:
    mesh, model = Mesh(layout), Chain()
    for _ in range(3):
        engine = Engine(model, mesh, toys.adamw)
        engine.backward(*loss_of(model, 0, mesh.rank + 2))
        engine.step()
    with engine.full_parameters():
        return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.medium
def test_another_engine_takes_a_model_over(worlds) -> None:
    truth = worlds(2).run(taken_over, "dp2 zero1")[0]
    for found in worlds(2).run(taken_over, "dp2 zero3"):
        toys.assert_same_bits(found, truth)


def half(layout: str, keep_gathered: bool) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """bf16: what crosses the wire in forward, and the parameters after two steps as int16."""
    mesh, model = Mesh(layout), Chain().to(torch.bfloat16)
    engine = Engine(model, mesh, toys.adamw, keep_gathered=keep_gathered)
    seen: set[torch.dtype] = set()
    for step in range(2):
        x, y = toys.micro_batch(step, mesh.rank + 2)
        with recording() as record:
            output = model(x.bfloat16())["output"]
        sent = [messages for entry in record.entries if not entry.control for messages in entry.sent]
        seen.update(message.dtype for messages in sent for message in messages)
        engine.backward(F.mse_loss(output, y.bfloat16()), weight=len(x))
        engine.step()
    with engine.full_parameters():
        return {n: p.detach().view(-1).view(torch.int16).clone() for n, p in model.named_parameters()}, seen


@pytest.mark.medium
@pytest.mark.parametrize("keep_gathered", [False, True])
def test_bf16_parameters_are_gathered_in_bf16(worlds, keep_gathered: bool) -> None:
    truth, _ = worlds(2).run(half, "dp2 zero1", False)[0]
    for found, seen in worlds(2).run(half, "dp2 zero3", keep_gathered):
        toys.assert_same_bits(found, truth)
        assert seen == {torch.bfloat16}


class Kinds(nn.Module):
    """Blocks of large and small parameters, one of two dtypes, and a weight that two blocks have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, 600) for width in (600, 7, 600))
        self.norms = nn.ModuleList(nn.LayerNorm(600) for _ in range(3)).to(torch.float64)
        self.head = nn.Linear(600, 7, bias=False)
        self.again = nn.Parameter(torch.ones(1))
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](x)
        for norm, block in zip(self.norms, (self.blocks[0], self.blocks[2], self.blocks[0]), strict=True):
            x = block(norm(x.double()).float()) * self.again
        return self.head(x)  # type: ignore[no-any-return]


def weights_of_two_steps(layout: str) -> dict[str, Tensor]:
    mesh, model = Mesh(layout), Kinds()
    engine = Engine(model, mesh, toys.sgd)
    for step in range(2):
        x = torch.randn(3 + mesh.rank, 7, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
        engine.backward(model(x).square().mean(), weight=len(x))
        engine.step()
    with engine.full_parameters():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.medium
def test_blocks_of_two_dtypes_and_a_shared_weight_have_the_bits_of_zero1(worlds) -> None:
    truth = worlds(2).run(weights_of_two_steps, "dp2 zero1")[0]
    for found in worlds(2).run(weights_of_two_steps, "dp2 zero3"):
        toys.assert_same_bits(found, truth)


def shards_of_a_frozen_model() -> tuple[int, int, int]:
    """(bytes this rank keeps, bytes whole between steps, bytes of the model): nearly all of it frozen."""
    mesh, model = Mesh("dp4 zero3"), Chain()
    whole = sum(p.numel() * p.itemsize for p in model.parameters())
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.head.weight)
    engine = Engine(model, mesh, toys.sgd)
    engine.backward(*loss_of(model, 0, mesh.rank))
    engine.step()
    assert engine._zero3 is not None
    kept = sum(k.rows.untyped_storage().nbytes() for k in engine._zero3.params.values())
    return kept, sum(memory(engine)), whole


def test_frozen_parameters_are_sharded_too(worlds) -> None:
    results = worlds(4).run(shards_of_a_frozen_model)
    assert sum(kept for kept, _, _ in results) == results[0][2]
    shapes = [(p.shape, p.itemsize) for p in Chain().parameters()]
    for rank, (kept, _, _) in enumerate(results):  # its rows and no others; small tensors have one owner, the first
        cuts = [(cut_rows(shape, 4), shape[1:].numel() * size) for shape, size in shapes]
        assert kept == sum((rows[rank + 1] - rows[rank]) * width for rows, width in cuts)
    assert not any(left for _, left, _ in results)


def interleaved(layout: str, pattern: str, options: dict[str, Any]) -> dict[str, Tensor]:
    mesh, model = Mesh(layout), Chain()
    engine = Engine(model, mesh, toys.sgd, bucket_mb=0.01, **options)
    for j, kind in enumerate(pattern):
        loss, rows = loss_of(model, 0, 3 * mesh.rank + j)
        with engine.no_sync() if kind == "n" else nullcontext():
            engine.backward(loss, weight=rows)
    return {name: g.clone() for name, g in engine.grads().items()}


def interleavings(numbers: Sequence[int]) -> list[str]:
    """Patterns of synced (s) and unsynced (n) backwards in which zero3 differs from a lower stage."""
    unlike = []
    for number in numbers:
        pattern = "".join("sn"[number >> j & 1] for j in range(3))
        runs = {
            layout + str(options): interleaved(layout, pattern, options)
            for layout, options in (("dp2 zero0", {}), ("dp2 zero2", {}), *VARIANTS)
        }
        first = next(iter(runs.values()))
        unlike += [f"{pattern} {what}" for what, g in runs.items() if any(not torch.equal(g[n], first[n]) for n in g)]
    return unlike


@pytest.mark.parametrize("numbers", [(2, 5), pytest.param(range(8), marks=pytest.mark.slow, id="all")])
def test_synced_and_unsynced_backwards_mix_as_at_the_other_stages(worlds, numbers: Sequence[int]) -> None:
    assert worlds(2).run(interleavings, numbers) == [[], []]


class InPlace(nn.Module):
    """Changes what it was given, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.add_(torch.tanh(self.map(x.clone()))), y


class Passing(InPlace):
    """Returns what it was given beside what it has made."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.map(x)), y + x


class Ending(InPlace):
    """Ends with the call of a part that is a block as well."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.part(torch.tanh(self.map(x))), y


class Row(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 6)
        blocks: list[nn.Module] = [InPlace() if kind == "in place" else Passing() for _ in range(3)]
        if kind == "ending":
            part = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
            blocks = [Ending(part), Ending(part), *blocks]
        self.blocks = nn.ModuleList(blocks)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        pair = self.first(x), self.first(x).cos()
        for block in self.blocks:
            pair = block(*pair)
        return pair[0].square().mean() + pair[1].sin().mean()


def in_a_row(layout: str, kind: str) -> dict[str, Tensor]:
    mesh, model = Mesh(layout), Row(kind)
    engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    for number in range(2):
        rows = 2 + mesh.rank + number
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(10 * mesh.rank + number)).double()
        engine.backward(model(x), weight=rows)
    return {name: g.clone() for name, g in engine.grads().items()}


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["in place", "passing on", "ending"])
def test_a_block_is_freed_by_its_own_outputs(worlds, kind: str) -> None:
    model, weight = Row(kind), 0
    for rank in range(2):
        for number in range(2):
            rows = 2 + rank + number
            x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(10 * rank + number)).double()
            (model(x) * rows).backward()
            weight += rows
    for found in worlds(2).run(in_a_row, "dp2 zero3", kind):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            error = float((found[name] - parameter.grad / weight).norm())
            assert error <= 1e-12 * float(parameter.grad.norm()), name
