"""What a device could do at most: the number that MFU is a share of."""

from __future__ import annotations

import torch

from isograd.train.config import Config

# Dense bf16 tensor-core TFLOPS as their makers state them.
BF16 = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "A10G": 70.0}


def peak_flops(device: torch.device, config: Config) -> float | None:
    """Of one device; None where nobody has said. fp32 products on these cards run at a fraction of it."""
    if config.log.peak_tflops is not None:
        return config.log.peak_tflops * 1e12
    if device.type != "cuda" or config.model.dtype != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in BF16.items() if part in name), None)
