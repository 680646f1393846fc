"""What other libraries expect of a rank that torchrun has started, for ranks of the tests' own worlds."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from isograd.comm import world
from isograd.comm.device import device

_proofs: dict[tuple[object, ...], Any] = {}


def proving_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, in a rank: a class that is proven under a layout already is not proven again."""
    from isograd.hf import proof

    prove = proof.prove

    def once(config: Any, mesh: Any, adapter: Any = None, base_bits: int | None = None) -> Any:
        same = config.to_json_string(), config._attn_implementation, str(mesh.layout), repr(adapter), base_bits
        if same not in _proofs:
            _proofs[same] = prove(config, mesh, adapter, base_bits)
        return _proofs[same]

    with mock.patch.object(proof, "prove", once):
        return function(*arguments)


def free_port() -> int:
    """Of this machine."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def as_torchrun_starts_it() -> Iterator[tuple[int, int]]:
    """(rank, ranks); accelerate's state is made anew, before and after."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, ranks = world.world()
    on_cards = device().type == "cuda"  # of tests/imagined_cuda, whose ranks have torchrun's variables
    told: dict[str, object] = {} if on_cards else {"ACCELERATE_USE_CPU": "true"}
    if ranks > 1 and not on_cards:
        told |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}  # the world is there already

    def anew() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()

    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        anew()
        try:
            yield rank, ranks
        finally:
            anew()


@contextmanager
def as_lightning_finds_it() -> Iterator[tuple[int, int]]:
    """(rank, ranks); for Lightning, which knows torchrun by these."""
    rank, ranks = world.world()
    told: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    told |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1"}
    told["MASTER_PORT"] = os.environ.get("MASTER_PORT", free_port())  # a world of the tests' own is there already
    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        yield rank, ranks
