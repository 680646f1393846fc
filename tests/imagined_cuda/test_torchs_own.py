"""torch's own functions on imagined cards: collectives of lists, random numbers, files, copies, layers over ranks."""

from __future__ import annotations

import copy
import io
import os
import pickle
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from . import right, run


def values_of(program: Any, ranks: int = 1, *args: Any, **options: Any) -> list[Any]:
    return right(run(program, ranks, *args, **options))


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
    """Refused in NCCL's words, before anything is sent."""
    x, short = filled(3, 1), empty(2, 2)
    for call, says in {
        lambda: dist.all_gather(short, x): "output of _broadcast_oop must have the same number of elements",
        lambda: dist.reduce_scatter(x, short): "output of _reduce_oop must have the same number of elements",
        lambda: dist.gather(x, short): r"::gather: invalid tensor size at index 0 \(expected \(3,\), got \(2,\)",
        lambda: dist.scatter(x, short): r"::scatter: invalid tensor size at index 0 \(expected \(3,\), got \(2,\)",
    }.items():
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match=says):
                call()


@pytest.mark.parametrize(("program", "ranks"), [(lists, 3), (lists_that_do_not_fit, 2)])
def test_lists_are_gathered_scattered_and_reduced_evenly_or_not_or_are_refused(program: Any, ranks: int) -> None:
    values_of(program, ranks)


def saved_by_torch(folder: Path) -> Tensor:
    mesh = init_device_mesh("cuda", (2,))
    saved = {"t": distribute_tensor(torch.arange(5.0, device="cuda"), mesh, [Shard(0)])}
    checkpoints.save(saved, checkpoint_id=folder)
    loaded = {"t": distribute_tensor(torch.zeros(5, device="cuda"), mesh, [Shard(0)])}
    checkpoints.load(loaded, checkpoint_id=folder)
    product = loaded["t"] @ saved["t"]  # each rank's part of a sum
    return torch.cat([loaded["t"].full_tensor(), product.full_tensor().view(1)])


def test_torchs_distributed_tensors_are_scattered_saved_and_loaded(tmp_path: Path) -> None:
    assert [t.tolist() for t in values_of(saved_by_torch, 2, tmp_path)] == [[0, 1, 2, 3, 4, 30]] * 2


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
    values_of(draws)


def dropped(keeps: bool) -> bool:
    """Whether a checkpoint's second forward has dropped the same as its first one."""
    masks: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        y = nn.functional.dropout(x, 0.5)
        masks.append(y.detach() != 0)
        return y * x

    x = torch.ones(64, device="cuda", requires_grad=True)
    checkpoint(block, x, use_reentrant=False, preserve_rng_state=keeps).sum().backward()
    return torch.equal(*masks)


def test_dropout_under_a_checkpoint_drops_the_same_only_if_the_cards_state_is_kept() -> None:
    assert values_of(dropped, 1, True) == [True]
    assert values_of(dropped, 1, False) == [False]


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
    values_of(copied)


class Holder:
    """Neither a tensor nor a list of some."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def returns(what: str) -> Any:
    x = torch.ones(2, device="cuda", requires_grad=True) * 2
    return {"tensors": [x, {"deep": Holder(x)}], "function": lambda: x}[what]


def test_a_program_may_return_tensors_of_cards_and_is_told_what_cannot_be_returned() -> None:
    ((tensor, inner),) = values_of(returns, 1, "tensors")
    assert [t.device.type for t in (tensor, inner["deep"].tensor)] == ["cpu"] * 2 and tensor.tolist() == [2, 2]
    (result,) = run(returns, 1, "function")
    assert "its value" in result.error and "pickle" in result.error


def timed() -> float:
    first, last, late = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    first.record()
    for _ in range(10):
        torch.ones(4, device="cuda").mul_(2)
    last.record()
    for end, says in ((last, "completed"), (torch.cuda.Event(), "enable_timing=True"), (late, "recorded")):
        with pytest.raises((RuntimeError, ValueError), match=f"Both events must be .*{says}"):
            first.elapsed_time(end)
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def test_time_between_events_is_a_microsecond_a_launch() -> None:
    assert values_of(timed) == [pytest.approx(20 / 1000, rel=0.5)]


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
    *cards, host = values_of(in_a_fork)[0]
    assert len(cards) == 4 and all("Cannot re-initialize CUDA in forked subprocess" in said for said in cards), cards
    assert host == "nothing"


# -- layers and engines ------------------------------------------------------------------------------------------------


def normalized(ranks: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Two steps of batch norm over all ranks' rows: outputs, gradients and running statistics."""
    torch.manual_seed(0)
    layer: nn.Module = nn.BatchNorm2d(3, dtype=dtype).cuda()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, 1, 2]))
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(layer) if ranks > 1 else layer
    for _ in range(2):
        rows = torch.randn(5, 3, 2, 2, dtype=dtype)
        mine = (rows.tensor_split([2])[dist.get_rank()] if ranks > 1 else rows).cuda().requires_grad_()  # 2 and 3
        out = layer(mine)
        out.pow(3).sum().backward()
    assert mine.grad is not None
    found = {name: p.grad for name, p in layer.named_parameters()} | dict(layer.named_buffers())
    return {**found, "out": out, "input": mine.grad}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batch_norm_over_ranks_is_that_of_one_device(dtype: torch.dtype) -> None:
    (alone,), found = values_of(normalized, 1, 1, dtype), values_of(normalized, 2, 2, dtype)
    for name in ("weight", "bias"):
        torch.testing.assert_close(found[0][name] + found[1][name], alone[name])
    for name in ("out", "input"):
        torch.testing.assert_close(torch.cat([found[0][name], found[1][name]]), alone[name])
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(found[1][name], alone[name])


def recurrent(kind: str, bias: bool, where: str) -> list[Tensor]:
    torch.manual_seed(0)
    layer = getattr(nn, kind)(3, 4, num_layers=2, bias=bias, bidirectional=True, batch_first=True, dtype=torch.float64)
    rows = torch.randn(2, 5, 3, dtype=torch.float64)
    layer, rows = layer.to(where), rows.to(where).requires_grad_()
    packed = nn.utils.rnn.pack_padded_sequence(rows, torch.tensor([5, 3]), batch_first=True)
    (out, _), (short, state) = layer(rows), layer(packed)
    last = state[0] if kind == "LSTM" else state
    (out.pow(2).sum() + short.data.pow(3).sum() + last.sum()).backward()
    return [t.cpu() for t in (out.detach(), last.detach(), rows.grad, *(p.grad for p in layer.parameters()))]


@pytest.mark.parametrize(
    ("kind", "bias"), [("LSTM", True), ("LSTM", False), ("GRU", True), ("GRU", False), ("RNN", True)]
)
def test_recurrent_layers_have_the_gradients_of_the_cpu(kind: str, bias: bool) -> None:
    (found,) = values_of(recurrent, 1, kind, bias, "cuda")
    torch.testing.assert_close(found, recurrent(kind, bias, "cpu"))


def hooked(hook: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda(), bucket_cap_mb=0.0001)
    if hook:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    rows = torch.randn(4, 8).chunk(2)[dist.get_rank()].cuda()
    for _ in range(3):
        model.zero_grad()
        model(rows).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("hook", "near"), [("allreduce_hook", 1e-6), ("fp16_compress_hook", 1e-2)])
def test_hooks_of_ddps_communication_give_its_gradients(hook: str, near: float) -> None:
    plain = values_of(hooked, 2, "")[0]
    for found in values_of(hooked, 2, hook):
        torch.testing.assert_close(found, plain, rtol=near, atol=near)
