"""Small programs in plain torch, and the faults that are planted in them, a line each.

A program is called with the name of the fault that it is to have, or with an empty one: then
nothing may be found in it. Nothing here imports isograd.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import device


@dataclass(frozen=True)
class Fault:
    """`kind`: of the finding that names it; `says`: a part of its text; `lines`: parts of the lines that it names, in
    order: of both accesses, or of both ranks' calls; one where there is one only."""

    kind: str
    name: str
    says: str
    lines: tuple[str, ...]
    also: str = ""  # a kind that follows from it
    seconds: float = 60  # NCCL's timeout


Program = Callable[[str], Any]
PROGRAMS: dict[Program, tuple[int, tuple[Fault, ...]]] = {}  # on so many ranks, with one of these faults or none


def program(ranks: int, *faults: Fault) -> Callable[[Program], Program]:
    return lambda function: PROGRAMS.update({function: (ranks, faults)}) or function


def fault(kind: str, name: str, says: str, *lines: str, **more: Any) -> Fault:
    return Fault(kind, name, says, lines, **more)


def refused(name: str, says: str, *lines: str, seconds: float = 20, also: str = "") -> Fault:
    return Fault("communicator", name, says, lines, also, seconds)


def current() -> Any:
    return torch.cuda.current_stream()


def ones(n: int = 1000) -> Tensor:
    return torch.ones(n, device="cuda")


# -- streams and events ------------------------------------------------------------------------------------------------


@program(
    1,
    fault("race", "starts too early", "aten::add writes", "x.add_(1)", "y = x * 2"),
    fault("race", "recorded before the write", "aten::add writes", "x.add_(1)", "y = x * 2"),
    fault("event never recorded", "not recorded", "that nobody has recorded", "side.wait_event(event)", also="race"),
    fault("race", "result read too early", "aten::mul writes", "y = x * 2", "y.sum()"),
    fault("race", "input overwritten too early", "aten::mul reads", "y = x * 2", "x.zero_()"),
)
def work_on_a_side_stream(fault: str) -> None:
    side, event, x = torch.cuda.Stream(), torch.cuda.Event(), ones()
    if fault == "recorded before the write":
        event.record()
    x.add_(1)
    if fault not in ("recorded before the write", "not recorded"):
        event.record()
    if fault != "starts too early":
        side.wait_event(event)
    with torch.cuda.stream(side):
        y = x * 2
    if fault == "result read too early":
        y.sum()
    if fault == "input overwritten too early":
        x.zero_()
    current().wait_stream(side)
    y.sum()
    x.zero_()


@program(1, fault("reused too early", "a stream reads it", "the memory is freed", "total = x.sum()", "ones(7).mul_(3)"))
def freed_memory(fault: str) -> None:
    side, x = torch.cuda.Stream(), ones()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        total = x.sum()
    if not fault:
        x.record_stream(side)
    del x
    ones(7).mul_(3)  # whatever its size, it may get that memory
    current().wait_stream(side)
    total.add_(1)


@program(1, fault("reused too early", "before its owner is done", "the memory is freed", "x.mul_(2)", "y.fill_(2)"))
def memory_used_on_a_side_stream(fault: str) -> None:
    side, other, x = torch.cuda.Stream(), torch.cuda.Stream(), ones()
    other.wait_stream(current())
    with torch.cuda.stream(other):
        x.mul_(2)
    current().wait_stream(other)  # its owner waits here, the side stream for nobody
    del x
    y = torch.empty(1000, device="cuda")
    if not fault:
        side.wait_stream(current())
    with torch.cuda.stream(side):
        y.fill_(2)
    current().wait_stream(side)
    y.add_(1)


@program(
    1,
    fault("race", "gradients read elsewhere", "writes on stream", "model(x).sum().backward()", "grad.mul_(2)"),
    fault("race", "parameters changed too early", "on stream", "copies = [", "optimizer.step()"),
)
def training_on_two_streams(fault: str) -> None:
    side, x, model = torch.cuda.Stream(), torch.ones(2, 8, device="cuda"), torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    side.wait_stream(current())
    with torch.cuda.stream(side):
        model(x).sum().backward()
    if fault != "gradients read elsewhere":
        current().wait_stream(side)
    model.weight.grad.mul_(2)
    side.wait_stream(current())
    with torch.cuda.stream(side):
        copies = [p.detach().clone() for p in model.parameters()]
    if fault != "parameters changed too early":
        current().wait_stream(side)
    optimizer.step()
    side.synchronize()
    assert len(copies) == 2


