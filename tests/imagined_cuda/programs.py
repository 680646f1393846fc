"""Small programs in plain torch: each with a fault, or without it. `PROGRAMS` says what the fault is called.

A program is called with True for the faulty form. The right form does the same work and must give no finding that is a
fault. Nothing here imports isograd.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import device


@dataclass(frozen=True)
class Program:
    """`kind`: of the finding that names the fault; `says`: a part of its text; `lines`: parts of the lines that it
    names, in order: of both accesses, or of both ranks' calls; one where there is one only."""

    run: Callable[[bool], Any]
    ranks: int
    kind: str
    says: str
    lines: tuple[str, ...]
    also: tuple[str, ...] = ()  # kinds that follow from it
    seconds: float = 60  # NCCL's timeout
    lag: Any = 100


PROGRAMS: dict[str, Program] = {}


def program(kind: str, says: str, lines: tuple[str, ...], ranks: int = 1, **options: Any) -> Callable[[Any], Any]:
    def keep(function: Callable[[bool], Any]) -> Callable[[bool], Any]:
        PROGRAMS[function.__name__] = Program(function, ranks, kind, says, lines, **options)
        return function

    return keep


def current() -> Any:
    return torch.cuda.current_stream()


def ones(n: int = 1000) -> Tensor:
    return torch.ones(n, device="cuda")


# -- streams and events ------------------------------------------------------------------------------------------------


@program("race", "aten::fill_ writes", ("x = torch.cuda.Stream(), ones()", "y = x * 2"))
def side_stream_starts_too_early(faulty: bool) -> None:
    side, x = torch.cuda.Stream(), ones()
    if not faulty:
        side.wait_stream(current())
    with torch.cuda.stream(side):
        y = x * 2
    current().wait_stream(side)
    y.add_(1)
    x.record_stream(side)


@program("race", "aten::mul writes", ("y = x * 2", "y.sum()"))
def result_of_a_side_stream_is_read_too_early(faulty: bool) -> None:
    side, x = torch.cuda.Stream(), ones()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        y = x * 2
    if not faulty:
        current().wait_stream(side)
    y.sum()
    side.synchronize()


@program("race", "aten::mul reads", ("_ = x * 2", "x.zero_()"))
def input_of_a_side_stream_is_overwritten(faulty: bool) -> None:
    side, x = torch.cuda.Stream(), ones()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        _ = x * 2
    if not faulty:
        current().wait_stream(side)
    x.zero_()
    side.synchronize()


@program("race", "aten::add writes", ("x.add_(1)", "_ = x * 2"))
def event_is_recorded_before_the_write(faulty: bool) -> None:
    side, x, event = torch.cuda.Stream(), ones(), torch.cuda.Event()
    event.record()
    x.add_(1)
    if not faulty:
        event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        _ = x * 2
    side.synchronize()


@program("event never recorded", "that nobody has recorded", ("side.wait_event(event)",), also=("race",))
def event_is_waited_for_before_it_is_recorded(faulty: bool) -> None:
    side, x, event = torch.cuda.Stream(), ones(), torch.cuda.Event()
    if not faulty:
        event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        _ = x * 2
    side.synchronize()


@program("reused too early", "the memory is freed", ("total = x.sum()", "ones().mul_(3)"))
def memory_is_freed_while_a_side_stream_reads_it(faulty: bool) -> None:
    side, x = torch.cuda.Stream(), ones()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        total = x.sum()
    if not faulty:
        x.record_stream(side)
    del x
    ones().mul_(3)  # of the same size: it gets the same memory
    current().wait_stream(side)
    total.add_(1)


@program("reused too early", "the memory is freed", ("x.mul_(2)", "y.fill_(2)"))
def memory_of_a_side_stream_is_used_there_before_its_owner_is_done(faulty: bool) -> None:
    side, other, x = torch.cuda.Stream(), torch.cuda.Stream(), ones()
    other.wait_stream(current())
    with torch.cuda.stream(other):
        x.mul_(2)
    current().wait_stream(other)  # its owner waits here, the side stream for nobody
    del x
    y = torch.empty(1000, device="cuda")
    if not faulty:
        side.wait_stream(current())
    with torch.cuda.stream(side):
        y.fill_(2)
    current().wait_stream(side)
    y.add_(1)


