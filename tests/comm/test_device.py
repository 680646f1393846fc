"""Ranks agree on devices and the backend before they join: on cards, on CPUs, or all are refused and told why."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from isograd.comm import device, raw
from isograd.comm import world as comm_world
from isograd.comm.device import Proposal, problem
from isograd.comm.world import new_group
from isograd.core.mesh import Mesh
from isograd.errors import CommError
from isograd.launcher.launch import launch
from isograd.train.resources import this_machine

MOST_S = 30  # a world that is refused later hangs


@dataclass(frozen=True)
class Machine:
    """What a rank finds around it."""

    cards: tuple[str, ...] = ()
    host: str = "host-a"
    local: tuple[int, int] = (0, 1)  # its place among the ranks of its machine, and how many they are
    variables: tuple[str, ...] = ()
    asked: device.Asked = None


def on_one(*ranks: Machine) -> list[Machine]:
    return [replace(rank, local=(place, len(ranks))) for place, rank in enumerate(ranks)]


EIGHT = ("a", "b", "c", "d", "e", "f", "g", "h")
CASES = {
    "a card for each": on_one(*[Machine(EIGHT)] * 3),
    "one visible card for each": on_one(Machine(("a",)), Machine(("b",)), Machine(("c",))),
    "no cards": on_one(*[Machine()] * 3),
    "the CPU on purpose": on_one(*[Machine(EIGHT, asked="cpu")] * 3),
    "two cards for three": on_one(*[Machine(EIGHT[:2])] * 3),
    "one card for three": on_one(*[Machine(("a",))] * 3),
    "too few in Slurm": on_one(*[Machine(EIGHT[:2], variables=("SLURM_JOB_ID",))] * 3),
    "too few in Kubernetes": on_one(*[Machine(EIGHT[:2], variables=("KUBERNETES_SERVICE_HOST",))] * 3),
    "a machine without cards": [*on_one(*[Machine(EIGHT)] * 2), Machine(host="host-b")],
    "the first machine without cards": [Machine(host="host-b"), *on_one(*[Machine(EIGHT)] * 2)],
    "the CPU on purpose on one rank": on_one(Machine(EIGHT), Machine(EIGHT, asked="cpu"), Machine(EIGHT)),
}


@contextmanager
def standing_on(machine: Machine) -> Iterator[None]:
    here, ranks = machine.local
    with ExitStack() as stack:
        place = {"LOCAL_RANK": str(here), "LOCAL_WORLD_SIZE": str(ranks)}
        stack.enter_context(patch.dict(os.environ, place | dict.fromkeys(machine.variables, "1")))
        for name, value in (
            ("is_available", lambda: bool(machine.cards)),
            ("device_count", lambda: len(machine.cards)),
            ("set_device", lambda card: None),
            ("get_device_properties", lambda card: SimpleNamespace(uuid=machine.cards[card.index], name="H100")),
        ):
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(device.socket, "gethostname", lambda: machine.host))
        yield


class Joins(Exception):
    """In the place of NCCL, which no machine of the tests has."""


def joined(machine: Machine, rank: int, place: Path) -> dict[str, Any]:
    """How this rank's attempt to join the others ends."""
    place.mkdir(exist_ok=True)
    make_world = dist.init_process_group

    def init(backend: str, **options: Any) -> None:
        if backend == "nccl":
            raise Joins(f"{backend} {options['device_id']}")
        make_world(backend, **options)

    with standing_on(machine), patch.object(dist, "init_process_group", init):
        try:
            comm_world.join(rank, 3, str(place), asked=machine.asked)
        except Joins as joins:
            return {"joins": str(joins), "device": str(comm_world.device())}
        except CommError as error:
            return {"code": error.code, "seen": error.seen, "fix": error.fix, "where": error.where}
        finally:
            comm_world.leave() if not dist.is_initialized() else None
        group = new_group("world", (0, 1, 2), rank)
        found = {"sum": float(raw.all_reduce(torch.tensor(1.0 + rank), group)), "device": str(comm_world.device())}
        comm_world.leave()
        return found


def all_cases(folder: str) -> list[dict[str, Any]]:
    rank = int(os.environ["RANK"])
    comm_world.leave()
    return [joined(ranks[rank], rank, Path(folder) / name) for name, ranks in CASES.items()]