# -- the host ----------------------------------------------------------------------------------------------------------


@program(
    1,
    fault("host wait", "item in a hook", "item", "seen.append(g.sum().item()"),
    fault("host wait", "nonzero", "nonzero", "x.nonzero()"),
    fault("host wait", "index by a mask", "mask", "x[x > 0] ="),
    fault("pageable copy", "pageable copy", "said to be non_blocking", "host.to("),
)
def nothing_that_the_host_waits_for(fault: str) -> None:
    w, x, seen = ones().requires_grad_(), ones(), []
    w.register_hook(lambda g: seen.append(g.sum().item() if fault == "item in a hook" else g.sum()))
    (w * 2).sum().backward()
    _ = x.nonzero() if fault == "nonzero" else torch.where(x > 0, x, 0)
    x[x > 0] = x.sum() if fault == "index by a mask" else 2
    host = torch.ones(1000, pin_memory=fault != "pageable copy")
    host.to("cuda", non_blocking=True).add_(1)


@program(
    1,
    fault("race", "fetched elsewhere", "aten::copy_ writes on stream", "host.copy_(ones()", 'host.to("cuda"'),
    fault("host reads too early", "read", "aten::sum", "host.copy_(ones()", "float(host.sum())"),
    fault("host writes too early", "refilled", "aten::fill_", "host.to(", "host.fill_(2)"),
)
def pinned_host_memory(fault: str) -> None:
    side, event, host = torch.cuda.Stream(), torch.cuda.Event(), torch.empty(1000, pin_memory=True)
    host.copy_(ones(), non_blocking=True)
    event.record()
    if fault != "fetched elsewhere":
        side.wait_stream(current())
    with torch.cuda.stream(side):
        y = host.to("cuda", non_blocking=True) * 2
    if fault != "read":
        event.synchronize()
    with ThreadPoolExecutor(1) as pool:
        total = pool.submit(lambda: float(host.sum())).result()
    assert (total == 1000) is (fault != "read")
    if fault != "refilled":
        side.synchronize()
    host.fill_(2)
    torch.cuda.synchronize()
    assert (y.sum().item() == 2000) is (fault != "fetched elsewhere")


# -- NCCL --------------------------------------------------------------------------------------------------------------


gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


def rank() -> int:
    return dist.get_rank()


@program(
    2,
    fault("race", "not waited for", "nccl:all_reduce writes", "dist.all_reduce(x", "y = x * 2"),
    fault("race", "waited for on another stream", "nccl:all_reduce writes", "dist.all_reduce(x", "y = x * 2"),
    fault("race", "waited for in a joined thread", "nccl:all_reduce writes", "dist.all_reduce(x", "y = x * 2"),
)
def result_of_a_collective(fault: str) -> None:
    """A thread's current stream is the default one, and the user's is another one here."""
    mine, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(mine):
        x = ones()
        work = dist.all_reduce(x, async_op=True)
        if fault == "waited for on another stream":
            with torch.cuda.stream(other):
                work.wait()
        elif fault != "not waited for":
            thread = threading.Thread(target=work.wait)
            thread.start()
            thread.join()
        if not fault:
            work.wait()
        y = x * 2
        work.wait()
        assert fault or y[0].item() == 4


@program(
    2,
    fault("race", "started too early", "aten::mul writes", "y = x * 2", "dist.all_reduce(y)"),
    fault("race", "changed too early", "nccl:all_gather reads", "gather_equal(total", "x.add_(1)"),
    fault("race", "one of a list changed too early", "nccl:reduce_scatter reads", "reduce_scatter(", "x.zero_()"),
    fault("never waited for", "forgotten", "all_reduce", "dist.all_reduce(ones()"),
)
def inputs_of_collectives(fault: str) -> None:
    side, x, total = torch.cuda.Stream(), ones(), torch.empty(2000, device="cuda")
    side.wait_stream(current())
    with torch.cuda.stream(side):
        y = x * 2
    if fault != "started too early":
        current().wait_stream(side)
    dist.all_reduce(y)
    current().wait_stream(side)
    work = gather_equal(total, x, async_op=True)
    if fault != "changed too early":
        work.wait()
    x.add_(1)
    work.wait()
    work = dist.reduce_scatter(y, [ones(), x], async_op=True)
    if fault != "one of a list changed too early":
        work.wait()
    x.zero_()
    work.wait()
    work = dist.all_reduce(ones(), async_op=True)
    if fault != "forgotten":
        work.wait()