@program("race", "writes on stream", ("(w * w).sum().backward()", "w.grad.mul_(2)"))
def gradients_are_read_on_another_stream_than_backward_ran_on(faulty: bool) -> None:
    side = torch.cuda.Stream()
    w = ones().requires_grad_()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        (w * w).sum().backward()
    if not faulty:
        current().wait_stream(side)
    assert w.grad is not None
    w.grad.mul_(2)


@program("race", "on stream", ("copies = [", "optimizer.step()"))
def parameters_change_while_a_side_stream_copies_them(faulty: bool) -> None:
    side = torch.cuda.Stream()
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        copies = [p.detach().clone() for p in model.parameters()]
    if not faulty:
        current().wait_stream(side)
    optimizer.step()
    side.synchronize()
    assert len(copies) == 2


# -- the host ----------------------------------------------------------------------------------------------------------


@program("host wait", "item", ("seen.append(g.sum().item()",))
def item_in_a_hook_of_backward(faulty: bool) -> None:
    w, seen = ones().requires_grad_(), []
    w.register_hook(lambda g: seen.append(g.sum().item() if faulty else g.sum()))
    (w * 2).sum().backward()


@program("host wait", "nonzero", ("x.nonzero()",))
def nonzero_in_forward(faulty: bool) -> None:
    x = ones()
    _ = x.nonzero() if faulty else torch.where(x > 0, x, 0)


@program("host wait", "mask", ("x[x > 0] =",))
def index_by_a_mask(faulty: bool) -> None:
    x = ones()
    x[x > 0] = x.sum() if faulty else 2


@program("pageable copy", "said to be non_blocking", ("host.to(",))
def pageable_copy_that_should_overlap(faulty: bool) -> None:
    host = torch.ones(1000) if faulty else torch.ones(1000, pin_memory=True)
    host.to("cuda", non_blocking=True).add_(1)


@program("host reads too early", "aten::sum", ("host.copy_(ones()", "float(host.sum())"))
def pinned_memory_is_read_before_its_event(faulty: bool) -> float:
    host, event = torch.empty(1000, pin_memory=True), torch.cuda.Event()
    host.copy_(ones(), non_blocking=True)
    event.record()
    if not faulty:
        event.synchronize()
    with ThreadPoolExecutor(1) as pool:
        total = pool.submit(lambda: float(host.sum())).result()
    assert (total == 1000) is not faulty
    torch.cuda.synchronize()
    return total


@program("host writes too early", "aten::fill_", ("host.to(", "host.fill_(2)"))
def pinned_memory_is_refilled_while_it_is_copied(faulty: bool) -> None:
    host, event = torch.ones(1000, pin_memory=True), torch.cuda.Event()
    host.to("cuda", non_blocking=True).add_(1)
    event.record()
    if not faulty:
        event.synchronize()
    host.fill_(2)


