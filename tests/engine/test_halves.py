"""A half-precision gradient that was made by one backward leaves in half precision: half the bytes, and the same bits
as in fp32, whatever the other ranks send."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isograd as ig
from isograd.comm import halves, raw
from isograd.comm.record import Entry
from isograd.engine.ledger import Ledger
from isograd.errors import EngineError
from isograd.models import TransformerConfig

from . import toys

WIDE, NARROW = 512, 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(NARROW), nn.Linear(NARROW, 90), nn.Linear(90, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks for ZeRO 3, a shared weight, many small parameters, one that travels alone, one of one element, and a
    layer that the last rank does not use."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(600, WIDE)
        self.shrink = nn.Linear(WIDE, NARROW)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.sometimes = nn.Linear(NARROW, NARROW)
        self.grow = nn.Linear(NARROW, WIDE)
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.to(dtype)

    def forward(self, tokens: Tensor, sometimes: bool) -> Tensor:
        x = self.shrink(self.table(tokens))
        for layer in self.layers:
            x = layer(x)
        x = self.sometimes(x) if sometimes else x
        return self.grow(x) * self.gain @ self.table.weight.T  # type: ignore[no-any-return]


@dataclass
class Run:
    values: dict[str, Tensor]  # gradients of the first step, and parameters, masters, losses and norms at the end
    entries: list[Entry]  # of gradients, in the last step


def fp32_loss(model: nn.Module, tokens: Tensor, rank: int, last: bool) -> tuple[Tensor, int]:
    logits = model(tokens, not last)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()), 3 + rank


def half_loss(weight: int, model: nn.Module, tokens: Tensor, rank: int, last: bool) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(model(tokens, not last).flatten(0, 1), tokens.flatten()), weight


Loss = Callable[[nn.Module, Tensor, int, bool], tuple[Tensor, int]]


def train(layout: str, dtype: torch.dtype, loss_of: Loss, patterns: tuple[str, ...], options: dict[str, Any]) -> Run:
    """Two steps. patterns: of each rank's backwards in a step, 'n' for no_sync, 's' for one that reduces."""
    mesh, model = ig.Mesh(layout), Model(dtype)
    engine = ig.Engine(model, mesh, toys.adamw, clip=0.5, **{"bucket_mb": 0.1, **options})
    rank, values = mesh.rank, dict[str, Tensor]()
    for step in range(2):
        engine.check_sums()
        with raw.recording() as record:
            for number, sync in enumerate(patterns[rank % len(patterns)]):
                draw = torch.Generator().manual_seed(100 * step + 10 * number + rank)
                tokens = torch.randint(600, (2, 5), generator=draw)
                with engine.no_sync() if sync == "n" else nullcontext():
                    loss, weight = loss_of(model, tokens, rank, rank == mesh.layout.world_size - 1)
                    engine.backward(loss, weight=weight)
            if step == 0:
                values |= {f"gradient {name}": g.clone() for name, g in engine.grads()}
            stats = engine.step()
        values |= {f"told {step}": torch.tensor([stats.loss, stats.grad_norm], dtype=torch.float64)}
    with engine.full_parameters():
        values |= {name: p.detach().view(-1).view(torch.int16).clone() for name, p in model.named_parameters()}
    values |= {f"master {name}": master.detach().clone() for name, master in engine._optimized.masters.items()}
    return Run(values, [e for e in record.entries if e.purpose == "gradients" and e.site.startswith("engine/trans")])


def both_ways(run: Callable[[], Run]) -> tuple[Run, Run]:
    """As it is, and with every gradient in fp32, as it was before there was another way."""
    now, before = run(), halves.HALVES
    halves.HALVES = ()
    try:
        return now, run()
    finally:
        halves.HALVES = before


def both(layout: str, dtype: torch.dtype, loss: Loss, patterns: tuple[str, ...], options: Any) -> tuple[Run, Run]:
    return both_ways(partial(train, layout, dtype, loss, patterns, options))


def sent(run: Run) -> int:
    return sum(entry.bytes for entry in run.entries)


def dtypes(run: Run) -> set[torch.dtype]:
    return {message.dtype for entry in run.entries for messages in entry.sent for message in messages}


