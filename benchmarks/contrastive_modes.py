"""Which public mode of contrastive training scales what: each package's own code under torch's DDP, and one device.

    python -m benchmarks.contrastive_modes [--markdown]

Two ranks with four pairs each, fp64, two towers and a scale inside a DDP module. For each mode the gradient is compared
with that of the whole batch on one device: the factor of the towers, how much of them no factor explains, the factor of
the scale, and how often DDP reduced. Packages that are not installed are said to be so.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isograd.integrations.contrastive.open_clip import ClipLoss
from isograd.integrations.contrastive.sentence_transformers import CachedInfoNCE
from isograd.launcher.launch import World

RANKS, ROWS, FEATURES, SIZE, CHUNK = 2, 4, 5, 6, 2


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.image, self.text = nn.Linear(FEATURES, SIZE), nn.Linear(FEATURES, SIZE)
        self.scale = nn.Parameter(torch.tensor(5.0))
        self.double()

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1), self.scale


class Encoder(nn.Sequential):
    """Called with a tensor; or with a dict of features and subscripted, as a SentenceTransformer is."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(FEATURES, SIZE))
        self.double()

    def forward(self, x: Any) -> Any:
        return {"sentence_embedding": self[0](x["input_ids"])} if isinstance(x, dict) else self[0](x)


def rows(rank: int) -> tuple[Tensor, Tensor]:
    images, texts = torch.randn(2, ROWS, FEATURES, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return images, texts


def package(name: str) -> ModuleType | None:
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def open_clip_loss() -> Any:
    """The file of the loss alone: the package imports torchvision, which the loss does not need."""
    spec = importlib.util.find_spec("open_clip")
    if spec is None or spec.origin is None:
        return None
    file = importlib.util.spec_from_file_location("open_clip_loss", Path(spec.origin).with_name("loss.py"))
    assert file is not None
    assert file.loader is not None
    module = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)
    return module


def grad_cache_package() -> ModuleType | None:
    """Its distribution installs `gradcache` and imports itself as `grad_cache`."""
    if package("grad_cache") is None and package("gradcache") is not None:
        sys.modules["grad_cache"] = importlib.import_module("gradcache")
        for part in ("context_managers", "functional", "grad_cache"):
            sys.modules[f"grad_cache.{part}"] = importlib.import_module(f"gradcache.{part}")
    return package("grad_cache") if "grad_cache" not in sys.modules else sys.modules["grad_cache"]


# -- modes: each makes a gradient of a DDP module; None: the package is not installed


def clip(make: Callable[..., Any] | None, local: bool, home: bool) -> Callable[[int], nn.Module | None]:
    def run(rank: int) -> nn.Module | None:
        module = ClipLoss if make is None else make()
        if module is None:
            return None
        loss = module(local, home, rank=rank, world_size=RANKS)
        model = DistributedDataParallel(Clip())
        loss(*model(*rows(rank))).backward()
        return model

    return run


def clip_accumulated(rank: int) -> nn.Module | None:
    """open_clip_train/train.py with accum_freq 2, local_loss and gather_with_grad, its best mode."""
    module = open_clip_loss()
    if module is None:
        return None
    loss = module.ClipLoss(True, True, rank=rank, world_size=RANKS)
    model = DistributedDataParallel(Clip())
    parts = list(zip(*(t.split(CHUNK) for t in rows(rank)), strict=True))
    with torch.no_grad():
        features = [list(model(*part)[:2]) for part in parts]
    for j, part in enumerate(parts):
        *made, scale = model(*part)
        inputs = [torch.cat([f[k] if i != j else made[k] for i, f in enumerate(features)]) for k in (0, 1)]
        loss(*inputs, scale).backward()
    return model


def cached(package_of: Callable[[], Any], last: bool) -> Callable[[int], nn.Module | None]:
    def run(rank: int) -> nn.Module | None:
        found = package_of()
        if found is None:
            return None
        grad_cache, functional = found
        model = DistributedDataParallel(Encoder())

        def loss(queries: Tensor, documents: Tensor) -> Tensor:
            near = 5.0 * F.normalize(queries, dim=1) @ F.normalize(documents, dim=1).T
            return F.cross_entropy(near, torch.arange(len(near)))

        gathered = functional.gather_input_tensor(loss)
        model.register_comm_hook(REDUCTIONS, _counting)
        grad_cache.GradCache([model, model], CHUNK, gathered)(*rows(rank), no_sync_except_last=last)
        return model

    return run


