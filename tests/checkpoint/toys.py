"""Small models that train under any layout, from a step to a later one, and what they are afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from isograd.checkpoint import CheckpointManager
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.io import no_follow
from isograd.models import Transformer, TransformerConfig
from isograd.nn import ExpertOptions

ROWS, LENGTH = 8, 7
CONFIGS = {
    "small": TransformerConfig(vocab=97, hidden=16, layers=2, heads=4, kv_heads=2, mlp=12, qk_norm=True, tied=True),
    # 3 blocks: pp2 holds 1 and 2; a vocabulary and an mlp that nothing divides; kv heads fewer than tp4
    "qwen": TransformerConfig(
        vocab=101, hidden=24, layers=3, heads=8, kv_heads=2, head_dim=6, mlp=41, qk_norm=True, tied=True
    ),
    "experts": TransformerConfig(
        vocab=97, hidden=16, layers=3, heads=4, mlp=12,
        experts=ExpertOptions(
            number=4, per_token=2, width=6, scores="sigmoid", choice_bias=True, balance="lagged", dense_first=1
        ),
    ),
    "gpt2": TransformerConfig(
        vocab=97, hidden=24, layers=2, heads=8, mlp=37, norm="layer", activation="gelu_tanh", gated=False,
        positions="learned", max_positions=LENGTH, qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
}  # fmt: skip


def batch(step: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Of a step, this data rank's rows: (tokens, labels), with uneven numbers of labels."""
    window = torch.randint(97, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(77 + step))
    labels = window[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : (row * 3 + step) % LENGTH] = -100
    part = slice(mesh.index("dp"), None, mesh.size("dp"))
    return window[part, :-1].contiguous().to(mesh.device), labels[part].contiguous().to(mesh.device)


def adamw(shards: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(shards, lr=1e-2, betas=(0.8, 0.9))


def sgd(shards: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(shards, lr=0.1, momentum=0.9)


@dataclass
class Run:
    """What was done, the same on all ranks. Gradients of each step, whole, before clip; parameters after the last."""

    start: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


def engine_of(
    layout: str,
    model: str = "qwen",
    dtype: torch.dtype = torch.float64,
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    seed: int = 0,
    **options: Any,
) -> Engine:
    mesh = Mesh(layout)
    built = Transformer(CONFIGS[model], mesh, dtype=dtype, seed=seed).to(mesh.device)
    return Engine(built, mesh, optimizer, clip=0.5, bucket_mb=0.01, **options)


def train(engine: Engine, start: int, stop: int, run: Run | None = None, gradients: bool = True) -> Run:
    run = run or Run(start)
    for step in range(start, stop):
        engine.accumulate(batch(step, engine.mesh), 2)
        if gradients:
            run.gradients.append({name: g.clone() for name, g in engine.grads().items()})
        stats = engine.step()
        run.losses.append(stats.loss)
        run.norms.append(stats.grad_norm)
    return run


def save_then_go_on(folder: Path, layout: str, at: int = 2, stop: int = 4, **options: Any) -> Run:
    """Train to step `at`, save, and go on: what a resumed run must do too."""
    engine = engine_of(layout, **options)
    with CheckpointManager(folder, engine) as keeper:
        train(engine, 0, at, gradients=False)
        keeper.save(at, {"position": at * ROWS})
        return train(engine, at, stop)


def resume(folder: Path, layout: str, stop: int = 4, source: str | Path = "auto", **options: Any) -> Run:
    """Another seed, so that nothing but the checkpoint can make it equal."""
    engine = engine_of(layout, seed=5, **options)
    with CheckpointManager(folder, engine) as keeper:
        found = keeper.load(source)
        assert found is not None
        return train(engine, found.step, stop, Run(found.step, found.extra))


def lying_disk(change: Callable[[str, bytes], bytes]) -> Callable[..., IO[Any]]:
    """In place of open_to_write: every write succeeds, and what lands is what `change(path, data)` makes of it."""

    def opened(path: Path, mode: str, **more: Any) -> IO[Any]:
        file = no_follow.open_to_write(path, mode, **more)
        write = file.write

        def lies(data: Any) -> int:
            write(change(str(path), bytes(data)))
            return len(data)

        return _Lying(file, lies)  # type: ignore[return-value]

    return opened


class _Lying:
    def __init__(self, file: IO[Any], write: Callable[[Any], int]) -> None:
        self._file, self.write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Lying:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
