"""The imagined device itself, and torch's own functions on it: streams, memory, collectives of lists, random numbers,
files, copies, FSDP2 and DDP."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from . import device, right, run

# -- streams and memory ------------------------------------------------------------------------------------------------


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
    assert right(run(backward_streams)) == [[True]]


def counted() -> list[Any]:
    side, now = torch.cuda.Stream(), lambda: (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    device.lib.set_capacity(1536)
    x, y = torch.ones(1, device="cuda"), torch.ones(256, device="cuda")
    found: list[Any] = [now()]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y.mul_(2)
    y.record_stream(side)
    del y
    found.append(now())
    y = torch.empty(256, device="cuda")  # the host waits for what is kept back
    with pytest.raises(torch.cuda.OutOfMemoryError, match="imagined"):
        torch.empty(1, device="cuda")
    found.append(now())
    del x, y
    torch.empty(1, device="cuda")
    return [*found, now(), torch.cuda.max_memory_allocated()]


def test_memory_is_counted_in_blocks_and_kept_for_recorded_streams_until_a_card_is_full() -> None:
    assert right(run(counted)) == [[(1536, 1536), (512, 1536), (1536, 1536), (0, 0), 1536]]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(RuntimeError, match="there is no g"):
        device._compile(tmp_path, tmp_path / "made.so")


# -- collectives of lists ----------------------------------------------------------------------------------------------


def empty(*sizes: int) -> list[Tensor]:
    return [torch.empty(size, device="cuda") for size in sizes]


def filled(size: int, value: float) -> Tensor:
    return torch.full((size,), float(value), device="cuda")


def lists() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered, (part, total), uneven, (sums,) = empty(2, 2, 2), empty(2, 2), empty(1, 2, 3), empty(rank + 1)
    dist.gather(filled(2, rank), gathered if rank == 1 else None, dst=1)
    assert rank != 1 or [t.tolist() for t in gathered] == [[0, 0], [1, 1], [2, 2]]
    dist.scatter(part, [filled(2, n) for n in range(size)] if rank == 2 else None, src=2)
    assert part.tolist() == [rank] * 2
    dist.reduce_scatter(total, [filled(2, rank * n) for n in range(size)])
    assert total.tolist() == [3 * rank] * 2
    dist.all_gather(uneven, filled(rank + 1, rank))
    assert [t.tolist() for t in uneven] == [[0], [1, 1], [2, 2, 2]]
    work = dist.reduce_scatter(sums, [filled(n + 1, rank + n) for n in range(size)], async_op=True)
    work.wait()
    assert sums.tolist() == [3 + 3 * rank] * (rank + 1)
    objects: list[Any] = [None] * size
    dist.gather_object({"rank": rank}, objects if rank == 0 else None, dst=0)
    assert rank or objects == [{"rank": n} for n in range(size)]


def lists_that_do_not_fit() -> None:
    """Refused before anything is sent."""
    x, short = filled(3, 1), empty(2, 2)
    for call in (dist.all_gather, dist.reduce_scatter, dist.gather, dist.scatter):
        args = (short, x) if call is dist.all_gather else (x, short)
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match=f"ProcessGroupNCCL::{call.__name__}: invalid tensor size"):
                call(*args)


@pytest.mark.parametrize(("program", "ranks"), [(lists, 3), (lists_that_do_not_fit, 2)])
def test_lists_are_gathered_scattered_and_reduced_evenly_or_not_or_are_refused(program: Any, ranks: int) -> None:
    right(run(program, ranks))


def saved_by_torch(folder: Path) -> Tensor:
    mesh = init_device_mesh("cuda", (2,))
    saved = {"t": distribute_tensor(torch.arange(5.0, device="cuda"), mesh, [Shard(0)])}
    checkpoints.save(saved, checkpoint_id=folder)
    loaded = {"t": distribute_tensor(torch.zeros(5, device="cuda"), mesh, [Shard(0)])}
    checkpoints.load(loaded, checkpoint_id=folder)
    product = loaded["t"] @ saved["t"]  # each rank's part of a sum
    return torch.cat([loaded["t"].full_tensor(), product.full_tensor().view(1)])


def test_torchs_distributed_tensors_are_scattered_saved_and_loaded(tmp_path: Path) -> None:
    assert [t.tolist() for t in right(run(saved_by_torch, 2, tmp_path))] == [[0, 1, 2, 3, 4, 30]] * 2


# -- random numbers ----------------------------------------------------------------------------------------------------


def draw(where: Any = "cuda", **options: Any) -> list[float]:
    return torch.rand(3, device=where, **options).tolist()


def draws() -> None:
    torch.manual_seed(1)
    host, first, state = torch.get_rng_state(), draw(), torch.cuda.get_rng_state()
    second = draw()
    torch.cuda.set_rng_state(state)
    assert draw() == second != first and state.numel() == 16
    own = torch.Generator(device="cuda").manual_seed(1)
    assert draw(generator=own) == first and own.device.type == "cuda"
    torch.cuda.manual_seed(1)
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        assert draw() == first
    assert draw() == first
    assert draw("cuda:1") == first  # its generator has stood still since manual_seed
    assert torch.equal(host, torch.get_rng_state()), "a card's numbers are drawn from the CPU's generator"
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        draw(generator=torch.Generator())


def test_each_card_has_a_generator_of_its_own() -> None:
    right(run(draws))


# -- files, copies and results -----------------------------------------------------------------------------------------


def copied() -> None:
    model, file, on_card = nn.Linear(3, 2), io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    kept = torch.load(file, map_location="cuda:1")["weight"]
    file.seek(0)
    on_this = torch.load(file, map_location="cuda")["weight"]
    torch.save(model.cuda().state_dict(), on_card)
    on_card.seek(0)
    weight = model.weight.detach()
    copies = [on_this, torch.load(on_card)["weight"], copy.deepcopy(model).weight, copy.deepcopy(weight)]
    copies += [copy.deepcopy(weight.t()).t(), pickle.loads(pickle.dumps(model)).weight]
    assert kept.device.index == 1 and {str(t.device) for t in copies} == {"cuda:0"}
    assert all(torch.equal(t.cpu(), weight.cpu()) for t in (kept, *copies))
    assert len({t.untyped_storage().data_ptr() for t in (weight, kept, *copies)}) == 8


def test_tensors_are_loaded_copied_and_pickled_on_cards() -> None:
    right(run(copied))


def test_what_a_program_cannot_return_is_named() -> None:
    (result,) = run(local_function)
    assert "its value" in result.error and "pickle" in result.error


def local_function() -> Any:
    return lambda: None


def in_a_fork() -> list[str]:
    """What a child says to each use of a card, and to work on the host."""
    x, (read, write) = torch.ones(2, device="cuda"), os.pipe()
    if os.fork() == 0:
        said = []
        torch.manual_seed(0)  # as a DataLoader's worker does
        new, old, host = lambda: torch.ones(2, device="cuda"), lambda: x.mul_(2), lambda: torch.ones(2)
        for use in (new, old, torch.cuda.Stream, torch.cuda.synchronize, host):
            try:
                use()
                said.append("nothing")
            except RuntimeError as error:
                said.append(str(error).splitlines()[0])
        os.write(write, repr(said).encode())
        os._exit(0)
    os.wait()
    return literal_eval(os.read(read, 10_000).decode())


def test_cards_cannot_be_used_in_a_fork() -> None:
    *cards, host = right(run(in_a_fork))[0]
    assert len(cards) == 4 and all("Cannot re-initialize CUDA in forked subprocess" in said for said in cards), cards
    assert host == "nothing"


# -- engines -----------------------------------------------------------------------------------------------------------


def with_torchs(peer: str) -> torch.Tensor:
    """Three steps of a model under torch's fully_shard or DDP, or of the model alone; the loss."""
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
    (alone,) = right(run(with_torchs, 1, ""))
    results = run(with_torchs, 2, peer)
    for result, found in zip(results, right(results), strict=True):
        assert len({call[0] for call in result.calls}) == 1
        torch.testing.assert_close(found, alone)