@program("race", "a copy to the host writes", ("host.copy_(x, non_blocking=True)", 'host.to("cuda"'))
def pinned_memory_is_fetched_on_a_stream_that_its_copy_is_not_before(faulty: bool) -> None:
    side, x, host = torch.cuda.Stream(), ones(), torch.empty(1000, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if not faulty:
        side.wait_stream(current())
    with torch.cuda.stream(side):
        y = host.to("cuda", non_blocking=True) * 2
    side.synchronize()
    assert faulty or y.sum().item() == 2000


# -- NCCL --------------------------------------------------------------------------------------------------------------


gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


def rank() -> int:
    return dist.get_rank()


@program("race", "nccl:all_reduce writes", ("dist.all_reduce(x", "y = x * 2"), ranks=2)
def collective_is_not_waited_for(faulty: bool) -> None:
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    if not faulty:
        work.wait()
    y = x * 2
    work.wait()
    assert faulty or y[0].item() == 4


@program("race", "nccl:all_reduce writes", ("dist.all_reduce(x", "x.mul_(2)"), ranks=2)
def collective_is_waited_for_on_the_wrong_stream(faulty: bool) -> None:
    x, other = ones(), torch.cuda.Stream()
    work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(other) if faulty else nullcontext():
        work.wait()
    x.mul_(2)


@program("race", "nccl:all_reduce writes", ("dist.all_reduce(x", "x.mul_(2)"), ranks=2)
def collective_is_waited_for_in_a_thread_that_is_only_joined(faulty: bool) -> None:
    """The thread's current stream waits, and that is the default stream. The user's is another one."""
    mine = torch.cuda.Stream()
    with torch.cuda.stream(mine):
        x = ones()
        work = dist.all_reduce(x, async_op=True)
        thread = threading.Thread(target=work.wait)
        thread.start()
        thread.join()
        if not faulty:
            work.wait()
        x.mul_(2)


@program("race", "nccl:all_gather reads", ("gather_equal(total", "x.add_(1)"), ranks=2)
def gradient_changes_while_it_is_reduced(faulty: bool) -> None:
    x = ones()
    total = torch.empty(2000, device="cuda")
    work = gather_equal(total, x, async_op=True)
    if not faulty:
        work.wait()
    x.add_(1)
    work.wait()


@program("race", "aten::mul writes", ("y = x * 2", "dist.all_reduce(y)"), ranks=2)
def collective_starts_before_its_input_is_there(faulty: bool) -> None:
    side, x = torch.cuda.Stream(), ones()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        y = x * 2
    if not faulty:
        current().wait_stream(side)
    dist.all_reduce(y)
    current().wait_stream(side)


@program("communicator", "not the same order on all ranks", ("order = [", "order = ["), ranks=2, seconds=20)
def collectives_in_another_order_on_one_rank(faulty: bool) -> None:
    x, y = ones(), torch.empty(2000, device="cuda")
    order = [lambda: dist.all_reduce(x), lambda: gather_equal(y, x)]
    for collective in reversed(order) if faulty and rank() == 1 else order:
        collective()


@program(
    "communicator",
    "not the same order on all ranks",
    ("dist.all_reduce(ones(", "dist.all_reduce(ones("),
    ranks=2,
    seconds=20,
)
def sizes_differ_between_ranks(faulty: bool) -> None:
    dist.all_reduce(ones(1000 + faulty * rank()))


@program("communicator", '"op": "scatter", "elements": 1000', ("dist.scatter(x", "dist.scatter(x"), ranks=2, seconds=20)
def scatter_from_another_rank_on_one_rank(faulty: bool) -> None:
    x, source = ones(), rank() if faulty else 0
    dist.scatter(x, [ones(), ones()] if rank() == source else None, src=source)


@program("communicator", '"elements": [1000, 3]', ("dist.all_gather(", "dist.all_gather("), ranks=2, seconds=20)
def sizes_of_an_uneven_gather_are_known_to_one_rank_only(faulty: bool) -> None:
    other = 3 if rank() or not faulty else 4
    dist.all_gather([ones(1000), ones(other)], ones(3 if rank() else 1000))


@program("race", "nccl:reduce_scatter reads", ("dist.reduce_scatter(", "x.zero_()"), ranks=2)
def one_of_a_list_changes_while_it_is_reduced(faulty: bool) -> None:
    x, total = ones(), ones()
    work = dist.reduce_scatter(total, [ones(), x], async_op=True)
    if not faulty:
        work.wait()
    x.zero_()
    work.wait()


@program(
    "communicator", "Duplicate GPU detected: rank 0 and rank 1 both on CUDA device 0", ("dist.all_reduce(",), ranks=2
)
def two_ranks_use_one_card(faulty: bool) -> None:
    torch.cuda.set_device(0 if faulty else rank())
    dist.all_reduce(ones())


@program("communicators in another order", "rank 0: all_reduce on", ("works = [", "works = ["), ranks=2)
def two_communicators_in_another_order_on_one_rank(faulty: bool) -> None:
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    x, y = ones(), ones()
    for group in (one, other):  # makes them
        dist.all_reduce(ones(), group=group)
    order = [(x, one), (y, other)]
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in (order[::-1] if faulty and rank() else order)]
    for work in works:
        work.wait()


