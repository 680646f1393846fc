"""The processes of ranks, each of which leaves its result in its job's folder. See `run` in world.py.

On real cards they are spawned. On imagined ones a process that has loaded the device and torch once forks them.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from . import device


def free_port() -> int:
    """Below those that systems give to connections, which another process may get before ours is bound."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class Job:
    """What ranks run, and how."""

    program: bytes  # pickle of a function and its arguments
    ranks: int
    folder: Path
    lag: int = 100  # by how many launches the device is behind the host
    join: bool = True  # whether the world is joined; else variables like torchrun's are there, and the program joins it
    one_card: bool = False  # whether each rank sees its own card only
    seconds: float = 60  # NCCL's timeout
    limit: float = 120  # after which ranks are ended
    port: int = field(default_factory=free_port)


def are_real() -> bool:
    """Whether this torch is one for CUDA."""
    return "cuda: Optional[str] = None" not in (device.torch_folder() / "version.py").read_text()


def start_ranks(job: Job, method: str) -> None:
    """Start a job's ranks, by multiprocessing's "fork" or "spawn", and wait for them."""
    if method == "fork":  # this process imports what each rank would
        load()
        from tests import preloaded  # noqa: F401

        pickle.loads(job.program)
    context: Any = multiprocessing.get_context(method)
    ranks = [context.Process(target=rank_main, args=(job, rank)) for rank in range(job.ranks)]
    for one in ranks:
        one.start()
    end = time.monotonic() + job.limit + 5  # at the limit each ends by itself, and leaves where it stands
    for one in ranks:
        one.join(max(0.0, end - time.monotonic()))
        one.kill()


def load() -> None:
    """Give this process imagined cards, if it needs and has none; and torch one thread: its pool is made anew after a
    fork, and two threads that ask for it first would both do it."""
    if device.lib is None and not are_real():
        os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1")
        device.load()
        from . import nccl

        nccl.install()
    import torch

    torch.set_num_threads(1)


def rank_main(job: Job, rank: int) -> None:
    """One rank of a job, in its process."""
    load()
    import torch
    import torch.distributed as dist

    from . import communicator

    stacks = open(job.folder / f"{rank}.stacks", "w")  # noqa: SIM115
    faulthandler.enable(file=stacks)
    faulthandler.dump_traceback_later(job.limit, exit=True, file=stacks)
    size: dict[str, Any] = {"WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks, "RANK": rank, "LOCAL_RANK": rank}
    size |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": job.port}
    os.environ.update({name: str(value) for name, value in size.items()}, GLOO_SOCKET_IFNAME="lo")
    card = 0 if job.one_card else rank
    if job.one_card:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    if device.lib is not None:
        device.lib.own_cards(1 if job.one_card else device.CARDS)
        device.lib.set_lag(job.lag)
        communicator.World.longest = timedelta(seconds=job.seconds)
    torch.cuda.set_device(card)
    value, error = None, ""
    try:
        if job.ranks > 1 and job.join:
            dist.init_process_group(
                "nccl",
                store=dist.FileStore(str(job.folder / "store"), job.ranks),
                rank=rank,
                world_size=job.ranks,
                timeout=timedelta(seconds=job.seconds),
            )
        function, args = pickle.loads(job.program)
        value = function(*args)
    except BaseException:
        error = traceback.format_exc()
    result = {"rank": rank, "error": error, "found": []}
    if device.lib is not None:
        result["calls"], found = communicator.at_the_end(bool(error))
        result |= {"found": device.lib.findings() + found, "launches": device.lib.launches()}
        result["memory"] = device.lib.memory()
    written = job.folder / f"{rank}.part"
    try:
        if not error:
            torch.cuda.synchronize()  # for values that lie on cards, on whatever stream
        torch.save({**result, "value": value}, written)
    except Exception:
        torch.save({**result, "error": f"{error}\nits value:\n{traceback.format_exc()}"}, written)
    written.rename(job.folder / f"{rank}.result")
    os._exit(0)  # nothing of a world is taken down


def serve(connection: int) -> None:
    """Run jobs that come, and say whose ranks have ended, until the other end is closed."""
    jobs = Connection(connection)
    with suppress(EOFError):
        while job := jobs.recv():
            start_ranks(job, "fork")
            jobs.send(job.folder)
