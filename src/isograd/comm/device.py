"""On which device each rank computes, and with which backend all of them communicate.

A rank sees only its own machine. So before any group is made, each proposes what it would do, in the store where the
ranks meet, and rank 0 compares: either all compute on cards of their own, over NCCL, or all on CPUs, over gloo.
Anything else is refused on all ranks: a rank that silently took the CPU would slow down all the others, or hang them.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch

from isograd.errors import CommError

Asked = Literal["cpu"] | None  # None: a card, where the machine has any
FAREWELL_S = 10.0  # that rank 0, in which the store may live, waits for the others to read why they are refused
SHOWN = 6

_joined: torch.device | None = None  # this rank's device in the running world, if `agree` has decided it


@dataclass(frozen=True)
class Proposal:
    """What a rank knows before it meets the others."""

    rank: int
    host: str
    cards: int  # that it sees
    needed: int  # cards of this machine, one for each local rank
    card: str  # which it would take, by a name that is the same in all processes; empty: none, or it has no such name
    cpu: bool  # on purpose
    scheduler: str  # "slurm", "kubernetes" or ""


def device() -> torch.device:
    """Where this rank's tensors live: its own card, or the CPU."""
    return _joined or _own_card() or torch.device("cpu")


def _own_card() -> torch.device | None:
    """The only card that this rank sees, or that of its place on the machine; None: it sees none, or too few."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cards > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cards >= _needed() else None
    return torch.device("cuda", 0) if cards else None


def _needed() -> int:
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0")) + 1)


def propose(rank: int, asked: Asked) -> Proposal:
    """This rank's proposal. Its card becomes the current one: what names no card means this one from here on."""
    card, name = None if asked == "cpu" else _own_card(), ""
    if card is not None:
        torch.cuda.set_device(card)
        name = str(getattr(torch.cuda.get_device_properties(card), "uuid", ""))
    signs = {"slurm": "SLURM_JOB_ID", "kubernetes": "KUBERNETES_SERVICE_HOST"}
    scheduler = next((found for found, variable in signs.items() if variable in os.environ), "")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Proposal(rank, socket.gethostname(), cards, _needed(), name, asked == "cpu", scheduler)


def agree(store: Any, rank: int, size: int, asked: Asked, seconds: float) -> str:
    """The backend of a world that is about to be made. All its ranks call this, and all return or raise the same."""
    global _joined  # noqa: PLW0603  (one per process, like the world itself)
    mine, limit, answer = propose(rank, asked), timedelta(seconds=seconds), "isograd/device/answer"
    if rank:
        store.set(here := f"isograd/device/{rank}", json.dumps(asdict(mine)))
        try:
            store.wait([answer], limit)
        except RuntimeError:  # who comes later must not take this rank for one that waits
            store.delete_key(here)
            raise
        refused = [Proposal(**one) for one in json.loads(store.get(answer))]
        store.set(f"isograd/device/heard/{rank}", "1")
        proposals = refused or [mine]
    else:
        others = [f"isograd/device/{other}" for other in range(1, size)]
        store.wait(others, limit)
        proposals = [mine, *(Proposal(**json.loads(store.get(key))) for key in others)]
        refused = [] if problem(proposals) is None else proposals
        store.set(answer, json.dumps([asdict(one) for one in refused]))
        if refused:
            with suppress(RuntimeError):  # a rank that has ended hears nothing
                heard = [f"isograd/device/heard/{other}" for other in range(1, size)]
                store.wait(heard, timedelta(seconds=FAREWELL_S))
    if (error := problem(proposals, f"rank {rank} on {mine.host}")) is not None:
        raise error
    card = None if mine.cpu else _own_card()
    _joined = card or torch.device("cpu")
    return "nccl" if card else "gloo"


def problem(proposals: Sequence[Proposal], where: str | None = None) -> CommError | None:
    """Why these ranks cannot form a world; None: they can."""
    gpu = [one for one in proposals if one.cards and not one.cpu]
    taken = Counter((one.host, one.card) for one in gpu if one.card)
    few = [one for one in gpu if 1 < one.cards < one.needed or taken[one.host, one.card] > 1]
    if few:
        return CommError("IG210", seen=_described(few), fix=_advice(few[0]), where=where)
    if gpu and len(gpu) < len(proposals):
        cpu = [one for one in proposals if one not in gpu]
        return CommError("IG211", seen=f"{_described(cpu)}; {_described(gpu)}", fix=_advice(cpu[0]), where=where)
    return None


def _described(proposals: Sequence[Proposal]) -> str:
    alike: dict[tuple[Any, ...], list[int]] = {}
    for one in proposals:
        shown = "the CPU on purpose" if one.cpu else f"{one.cards or 'no'} card{'' if one.cards == 1 else 's'}"
        shown += f" {one.card}" if one.cards == 1 and one.card else ""
        alike.setdefault((one.host, one.needed, shown), []).append(one.rank)
    lines = [
        f"ranks {ranks[:SHOWN]}{' and more' if len(ranks) > SHOWN else ''} on {host}, of {needed} there: {shown}"
        for (host, needed, shown), ranks in alike.items()
    ]
    return "; ".join(lines[:SHOWN]) + ("; and other machines" if len(lines) > SHOWN else "")


def _advice(one: Proposal) -> str:
    line = {
        "slurm": f"#SBATCH --gpus-per-node={one.needed}, and srun --gpu-bind=none where tasks are bound to cards",
        "kubernetes": f"nvidia.com/gpu: {one.needed} in the limits of the pod",
    }.get(one.scheduler, f"CUDA_VISIBLE_DEVICES with {one.needed} cards, or start fewer ranks on this machine")
    cpu = "device: cpu in the config, device='cpu' of Mesh or launch, or CUDA_VISIBLE_DEVICES= (empty)"
    return f"{line}; to compute on CPUs on purpose: {cpu}, on all ranks"


def refuse_late(asked: Asked, backend: str) -> None:
    """Raise where the CPU is asked for in a world that has been joined for cards."""
    if asked == "cpu" and backend == "nccl":
        raise CommError("IG212", seen="device='cpu', and a process group of NCCL")


def forget() -> None:
    """This process has left its world."""
    global _joined  # noqa: PLW0603
    _joined = None
