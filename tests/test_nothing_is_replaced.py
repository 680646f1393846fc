"""A program that trains and verifies with isograd finds torch as it was, while a step runs and after it.

Each part runs in fresh processes: `python -m tests.test_nothing_is_replaced PART FOLDER`. They look at torch before
isograd is imported, inside the forwards of models, and at the end. Assignments are noted as they are made, and so are
C functions that change the whole process. The verifier's watcher is exempt: in the processes that it records, it wraps
functions on purpose. The process that asks for a proof is looked at.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # it wraps torch.manual_seed when it is first imported
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import distributed_c10d

PARTS = {"engine": 2, "contrastive": 2, "train": 2, "verify": 1}  # and their numbers of ranks
KNOWN: set[str] = set()
PROCESS = {"prctl", "mallopt", "malloc_trim", "setrlimit", "sched_setaffinity", "setpriority"}
MODULES = [torch, F, dist, distributed_c10d]
HOLDERS = [*MODULES, Tensor, nn.Linear, nn.Embedding, nn.Module, torch.autograd, torch.autograd.Function]
BEFORE: list[dict[str, Any]] = []
REPLACED: set[str] = set()


def callables(holder: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(holder).items() if callable(value)}


class Noting(ModuleType):
    """A module that notes assignments to its functions. Its own `global` statements do not come here."""

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__.get(name)
        if callable(before) and before is not value and not name.startswith("__"):
            REPLACED.add(f"{self.__name__}.{name}")
        super().__setattr__(name, value)


def audit(event: str, details: tuple[Any, ...]) -> None:
    if event == "ctypes.dlsym" and details[1] in PROCESS and "isograd" in of_file(sys._getframe(1)):
        REPLACED.add(details[1])


def of_file(frame: FrameType | None) -> str:
    """The files of the callers, but for this one."""
    found = []
    while frame is not None:
        found.append(frame.f_code.co_filename)
        frame = frame.f_back
    return " ".join(name for name in found if name != __file__)


def begin() -> None:
    for module in MODULES:
        if type(module) is ModuleType:
            module.__class__ = Noting
    sys.addaudithook(audit)
    BEFORE.extend(callables(holder) for holder in HOLDERS)


def look() -> None:
    """Where `begin` was called: note each function of torch that is another one than at the beginning."""
    for holder, before in zip(HOLDERS, BEFORE, strict=False):
        now, where = vars(holder), getattr(holder, "__qualname__", holder.__name__)
        REPLACED.update(f"{where}.{name}" for name, value in before.items() if now.get(name) is not value)


class Looking(nn.Module):
    """Looks at torch in forward and in backward."""

    def forward(self, x: Tensor) -> Tensor:
        look()
        if x.requires_grad:
            x.register_hook(lambda gradient: look())
        return x


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6), Looking(), nn.Linear(6, 6), Looking(), nn.LayerNorm(6), Looking(), nn.Linear(6, 6)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def engine(_: Path) -> None:
    import isograd as ig

    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for layout in ("dp2 zero1", "dp2 zero3"):
        model = nn.Sequential(*layers())
        step = ig.Engine(model, ig.Mesh(layout), sgd)
        for _ in range(2):
            step.backward(model(x).square().mean(), weight=8)
            step.step()
    for layout in ("pp2 zb", "pp2"):
        stages = ig.pipeline.Stages(
            layers(), mesh := ig.Mesh(layout), loss=lambda y, micro: (y.square().mean(), len(y))
        )
        step = ig.Engine(stages, mesh, sgd)
        step.train_step((x,), 4)
        assert all("forward" not in vars(m) for m in stages.modules())
    config = ig.models.TransformerConfig(vocab=16, hidden=8, layers=2, heads=2, mlp=16)
    own = ig.models.Transformer(config, mesh := ig.Mesh("tp2"))
    for block in own.blocks:
        block.register_forward_pre_hook(lambda *_: look())
    tokens = torch.arange(24).view(3, 8) % 16
    ig.Engine(own, mesh, sgd).train_step((tokens, tokens), 1)


def contrastive(_: Path) -> None:
    import isograd as ig
    from isograd.losses.contrastive import GradientCache, InfoNCE

    model = nn.Sequential(*layers())
    step = ig.Engine(model, mesh := ig.Mesh("dp2"), sgd)
    GradientCache(step, InfoNCE(mesh), encode=model, chunk=2).backward(torch.randn(5, 6), torch.randn(5, 6))
    step.step()


def train(folder: Path) -> None:
    from isograd.train import loop
    from isograd.train.config import Config

    values = {
        "run": str(folder / "run"),
        "layout": "dp2 zero1",
        "model": {"preset": "tiny-llama", "options": {"vocab": 257}},
        "data": {"sources": [{"path": str(folder / "tokens")}], "length": 12},
        "optimizer": {"lr": 1e-2},
        "steps": 2,
        "batch": 4,
        "evaluate": {"batches": 1},
    }
    look_before = loop.RunOptions(show="none", signals=(), before_step=lambda number, job: look())
    assert loop.run(Config.model_validate(values), look_before).code == 0


def case(mesh: Any) -> Any:
    import isograd as ig

    stages = ig.pipeline.Stages(layers(), mesh, loss=lambda y, micro: (y.square().mean(), len(y)))
    return ig.prove.Case(stages, (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)),))


def verify(_: Path) -> None:
    import isograd as ig

    report = ig.verify(f"{__file__}:case", ["pp2 zb", "pp2 dp2"])
    assert report.ok, f"\n{report}"


@pytest.mark.medium
@pytest.mark.parametrize("part", PARTS)
def test_torch_is_as_it_was(part: str, tmp_path: Path) -> None:
    from isograd.data import build

    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("some words to be learned, and others that are not\n" * 20)
    build(tmp_path / "tokens", sorted(tmp_path.glob("*.txt")), validation=0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "tests.test_nothing_is_replaced", part, str(tmp_path)]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(PARTS[part])}
    ranks = []
    for rank in range(PARTS[part]):
        place = world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": world["WORLD_SIZE"]}
        environment = os.environ | (place if PARTS[part] > 1 else {})
        ranks.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
    for rank in ranks:
        said, _ = rank.communicate(timeout=200)
        assert rank.returncode == 0, said


if __name__ == "__main__":
    assert not [name for name in sys.modules if name.startswith("isograd")]
    threads = torch.get_num_threads()
    begin()
    {"engine": engine, "contrastive": contrastive, "train": train, "verify": verify}[sys.argv[1]](Path(sys.argv[2]))
    look()
    assert torch.get_num_threads() == threads
    assert REPLACED <= KNOWN, f"replaced: {sorted(REPLACED - KNOWN)}"