def sentence(name: str, more: dict[str, Any]) -> Callable[[int], nn.Module | None]:
    def run(rank: int) -> nn.Module | None:
        module: Any = CachedInfoNCE
        if name:
            losses = package("sentence_transformers") and importlib.import_module("sentence_transformers.losses")
            if losses is None:
                return None
            module = getattr(losses, name)
        plain = Encoder()
        loss = module(plain, 5.0, gather_across_devices=True, **more)
        loss.model = model = DistributedDataParallel(plain)  # as the Trainer does
        model.register_comm_hook(REDUCTIONS, _counting)
        loss([{"input_ids": t} for t in rows(rank)], torch.zeros(ROWS)).backward()
        return model

    return run


REDUCTIONS: list[int] = []


def _counting(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    state.append(1)
    return allreduce_hook(None, bucket)


def packaged() -> Any:
    found = grad_cache_package()
    return found and (sys.modules["grad_cache.grad_cache"], sys.modules["grad_cache.functional"])


def their_clip() -> Any:
    module = open_clip_loss()
    return module and module.ClipLoss


MODES: dict[str, Callable[[int], nn.Module | None]] = {
    "OpenCLIP ClipLoss(), its default": clip(their_clip, False, False),
    "OpenCLIP local_loss": clip(their_clip, True, False),
    "OpenCLIP gather_with_grad": clip(their_clip, False, True),
    "OpenCLIP local_loss gather_with_grad": clip(their_clip, True, True),
    "OpenCLIP the same, --accum-freq 2": clip_accumulated,
    "GradCache, two towers of one model": cached(packaged, False),
    "GradCache no_sync_except_last": cached(packaged, True),
    "sentence-transformers CachedMNRL, gathered": sentence(
        "CachedMultipleNegativesRankingLoss", {"mini_batch_size": CHUNK}
    ),
    "sentence-transformers MNRL, gathered": sentence("MultipleNegativesRankingLoss", {}),
    "isograd ClipLoss, default": clip(None, False, False),
    "isograd ClipLoss local_loss": clip(None, True, False),
    "isograd ClipLoss gather_with_grad": clip(None, False, True),
    "isograd ClipLoss local_loss gather_with_grad": clip(None, True, True),
    "isograd CachedInfoNCE, gathered": sentence("", {"mini_batch_size": CHUNK}),
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def measure(name: str) -> tuple[dict[str, Tensor], int] | None:
    """On a rank: the gradients of a mode, and how often DDP reduced where that was counted."""
    import torch.distributed as dist

    REDUCTIONS.clear()
    model = MODES[name](dist.get_rank())
    return None if model is None else (gradients(model), len(REDUCTIONS))


def truth(name: str) -> dict[str, Tensor]:
    images, texts = (torch.cat(t) for t in zip(*(rows(rank) for rank in range(RANKS)), strict=True))
    labels = torch.arange(len(images))
    if "Clip" in name or "CLIP" in name:
        model: nn.Module = Clip()
        one, two, scale = model(images, texts)
        loss = (F.cross_entropy(scale * one @ two.T, labels) + F.cross_entropy(scale * two @ one.T, labels)) / 2
    else:
        model = Encoder()
        vectors = [F.normalize(model(t), dim=1) for t in (images, texts)]
        loss = F.cross_entropy(5.0 * vectors[0] @ vectors[1].T, labels)
    loss.backward()
    return gradients(model)


def compared(found: dict[str, Tensor], true: dict[str, Tensor]) -> tuple[str, str, str]:
    """(factor of the towers, what no factor explains, factor of the scale)"""
    towers = [n for n in true if n != "scale"]
    mine, theirs = (torch.cat([g[n].flatten() for n in towers]) for g in (found, true))
    factor = float(mine @ theirs / (theirs @ theirs))
    rest = float((mine - factor * theirs).norm() / mine.norm())
    scale = f"{float(found['scale'] / true['scale']):.4g}" if "scale" in true else "-"
    return f"{factor:.4g}", f"{rest:.0%}" if rest > 1e-9 else "-", scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print it as Markdown")
    options = parser.parse_args()
    lines, world = [], World(RANKS)
    for name in MODES:
        answer = world.run(measure, name)[0]
        if answer is None:
            lines.append((name, "not installed", "", "", ""))
            continue
        lines.append((name, *compared(answer[0], truth(name)), str(answer[1] or "-")))
    world.close()
    heads = ("mode", "towers x", "unexplained", "scale x", "reductions")
    if options.markdown:
        print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
        print("\n".join("| " + " | ".join(line) + " |" for line in lines))
        return
    table = Table(*heads)
    for line in lines:
        table.add_row(*line)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