@pytest.fixture(scope="module")
def ends(worlds, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """How each case ended, on each of three ranks."""
    world = worlds(3)
    said = world.run(all_cases, str(tmp_path_factory.mktemp("cases")), timeout=MOST_S)
    world.close(kill=True)
    return {name: [rank[number] for rank in said] for number, name in enumerate(CASES)}


def test_ranks_with_cards_of_their_own_join_nccl_each_on_its_card(ends) -> None:
    """One visible card is a rank's own, whatever its place on the machine: Slurm's --gpus-per-task does so."""
    assert [end["joins"] for end in ends["a card for each"]] == ["nccl cuda:0", "nccl cuda:1", "nccl cuda:2"]
    assert [end["device"] for end in ends["a card for each"]] == ["cuda:0", "cuda:1", "cuda:2"]
    assert ends["one visible card for each"] == [{"joins": "nccl cuda:0", "device": "cuda:0"}] * 3


@pytest.mark.parametrize("case", ["no cards", "the CPU on purpose"])
def test_ranks_without_cards_and_those_that_ask_for_the_cpu_join_gloo(ends, case: str) -> None:
    assert ends[case] == [{"sum": 6.0, "device": "cpu"}] * 3


@pytest.mark.parametrize(
    ("case", "code", "seen", "fix"),
    [
        ("two cards for three", "IG210", "ranks [0, 1, 2] on host-a, of 3 there: 2 cards", "device: cpu"),
        ("one card for three", "IG210", "ranks [0, 1, 2] on host-a, of 3 there: 1 card a", "device: cpu"),
        ("too few in Slurm", "IG210", "2 cards", "#SBATCH --gpus-per-node=3, and srun --gpu-bind=none"),
        ("too few in Kubernetes", "IG210", "2 cards", "nvidia.com/gpu: 3"),
        ("a machine without cards", "IG211", "ranks [2] on host-b, of 1 there: no cards", "device: cpu"),
        ("the first machine without cards", "IG211", "ranks [0] on host-b, of 1 there: no cards", "device: cpu"),
        ("the CPU on purpose on one rank", "IG211", "ranks [1] on host-a, of 3 there: the CPU on", "on all ranks"),
    ],
)
def test_all_ranks_are_refused_with_the_ranks_and_the_line_to_change(ends, case, code, seen, fix) -> None:
    for rank, end in enumerate(ends[case]):
        assert end["code"] == code
        assert seen in end["seen"]
        assert fix in end["fix"]
        assert end["where"] == f"rank {rank} on {CASES[case][rank].host}"


def test_many_ranks_and_machines_are_told_in_a_few_words() -> None:
    ranks = [Proposal(rank, f"host-{rank // 8}", 4, 8, EIGHT[rank % 4], False, "slurm") for rank in range(512)]
    error = problem(ranks)
    assert error is not None
    assert len(str(error.seen)) < 600
    assert "ranks [0, 1, 2, 3, 4, 5] and more on host-0, of 8 there: 4 cards" in str(error.seen)
    assert "and other machines" in str(error.seen)
    assert "--gpus-per-node=8" in str(error.fix)


def test_a_card_without_a_name_is_no_other_ranks() -> None:
    assert problem([Proposal(rank, "host", 1, 2, "", False, "") for rank in range(2)]) is None


def test_one_process_computes_on_its_card_or_on_the_cpu_on_purpose() -> None:
    with standing_on(Machine(EIGHT)):
        assert Mesh("1").device == torch.device("cuda", 0)
        assert Mesh("1", device="cpu").device == torch.device("cpu")
        assert this_machine("cpu").gpu is None


def asked() -> list[bool]:
    """What the second rank has proposed."""
    store: Any = distributed_c10d._get_default_store()
    return [bool(json.loads(store._underlying_non_prefix_store.get("isograd/device/1"))["cpu"])]


def test_launch_hands_the_choice_to_its_ranks() -> None:
    assert launch(asked, 2, timeout=60, device="cpu") == [[True]] * 2
    assert launch(asked, 2, timeout=60) == [[False]] * 2


def test_the_cpu_is_not_had_in_a_world_that_was_joined_for_cards() -> None:
    with pytest.raises(CommError) as error:
        device.refuse_late("cpu", "nccl")
    assert error.value.code == "IG212"
    device.refuse_late("cpu", "gloo")
    device.refuse_late(None, "nccl")


def group_in_a_bound_world() -> float | None:
    """A world that was joined with a device_id, perhaps by somebody else; torch would split groups off it."""
    rank, world = int(os.environ["RANK"]), dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 0)

    def split(_: Any) -> None:
        raise AssertionError("a split is a collective of all ranks, of which only the members come")

    try:
        with patch.object(distributed_c10d, "_get_split_source", split):
            if rank == 1:
                return None
            total = raw.all_reduce(torch.tensor(1.0 + rank), new_group("bound", (0, 2), rank, "bound"))
            assert world.bound_device_id == torch.device("cuda", 0)
            return float(total)
    finally:
        world.bound_device_id = None


def test_groups_of_a_world_that_is_bound_to_devices_need_their_members_alone(worlds) -> None:
    assert worlds(3).run(group_in_a_bound_world) == [4.0, None, 4.0]