@program("communicator", "came to make it", ("works = [dist.isend(",), ranks=3, seconds=3)
def pairs_of_ranks_in_a_circle_without_a_batch(faulty: bool) -> None:
    """Each rank sends first: each waits for a communicator of two whose other rank waits for another one."""
    x, y, size = ones(), torch.empty(1000, device="cuda"), dist.get_world_size()
    after, before = (rank() + 1) % size, (rank() - 1) % size
    if faulty:
        works = [dist.isend(x, after), dist.irecv(y, before)]
    else:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)])
    for work in works:
        work.wait()
    y.add_(1)


@program("communicator", "the first to come made [[", ("dist.all_reduce(ones(), group=mine)",), ranks=2, seconds=20)
def groups_are_made_in_another_order_on_one_rank(faulty: bool) -> None:
    order = [1, 0] if faulty and rank() else [0, 1]
    mine = {one: dist.new_group([one]) for one in order}[rank()]
    dist.all_reduce(ones(), group=mine)


@program("unbatched pair", "outside batch_isend_irecv and without device_id", ("works = [op(x, peer)]",), ranks=2)
def send_and_receive_without_a_batch(faulty: bool) -> None:
    x, op, peer = ones(), dist.irecv if rank() else dist.isend, 1 - rank()
    works = [op(x, peer)] if faulty else dist.batch_isend_irecv([dist.P2POp(op, x, peer)])
    for work in works:
        work.wait()
    x.add_(1)


@program("communicator", "bfloat16 of imagined_cuda/programs.py", ("isend_irecv([",), ranks=2, also=("communicator",))
def message_has_another_dtype_on_one_rank(faulty: bool) -> None:
    x = ones().to(torch.float16 if faulty and rank() else torch.bfloat16)
    dist.batch_isend_irecv([dist.P2POp(dist.irecv if rank() else dist.isend, x, 1 - rank())])[0].wait()


@program("communicator", "did not end within", ("dist.batch_isend_irecv(ops)",), ranks=2, seconds=20)
def send_that_nobody_receives(faulty: bool) -> None:
    dist.barrier()
    ops = [dist.P2POp(dist.irecv if rank() else dist.isend, ones(), 1 - rank())]
    for work in [] if faulty and rank() else dist.batch_isend_irecv(ops):
        work.wait()


@program("never waited for", "all_reduce", ("dist.all_reduce(ones()",), ranks=2)
def work_is_forgotten(faulty: bool) -> None:
    work = dist.all_reduce(ones(), async_op=True)
    if not faulty:
        work.wait()


@program("communicator", "did not end within", ("dist.all_reduce(z)",), ranks=2, seconds=20)
def one_rank_runs_out_of_memory(faulty: bool) -> None:
    dist.barrier()
    if faulty and rank() == 1:
        device.lib.fail_allocation(2)
    x = ones()
    y = x * 2
    z = y + 1  # the third allocation
    dist.all_reduce(z)


@program("communicator", "it was aborted", ("dist.all_reduce(x)",), ranks=2)
def communicator_is_used_after_abort(faulty: bool) -> None:
    x = ones()
    dist.all_reduce(x)
    if faulty:
        group: Any = dist.group.WORLD
        group.abort()
    dist.all_reduce(x)


@program(
    "communicator",
    "not the same order on all ranks",
    ("dist.all_reduce(second)", "dist.all_reduce(other)"),
    ranks=2,
    lag=(1, 1000),
    seconds=20,
)
def bucket_leaves_when_a_poll_says_so(faulty: bool) -> None:
    """Whether a work is over depends on how far the device is behind: ranks that ask it launch at different points."""
    first, second, other = ones(), ones(500), ones(200)
    work = dist.all_reduce(first, async_op=True)
    for _ in range(10):
        other.mul_(2)
    work._job.done.wait()  # the exchange is over, the device may be behind
    early = work.is_completed() if faulty else True
    if early:
        dist.all_reduce(second)
    dist.all_reduce(other)
    if not early:
        dist.all_reduce(second)
    work.wait()
