"""The verifier watches programs of isograd's engine as any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TWO = """
import torch
import torch.nn.functional as F
import isograd as ig

mesh = ig.Mesh("dp1 zero1")
for seed in (1, 2):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11))
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    tokens = torch.arange(12) % 11
    engine.backward(F.cross_entropy(model(tokens[:-1]), tokens[1:]), weight=11)
    engine.step()
"""


@pytest.mark.medium
def test_two_engines_in_one_program_pass(tmp_path: Path) -> None:
    """The second one's gradients were taken for the first one's, and its own were "never reduced"."""
    program = tmp_path / "two.py"
    program.write_text(TWO)
    words = [sys.executable, "-m", "isograd_verify", "run", "--", sys.executable, str(program)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "(1 PASS, 0 BUG, 0 INCONCLUSIVE)" in done.stdout
