"""torch's own functions on imagined cards: collectives of lists, random numbers, files and copies, layers over ranks."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
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

from . import run


def values_of(program: Any, ranks: int = 1, *args: Any, **options: Any) -> list[Any]:
    results = run(program, ranks, *args, **options)
    assert not any(result.error for result in results), "\n".join(result.error for result in results)
    faults = [str(finding) for result in results for finding in result.faults]
    assert not faults, faults
    return [result.value for result in results]


# -- collectives of lists ------------------------------------------------------------------------------------------------


def card(*numbers: float) -> Tensor:
    return torch.tensor(numbers, device="cuda", dtype=torch.float32)


def collectives_of_lists() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = card(rank, rank + 10)
    gathered = [torch.empty_like(mine) for _ in range(size)] if rank == 1 else None
    dist.gather(mine, gathered, dst=1)
    part = torch.empty(2, device="cuda")
    dist.scatter(part, [mine * n for n in range(size)] if rank == 2 else None, src=2)
    total = torch.empty(2, device="cuda")
    dist.reduce_scatter(total, [mine * n for n in range(size)])
    uneven = [torch.empty(n + 1, device="cuda") for n in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank), device="cuda"))
    sums = torch.empty(rank + 1, device="cuda")
    work = dist.reduce_scatter(sums, [torch.full((n + 1,), float(rank + n), device="cuda") for n in range(size)],
                               async_op=True)  # fmt: skip
    work.wait()
    objects: list[Any] = [None] * size
    dist.gather_object({"rank": rank}, objects if rank == 0 else None, dst=0)
    return {
        "gather": gathered, "scatter": part, "reduce_scatter": total, "uneven": uneven, "sums": sums, "of": objects[0],
    }  # fmt: skip


def test_lists_are_gathered_scattered_and_reduced_evenly_or_not() -> None:
    for rank, found in enumerate(values_of(collectives_of_lists, 3)):
        assert (found["gather"] is not None) == (rank == 1)
        assert rank != 1 or [t.tolist() for t in found["gather"]] == [[0, 10], [1, 11], [2, 12]]
        assert found["scatter"].tolist() == [2 * rank, 12 * rank]
        assert found["reduce_scatter"].tolist() == [3 * rank, 33 * rank]
        assert [t.tolist() for t in found["uneven"]] == [[0], [1, 1], [2, 2, 2]]
        assert found["sums"].tolist() == [3 + 3 * rank] * (rank + 1)
        assert rank or found["of"] == {"rank": 0}


def refused(what: str) -> str:
    x = torch.ones(2 + dist.get_rank(), device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather([torch.empty(2, device="cuda"), torch.empty(4, device="cuda")], x),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(3, device="cuda"), [x[:1], x[:1]]),
        "gather": lambda: dist.gather(x, [torch.empty(1, device="cuda")] * 2 if dist.get_rank() == 0 else None),
        "scatter": lambda: dist.scatter(x, [torch.empty(1, device="cuda")] * 2 if dist.get_rank() == 0 else None),
    }
    with pytest.raises(ValueError) as error:
        calls[what]()
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "rank", "says"),
    [
        ("all_gather", 1, "_broadcast_oop must have the same number of elements"),
        ("reduce_scatter", 0, "_reduce_oop must have the same number of elements"),
        ("gather", 0, r"ProcessGroupNCCL::gather: invalid tensor size at index 0 (expected (2,), got (1,))"),
        ("scatter", 0, r"ProcessGroupNCCL::scatter: invalid tensor size at index 0 (expected (2,), got (1,))"),
    ],
)
def test_a_list_that_does_not_fit_is_refused_with_ncclss_words(what: str, rank: int, says: str) -> None:
    assert says in run(refused, 2, what, seconds=3)[rank].value


def saved_by_torch(folder: Path) -> Tensor:
    mesh = init_device_mesh("cuda", (2,))
    saved = {"t": distribute_tensor(torch.arange(5.0, device="cuda"), mesh, [Shard(0)])}
    checkpoints.save(saved, checkpoint_id=folder)
    loaded = {"t": distribute_tensor(torch.zeros(5, device="cuda"), mesh, [Shard(0)])}
    checkpoints.load(loaded, checkpoint_id=folder)
    twice = loaded["t"] @ saved["t"]  # each rank's part of a sum
    return torch.cat([loaded["t"].full_tensor(), twice.full_tensor().view(1)])


def test_torchs_distributed_tensors_are_scattered_saved_and_loaded(tmp_path: Path) -> None:
    assert [t.tolist() for t in values_of(saved_by_torch, 2, tmp_path)] == [[0, 1, 2, 3, 4, 30]] * 2


# -- random numbers ------------------------------------------------------------------------------------------------------


def draws() -> dict[str, Any]:
    def draw(where: Any = "cuda", **options: Any) -> list[float]:
        return torch.rand(3, device=where, **options).tolist()

    torch.manual_seed(1)
    host = torch.get_rng_state()
    first = draw()
    state = torch.cuda.get_rng_state()
    second, _ = draw(), torch.cuda.set_rng_state(state)
    again = draw()
    own = torch.Generator(device="cuda").manual_seed(1)
    torch.cuda.manual_seed(1)
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        inside = draw()
    after = draw()
    found = {"first": first, "second": second, "again": again, "own": draw(generator=own), "inside": inside}
    torch.cuda.manual_seed_all(1)
    found |= {"after": after, "other card": draw("cuda:1"), "state": state.numel(), "device": own.device.type}
    return found | {"host": torch.equal(host, torch.get_rng_state())}


def test_each_card_has_a_generator_of_its_own() -> None:
    (found,) = values_of(draws)
    first = found["first"]
    assert first != found["second"] == found["again"]
    assert [found[name] for name in ("own", "inside", "after", "other card")] == [first] * 4
    assert found["state"] == 16 and found["device"] == "cuda"
    assert found["host"], "a card's numbers are drawn from the CPU's generator"


def generator_of_the_host() -> str:
    with pytest.raises(RuntimeError) as error:
        torch.rand(3, device="cuda", generator=torch.Generator())
    return str(error.value)


def test_a_generator_of_the_host_is_refused_on_a_card() -> None:
    assert "Expected a 'cuda' device type for generator but found 'cpu'" in values_of(generator_of_the_host)[0]


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


# -- files, copies and results -------------------------------------------------------------------------------------------


def copied() -> dict[str, Any]:
    torch.manual_seed(0)
    model, file = nn.Linear(3, 2), io.BytesIO()
    torch.save(model.state_dict(), file)
    loaded = {}
    for where in ("cuda", "cuda:1", None):
        file.seek(0)
        loaded[str(where)] = torch.load(file, map_location=where)["weight"]
    model.cuda()
    on_card = io.BytesIO()
    torch.save(model.state_dict(), on_card)
    on_card.seek(0)
    several = {
        **loaded, "saved on a card": torch.load(on_card)["weight"], "model": copy.deepcopy(model).weight,
        "tensor": copy.deepcopy(model.weight.detach()), "view": copy.deepcopy(model.weight.detach().t()).t(),
        "pickle": pickle.loads(pickle.dumps(model)).weight,
    }  # fmt: skip
    places = {name: str(t.device) for name, t in several.items()}
    memory = {t.untyped_storage().data_ptr() for t in several.values()} | {model.weight.data_ptr()}
    assert len(memory) == len(several) + 1
    return {"places": places, "same": [torch.equal(t.cpu(), model.weight.cpu()) for t in several.values()]}


def test_tensors_are_loaded_copied_and_pickled_on_cards() -> None:
    (found,) = values_of(copied)
    assert found["same"] == [True] * 8
    assert found["places"].pop("cuda:1") == "cuda:1" and found["places"].pop("None") == "cpu"
    assert set(found["places"].values()) == {"cuda:0"}


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


def timed() -> tuple[float, list[str]]:
    first, last, late, plain = *(torch.cuda.Event(enable_timing=True) for _ in range(3)), torch.cuda.Event()
    first.record()
    for _ in range(10):
        torch.ones(4, device="cuda").mul_(2)
    last.record()
    refusals = []
    for end in (last, plain, late):
        with pytest.raises((RuntimeError, ValueError)) as error:
            first.elapsed_time(end)
        refusals.append(str(error.value))
    torch.cuda.synchronize()
    return first.elapsed_time(last), refusals


def test_time_between_events_is_a_microsecond_a_launch() -> None:
    ((milliseconds, refusals),) = values_of(timed)
    assert milliseconds == pytest.approx(20 / 1000, rel=0.5)
    assert [one.split()[4] for one in refusals] == ["completed", "created", "recorded"]


def in_a_fork(what: str) -> str:
    x, (read, write) = torch.ones(2, device="cuda"), os.pipe()
    if (child := os.fork()) == 0:
        try:
            torch.manual_seed(0)  # as a DataLoader's worker does
            {"new": lambda: torch.ones(2, device="cuda"), "old": lambda: x.mul_(2), "stream": torch.cuda.Stream,
             "synchronize": torch.cuda.synchronize, "host": lambda: torch.ones(2)}[what]()  # fmt: skip
            os.write(write, b"nothing was said")
        except BaseException as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(read, 10_000).decode()


@pytest.mark.parametrize("what", ["new", "old", "stream", "synchronize"])
def test_cards_cannot_be_used_in_a_fork(what: str) -> None:
    assert "Cannot re-initialize CUDA in forked subprocess" in values_of(in_a_fork, 1, what)[0]


def test_a_fork_that_uses_no_card_is_none_of_the_cards_business() -> None:
    assert values_of(in_a_fork, 1, "host") == ["nothing was said"]


# -- layers and engines --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("kind", "bias"), [("LSTM", True), ("LSTM", False), ("GRU", True), ("GRU", False), ("RNN", True)])
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
