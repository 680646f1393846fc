"""What this machine has: its devices, their memory, and how many products a second they could compute at most."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from isograd.train.config import Config

# Dense bf16 tensor-core TFLOPS as their makers state them.
BF16 = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "A10G": 70.0}
PER_CORE = 4  # ranks that share one CPU core at most


@dataclass(frozen=True)
class Machine:
    """Where local ranks would run. On GPUs a rank has one device for itself; on CPUs ranks share cores and memory."""

    gpu: str | None  # its name; None: no GPU
    devices: int  # GPUs, or CPU cores
    memory: float  # bytes of one GPU, or of the whole machine

    @property
    def most_ranks(self) -> int:
        """How many ranks may be started here."""
        return self.devices if self.gpu else PER_CORE * self.devices

    def describe(self) -> str:
        """For people: '2 CPU cores, 23.5 GB' or '8 GPUs H100, 80.0 GB each'."""
        many = "" if self.devices == 1 else "s"
        if self.gpu:
            return f"{self.devices} GPU{many} {self.gpu}, {self.memory / 1e9:.1f} GB each"
        return f"{self.devices} CPU core{many}, {self.memory / 1e9:.1f} GB"


def this_machine() -> Machine:
    """What this process may use: its GPUs, or its cores and the memory that its container is given."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Machine(properties.name, torch.cuda.device_count(), float(properties.total_memory))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Machine(None, cores, min(memory, _container_limit()))


def _container_limit() -> float:
    """Bytes that Linux's control groups allow; infinite where nothing is limited or known."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdecimal():
            return float(text)
    return float("inf")


def peak_flops(device: torch.device, config: Config) -> float | None:
    """The most FLOPS of one device, for MFU; None where it is not known. fp32 runs at a fraction of the bf16 peak."""
    if config.log.peak_tflops is not None:
        return config.log.peak_tflops * 1e12
    if device.type != "cuda" or config.model.dtype != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in BF16.items() if part in name), None)
