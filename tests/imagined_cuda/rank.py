"""A process that has loaded the imagined device and torch once, and forks the ranks of each job. See `run` in world.py.

It reads jobs from its standard input and answers with a line when a job's ranks have ended. Each rank leaves its result
in the job's folder.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from typing import Any


def pickled(value: Any) -> bytes:
    """A value's pickle, in which tensors of cards lie in the host's memory: who reads it has no cards."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, one: Any) -> Any:
            on_card = isinstance(one, torch.Tensor) and one.is_cuda
            return one.detach().cpu().__reduce_ex__(2) if on_card else NotImplemented

    into = io.BytesIO()
    Pickler(into).dump(value)
    return into.getvalue()


def rank_main(job: Any, rank: int) -> None:
    """One rank of a job, in its process."""
    import torch
    import torch.distributed as dist

    from . import communicator, device, nccl

    stacks = open(job.folder / f"{rank}.stacks", "w")  # noqa: SIM115
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    size: dict[str, Any] = {"WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks, "RANK": rank, "LOCAL_RANK": rank}
    size |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": job.port}
    os.environ.update({name: str(value) for name, value in size.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)  # torch makes its pool anew after a fork, and two threads that ask first would both do it
    if job.one_card:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    if device.lib is not None:
        device.lib.own_cards(1 if job.one_card else device.CARDS)
        device.lib.set_lag(job.lag[rank] if isinstance(job.lag, (list, tuple)) else job.lag)
        nccl.at_most(job.seconds)
    torch.cuda.set_device(0 if job.one_card else rank)
    value, error = None, ""
    try:
        if job.ranks > 1 and job.join:
            place: dict[str, Any] = (
                {"device_id": torch.device("cuda", torch.cuda.current_device())} if job.device_id else {}
            )
            store = dist.FileStore(str(job.folder / "store"), job.ranks)
            dist.init_process_group(
                "nccl", store=store, rank=rank, world_size=job.ranks, timeout=timedelta(seconds=job.seconds), **place
            )
        module, name = job.function
        value = getattr(importlib.import_module(module), name)(*job.args)
    except BaseException:
        error = traceback.format_exc()
    result = {"rank": rank, "error": error, "found": []}
    if device.lib is not None:
        result["calls"], found = communicator.at_the_end(bool(error))
        result |= {"found": device.lib.findings() + found, "launches": device.lib.launches()}
        result["memory"] = device.lib.memory()
    written = job.folder / f"{rank}.part"
    try:
        written.write_bytes(pickled({**result, "value": value}))
    except Exception:
        written.write_bytes(pickled({**result, "error": f"{error}\nits value:\n{traceback.format_exc()}"}))
    written.rename(job.folder / f"{rank}.result")


def fork_ranks(job: Any) -> None:
    """Start a job's ranks, and end those that are still there after its limit."""
    children = {}
    for rank in range(job.ranks):
        pid = os.fork()
        if pid == 0:
            try:
                rank_main(job, rank)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        children[pid] = rank
    end = time.monotonic() + job.limit
    while children and time.monotonic() < end:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        children.pop(pid, None)
        time.sleep(0 if pid else 0.005)
    for number in (signal.SIGUSR1, signal.SIGKILL) if children else ():
        for pid in children:
            os.kill(pid, number)
        time.sleep(0.3)
    for pid in children:
        os.waitpid(pid, 0)


def alone(file: str, rank: int) -> None:
    """One rank of a job, which is a process of its own."""
    from . import device
    from .world import are_real

    if not are_real():
        device.load()
        from . import nccl

        nccl.install()
    with open(file, "rb") as job:
        rank_main(pickle.load(job), rank)
    os._exit(0)  # as after a fork: nothing of a world is taken down


def main() -> None:
    if len(sys.argv) > 1:
        alone(sys.argv[1], int(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print
    from . import device

    device.load()
    import torch

    torch.set_num_threads(1)
    from tests import preloaded  # noqa: F401

    from . import nccl

    nccl.install()
    while line := sys.stdin.buffer.readline():
        fork_ranks(pickle.loads(bytes.fromhex(line.decode())))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