def assert_both_ends_agree(runs: list[Run]) -> None:
    """What each rank says it has received is what the other ranks say they have sent."""
    for me, run in enumerate(runs):
        for peer, other in enumerate(runs):
            ours = sorted((e.tag, m.numel, str(m.dtype)) for e in run.entries for m in e.received[peer])
            theirs = sorted((e.tag, m.numel, str(m.dtype)) for e in other.entries for m in e.sent[me])
            assert peer == me or ours == theirs


EAGER, AT_END = {}, {"overlap": False}
LAYOUTS = [
    ("dp2 zero0", EAGER), ("dp2 zero1", EAGER), ("dp2 zero2", EAGER), ("dp2 zero3", EAGER),
    ("dp2 zero0", AT_END), ("dp2 zero1", AT_END), ("dp2 zero3", AT_END), ("dp2 zero3", {"keep_gathered": True}),
    ("dp3 zero1", EAGER), ("dp4 zero0", EAGER), ("dp4 zero3", EAGER),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=str)
def test_one_backward_sends_half_the_bytes_and_gives_the_same_bits(
    worlds, layout: str, options: Any, dtype: Any
) -> None:
    ranks = ig.layout.Layout.parse(layout).world_size
    runs = worlds(ranks).run(both, layout, dtype, fp32_loss, ("s",), options)
    for now, wide in runs:
        toys.assert_same_bits(now.values, wide.values)
        assert dtypes(now) == {dtype} and dtypes(wide) == {torch.float32}
        assert 2 * sent(now) == sent(wide) > 0
    assert_both_ends_agree([now for now, _ in runs])


# What leaves, of each rank. Zeros for a layer that is not used travel in one message with other small parameters.
SUMS: list[tuple[str, tuple[str, ...], Loss, list[set[str]]]] = [
    ("two, both reduced", ("ss",), fp32_loss, [{"half"}, {"half"}]),
    ("two, reduced once", ("ns",), fp32_loss, [{"wide"}, {"wide"}]),
    ("two, all at the step", ("nn",), fp32_loss, [{"wide"}, {"wide"}]),
    ("two on one rank", ("ns", "s"), fp32_loss, [{"wide"}, {"half"}]),
    ("none on one rank", ("n", ""), fp32_loss, [{"half"}, {"half"}]),
    ("a loss in half precision of 512 tokens", ("s",), partial(half_loss, 512), [{"half"}, {"half"}]),
    ("a loss in half precision of 1,003 tokens", ("s",), partial(half_loss, 1003), [{"wide"}, {"wide"}]),
]


@pytest.mark.parametrize("layout", ["dp2 zero0", "dp2 zero1", "dp2 zero3"])
@pytest.mark.parametrize(("patterns", "loss", "leaves"), [s[1:] for s in SUMS], ids=[s[0] for s in SUMS])
def test_sums_leave_in_fp32_and_ranks_need_not_agree(
    worlds, layout: str, patterns: Any, loss: Any, leaves: Any
) -> None:
    if "zero3" in layout and len({len(p) for p in patterns}) > 1:
        pytest.skip("at ZeRO 3 all ranks run as many backwards")
    runs = worlds(2).run(both, layout, torch.bfloat16, loss, patterns, {})
    named = {torch.bfloat16: "half", torch.float32: "wide"}
    for (now, wide), expected in zip(runs, leaves, strict=True):
        toys.assert_same_bits(now.values, wide.values)
        assert {named[dtype] for dtype in dtypes(now)} == expected
    assert_both_ends_agree([now for now, _ in runs])


def transformer(layout: str, micro_batches: int) -> Run:
    mesh = ig.Mesh(layout)
    config = TransformerConfig(vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, tied=True, qk_norm=True)
    model = ig.models.Transformer(config, mesh, dtype=torch.bfloat16)
    engine = ig.Engine(model, mesh, toys.adamw, clip=1.0)
    told = []
    for step in range(2):
        draw = torch.Generator().manual_seed(step + 10 * mesh.index("dp"))
        tokens = torch.randint(64, (4, 16), generator=draw)
        with raw.recording() as record:
            stats = engine.train_step((tokens, tokens), micro_batches)
        told += [stats.loss, stats.grad_norm]
    with engine.full_parameters():
        values = {name: p.detach().view(-1).view(torch.int16).clone() for name, p in model.named_parameters()}
    values["told"] = torch.tensor(told, dtype=torch.float64)
    return Run(values, [e for e in record.entries if e.purpose == "gradients"])


