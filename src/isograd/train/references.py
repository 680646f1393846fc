"""The log probabilities that a run's answers had before its first step, computed once and kept in the run's folder.

A file of one line of JSON and then numbers (float64, little-endian). The line says what they belong to: a hash of the
model as it was, of the pairs, and of the length behind which pairs are left out. A file of another model, of other
pairs, or a damaged one is made again. Pairs that are left out have NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.agree import all_or_none, told
from isograd.data import files
from isograd.errors import DataError, headline
from isograd.mesh import Mesh
from isograd.outside import FileError, read_bytes
from isograd.train.config import Config
from isograd.train.language import model_config

LINE = 1024  # bytes of the first line at most


def key_of(config: Config, pairs: str) -> str:
    """A hash of the model that a run starts from, of its pairs, and of which of them fit."""
    assert config.data is not None
    model = config.model
    if config.by_transformers:
        from isograd.train.library import identity

        described = identity(config)
    else:
        described = str(model_config(config))
    weights: object = model.seed
    if model.path and model.weights:
        weights = [files.sha256(file) for file in sorted(Path(model.path).glob("*.safetensors"))]
    return sha256(json.dumps([pairs, config.data.length, weights, model.dtype, described]).encode()).hexdigest()


def kept_or_made(
    file: Path, key: Callable[[], str], shape: tuple[int, int], mesh: Mesh, make: Callable[[], Tensor]
) -> tuple[str, Tensor]:
    """(key, the numbers of the file) on every rank; where the file is not there, `make` runs on all ranks and the first
    writes it."""
    world, first = mesh.group("world"), mesh.rank == 0
    name: str = told(all_or_none(lambda: key() if first else "", mesh, DataError, _unwritten), mesh)[0]
    kept = _read(file, name, shape) if first else None
    if raw.all_max(torch.tensor([float(kept is not None)], device=mesh.device), world).item():
        found = torch.zeros(shape, dtype=torch.float64) if kept is None else kept
        return name, raw.all_reduce(found.to(mesh.device), world).cpu()
    made = make()

    def write() -> None:
        if first:
            data = made.numpy().astype("<f8").tobytes()
            line = json.dumps({"key": name, "shape": shape, "sha256": sha256(data).hexdigest()})
            files.write_whole(file, line.encode() + b"\n" + data)

    all_or_none(write, mesh, DataError, _unwritten)
    return name, made


def _read(file: Path, key: str, shape: tuple[int, int]) -> Tensor | None:
    try:
        line, _, data = read_bytes(file, LINE + 8 * shape[0] * shape[1]).partition(b"\n")
        about = json.loads(line)
    except (FileError, ValueError, RecursionError):
        return None
    if (
        about != {"key": key, "shape": list(shape), "sha256": sha256(data).hexdigest()}
        or len(data) != 8 * shape[0] * shape[1]
    ):
        return None
    return torch.from_numpy(np.frombuffer(data, "<f8").astype(np.float64).reshape(shape))


def _unwritten(error: Exception) -> DataError:
    return DataError(
        "IG918", "references could not be kept", seen=headline(error), expected="a run's folder with enough space",
        fix="make room or fix permissions; the same command then computes them again",
    )  # fmt: skip
