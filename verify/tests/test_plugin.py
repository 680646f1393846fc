"""The pytest plugin: a test's own training function runs on ranks, and a bug of its gradients fails the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(summed):
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    model = DDP(net) if summed else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.isograd(ranks=2)
def test_right():
    train(True)


@pytest.mark.isograd(ranks=2)
def test_wrong():
    train(False)


@pytest.mark.isograd(ranks=2)
def test_with_a_fixture(tmp_path):
    pass


def test_unmarked():
    assert not dist.is_initialized()
"""


@pytest.mark.medium
def test_a_marked_test_runs_on_ranks_and_a_bug_fails_it(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS)
    source = Path(__file__).parents[1] / "src"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:isograd-verify"]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-p", "no:isograd", "-p", "isograd_verify.plugin", "test_mine.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "test_mine.test_wrong on 2 ranks" in done.stdout and "not summed" in done.stdout
    assert "on a function without arguments" in done.stdout