def transformers(layout: str, micro_batches: int) -> tuple[Run, Run]:
    return both_ways(partial(transformer, layout, micro_batches))


@pytest.mark.parametrize(
    "layout", ["dp2 tp2", "dp2 tp2 sp zero1", "dp2 tp2 sp zero3", "dp2 pp2 zero1", "dp2 cp2 zero2"]
)
def test_under_every_axis_the_bits_are_those_of_fp32(worlds, layout: str) -> None:
    for now, wide in worlds(4).run(transformers, layout, 1):
        toys.assert_same_bits(now.values, wide.values)
        assert sent(wide) / 2 <= sent(now) < sent(wide)
    for now, wide in worlds(4).run(transformers, layout, 2):
        toys.assert_same_bits(now.values, wide.values)


def adds_in_half_precision() -> tuple[Any, str, Any]:
    return Ledger, "_widened", lambda self, slot, own: own


def forgets_what_a_loss_was_not_seeded_with() -> tuple[Any, str, Any]:
    def collect(self: Ledger, slot: Any, gradient: Tensor) -> None:
        self._factor = None
        original(self, slot, gradient)

    original = Ledger.collect
    return Ledger, "collect", collect


def takes_all_for_fp32() -> tuple[Any, str, Any]:
    return halves, "arrived", lambda memory: memory


def rounds_sums() -> tuple[Any, str, Any]:
    def taken(self: Ledger, slot: Any) -> Tensor:
        return original(self, slot).to(slot.parameter.dtype)

    original = Ledger._taken
    return Ledger, "_taken", taken


def mistaken(mistake: Callable[[], tuple[Any, str, Any]]) -> list[bool]:
    """Whether other bits come out, or a refusal: of one backward, of two, and of a loss in half precision."""
    found = []
    for loss, pattern in ((fp32_loss, "s"), (fp32_loss, "ns"), (partial(half_loss, 1003), "s")):
        run = partial(train, "dp2 zero1", torch.bfloat16, loss, (pattern,), {})
        truth = run().values
        home, name, wrong = mistake()
        right = getattr(home, name)
        setattr(home, name, wrong)
        try:
            values = run().values
            found.append(any(values[key].numpy().tobytes() != truth[key].numpy().tobytes() for key in truth))
        except EngineError as error:  # the sums of what was sent and what arrived, which the runs compare
            assert error.code == "IG580"
            found.append(True)
        finally:
            setattr(home, name, right)
    return found


@pytest.mark.parametrize(
    ("mistake", "shows"),
    [
        (adds_in_half_precision, [False, True, False]),
        (forgets_what_a_loss_was_not_seeded_with, [False, False, True]),
        (takes_all_for_fp32, [True, False, False]),
        (rounds_sums, [False, True, True]),
    ],
)
def test_each_mistake_changes_bits_where_it_matters(worlds, mistake: Any, shows: list[bool]) -> None:
    assert worlds(2).run(mistaken, mistake)[0] == shows


def torch_loop(dtype: torch.dtype) -> tuple[Run, Run]:
    def run() -> Run:
        model = ig.DataParallel(Model(dtype))
        optimizer = toys.adamw(list(model.parameters()))
        values, entries = dict[str, Tensor](), list[Entry]()
        for step in range(2):
            with raw.recording() as record:
                for number in range(2):
                    tokens = torch.randint(600, (2, 5), generator=torch.Generator().manual_seed(10 * step + number))
                    with model.no_sync() if step == 1 and number == 0 else nullcontext():
                        loss = nn.functional.cross_entropy(model(tokens, True).float().flatten(0, 1), tokens.flatten())
                        model.weigh(loss, 3 + model.mesh.rank).backward()
            values |= {f"{step} {n}": p.grad.clone().view(-1).view(torch.int16) for n, p in model.named_parameters()
                       if p.grad is not None}  # fmt: skip
            optimizer.step()
            optimizer.zero_grad()
            entries += [e for e in record.entries if e.purpose == "gradients"]
        return Run(values, entries)

    return both_ways(run)


def test_data_parallel_with_weights_does_the_same(worlds) -> None:
    for now, wide in worlds(2).run(torch_loop, torch.bfloat16):
        toys.assert_same_bits(now.values, wide.values)
        assert dtypes(now) == {torch.bfloat16, torch.float32}  # the second step adds two backwards up
