"""A CPU as a platform of verl, which has only accelerators, so that its workers run without one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform

from isograd.comm import world


def _nothing(*_: Any, **__: Any) -> None:
    """Of a device that has no queue, no cache and no streams."""


def _zero(*_: Any, **__: Any) -> int:
    return 0


ZEROS = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "current_device")
NONE = SimpleNamespace(
    get_device_name=lambda: "CPU", is_available=lambda: True, synchronize=_nothing, empty_cache=_nothing,
    set_device=_nothing, **dict.fromkeys(ZEROS, _zero),
)  # fmt: skip


class CPU(PlatformBase):  # type: ignore[misc]
    """All that PlatformBase asks for."""

    device_name, vendor_name, device_module = "cpu", "none", NONE  # type: ignore[assignment]
    current_device = device_count = set_device = synchronize = set_allocator_settings = empty_cache = _zero  # type: ignore
    profiler_start = profiler_stop = cudart = _nothing  # type: ignore[assignment]

    def is_available(self) -> bool:
        return True

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


@contextlib.contextmanager
def as_a_worker(folder: str) -> Iterator[tuple[int, int]]:
    """(rank, ranks) of what verl's launcher starts, whose world is there already."""
    set_platform(CPU())
    rank, ranks = world.world()
    if ranks == 1:
        world.join(0, 1, folder)
    told: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        try:
            yield rank, ranks
        finally:
            if ranks == 1:
                world.leave()
