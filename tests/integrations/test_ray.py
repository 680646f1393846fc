"""The loop of examples/ray_train.py in Ray's TorchTrainer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]
STEPS = 30


def losses_of_one_device() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = (model(x) - x.cumsum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True], ids=["undisturbed", "a worker dies"])
def test_a_loop_in_ray_trains_as_one_device_also_when_a_worker_dies(tmp_path, dies) -> None:
    command = [
        sys.executable,
        ROOT / "examples" / "ray_train.py",
        "--folder",
        tmp_path / "run",
        "--steps",
        str(STEPS),
        "--every",
        "5",
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "GLOO_SOCKET_IFNAME": "lo"}
    with open(tmp_path / "said.txt", "w") as said:
        running = subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT)
    until = time.monotonic() + 240
    while dies and time.monotonic() < until:
        if list(tmp_path.glob("run/step-*")):
            workers = [p for p in psutil.Process(running.pid).children(recursive=True) if "RayTrainWorker" in p.name()]
            os.kill(max(p.pid for p in workers), signal.SIGKILL)
            break
        time.sleep(0.02)
    assert running.wait(240) == 0
    text = (tmp_path / "said.txt").read_text()
    told = {int(s): float(loss) for s, loss in re.findall(r"'step': (\d+), 'loss': ([\d.e-]+)", text)}
    assert sorted(told) == list(range(5, STEPS + 1, 5))
    assert list(told.values()) == pytest.approx(losses_of_one_device()[4::5], rel=1e-9)
    assert text.count("Started training worker group") == 1 + dies
