"""The imagined device itself: where backward runs, what memory holds, what a poll says, and torch's FSDP2 on it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from . import device, right, run


def value_of(program: Any, *args: Any, **options: Any) -> Any:
    return right(run(program, 1, *args, **options))[0]


def backward_streams() -> list[bool]:
    side, seen = torch.cuda.Stream(), []
    x = torch.ones(4, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
        y.register_hook(lambda _: seen.append(torch.cuda.current_stream() == side))
        loss = y.sum()
    torch.cuda.current_stream().wait_stream(side)
    loss.backward()
    return seen


def test_backward_runs_on_the_stream_of_its_forward() -> None:
    assert value_of(backward_streams) == [True]


def sizes() -> list[tuple[int, int]]:
    found, kept = [], []
    for elements in (1, 1000, 300_000, 3_000_000):  # 512 B, 4 kB, 1.2 MB, 12 MB in fp32
        kept.append(torch.empty(elements, device="cuda"))
        found.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    kept.clear()
    return [*found, (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())]


def test_memory_is_counted_by_the_rules_of_the_caching_allocator() -> None:
    mb, third = 1 << 20, -(-1_200_000 // 512) * 512
    whole = 512 + 4096 + third + -(-12_000_000 // 512) * 512
    assert value_of(sizes) == [
        (512, 2 * mb), (4608, 2 * mb), (4608 + third, 22 * mb), (whole, 22 * mb), (0, whole),
    ]  # fmt: skip


def reuse(record: bool) -> bool:
    side, half_a_segment = torch.cuda.Stream(), (1 << 20) // 4
    x, _other = (torch.ones(half_a_segment, device="cuda") for _ in range(2))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    if record:
        x.record_stream(side)
    del x
    before = torch.cuda.memory_reserved()
    torch.empty(half_a_segment, device="cuda")
    return torch.cuda.memory_reserved() == before


def test_memory_with_a_recorded_stream_is_not_given_away_before_that_stream_is_over() -> None:
    assert value_of(reuse, False, lag=1000)
    assert not value_of(reuse, True, lag=1000)


def polls() -> int:
    event = torch.cuda.Event()
    torch.ones(4, device="cuda").mul_(2)
    event.record()
    return next(n for n in range(1000) if event.query())


def test_an_event_is_over_when_the_device_has_caught_up() -> None:
    assert value_of(polls, lag=5) < value_of(polls, lag=50) <= 50


def too_large() -> bool:
    device.lib.set_capacity(40 << 20)
    side, x = torch.cuda.Stream(), torch.ones(8 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    x.record_stream(side)
    del x
    torch.empty(8 << 20, device="cuda")  # what is kept back is waited for
    with pytest.raises(torch.cuda.OutOfMemoryError, match="imagined"):
        torch.empty(16 << 20, device="cuda")
    return True


def test_a_full_card_raises_torchs_error() -> None:
    assert value_of(too_large)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(RuntimeError, match="there is no g"):
        device._compile(tmp_path, tmp_path / "made.so")


def with_torchs(peer: str) -> torch.Tensor:
    """Three steps of a model under torch's fully_shard or DDP, or of the model alone; the loss."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))).cuda()
    for block in (*model.children(), model) if peer == "FSDP2" else ():
        fully_shard(block)
    model = DistributedDataParallel(model, bucket_cap_mb=0.001) if peer == "DDP" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    rows = rows.chunk(2)[dist.get_rank()].cuda() if peer else rows.cuda()
    for _ in range(3):
        loss = model(rows).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if peer:
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)
    return loss.detach().cpu()


@pytest.mark.parametrize("peer", ["FSDP2", "DDP"])
def test_torchs_own_engines_have_no_fault(peer: str) -> None:
    """Their side streams, events and freed parameters are right, and so nothing may be found in them."""
    alone = value_of(with_torchs, "")
    results = run(with_torchs, 2, peer)
    for result, found in zip(results, right(results), strict=True):
        assert len({call[0] for call in result.calls}) == 1
        torch.testing.assert_close(found, alone)