@program(
    2,
    refused("another order", "not the same order on all ranks", "order = [", "order = ["),
    refused("other sizes", "not the same order on all ranks", "(ones(1000 +", "(ones(1000 +"),
    refused("another source", '"op": "scatter", "elements": 1000', "dist.scatter(x", "dist.scatter(x"),
    refused("other sizes in a list", '"elements": [1000, 3]', "dist.all_gather(", "dist.all_gather("),
)
def collectives_that_all_ranks_call_alike(fault: str) -> None:
    x, y = ones(), torch.empty(2000, device="cuda")
    order = [lambda: dist.all_reduce(x), lambda: gather_equal(y, x)]
    for collective in order[::-1] if fault == "another order" and rank() else order:
        collective()
    dist.all_reduce(ones(1000 + rank() * (fault == "other sizes")))
    source = rank() if fault == "another source" else 0
    dist.scatter(x, [ones(), ones()] if rank() == source else None, src=source)
    other = 4 if fault == "other sizes in a list" and not rank() else 3
    dist.all_gather([ones(1000), ones(other)], ones(3 if rank() else 1000))


@program(
    2,
    refused("one card", "Duplicate GPU detected: rank 0 and rank 1 both on CUDA device 0", "dist.all_reduce(ones())"),
    refused(
        "made in another order", "the first to come made [[", "(ones(), group=alone)", also="communicator", seconds=3
    ),
    fault("communicators in another order", "used in another order", "rank 0: all_reduce on", "works = [", "works = ["),
)
def groups_of_ranks(fault: str) -> None:
    torch.cuda.set_device(0 if fault == "one card" else rank())
    dist.all_reduce(ones())
    order = [1, 0] if fault == "made in another order" and rank() else [0, 1]
    alone = {one: dist.new_group([one]) for one in order}[rank()]
    dist.all_reduce(ones(), group=alone)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups:  # makes them
        dist.all_reduce(ones(), group=group)
    if fault == "used in another order" and rank():
        groups.reverse()
    works = [dist.all_reduce(ones(), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()


@program(3, refused("no batch", "came to make it", "works = [dist.isend(", seconds=3))
def messages_in_a_circle(fault: str) -> None:
    """Each rank sends first: each waits for a communicator of two whose other rank waits for another one."""
    x, y, size = ones(), torch.empty(1000, device="cuda"), dist.get_world_size()
    after, before = (rank() + 1) % size, (rank() - 1) % size
    if fault:
        works = [dist.isend(x, after), dist.irecv(y, before)]
    else:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)])
    for work in works:
        work.wait()
    y.add_(1)


@program(
    2,
    fault("unbatched pair", "no batch", "outside batch_isend_irecv and without device_id", "works = [op(x, peer)]"),
    refused("another dtype", '"dtype": "bfloat16"}', "isend_irecv(ops)", "isend_irecv(ops)", also="communicator"),
    refused("not received", "did not end within", "isend_irecv(ops)"),
)
def a_message(fault: str) -> None:
    dist.barrier()
    op, peer = dist.irecv if rank() else dist.isend, 1 - rank()
    x = ones().to(torch.float16 if fault == "another dtype" and rank() else torch.bfloat16)
    ops = [dist.P2POp(op, x, peer)]
    if fault == "no batch":
        works = [op(x, peer)]
    else:
        works = [] if fault == "not received" and rank() else dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    x.add_(1)


@program(
    2,
    refused("out of memory on one rank", "did not end within", "dist.all_reduce(z)"),
    refused("aborted", "it was aborted", "dist.all_reduce(x)"),
)
def collectives_after_a_failure(fault: str) -> None:
    dist.barrier()
    if fault == "out of memory on one rank" and rank() == 1:
        device.lib.fail_allocation(2)
    x = ones()
    y = x * 2
    z = y + 1  # the third allocation
    dist.all_reduce(z)
    if fault == "aborted":
        group: Any = dist.group.WORLD
        group.abort()
    dist.all_reduce(x)


@program(2, refused("a poll decides", "not the same order on all ranks", "all_reduce(second)", "all_reduce(other)"))
def buckets(fault: str) -> None:
    """Whether a work is over depends on how far the device is behind: ranks that ask it launch at different points."""
    device.lib.set_lag(1000 if rank() else 1)
    first, second, other = ones(), ones(500), ones(200)
    work = dist.all_reduce(first, async_op=True)
    for _ in range(10):
        other.mul_(2)
    work.exchange.result()  # the exchange is over, the device may be behind
    early = work.is_completed() if fault else True
    if early:
        dist.all_reduce(second)
    dist.all_reduce(other)
    if not early:
        dist.all_reduce(second)
    work.wait()
