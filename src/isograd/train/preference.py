"""Pairs of answers in training: a language model learns to prefer one answer to another, under every layout.

DPO, IPO and KTO compare the model with what it was before the first step. The log probabilities of all answers by that
model are computed once, by the run's own ranks, and written to the run's folder, so no second model is in memory. KTO
also compares with how far the model has moved: the mean, over the whole step, of the log probability of strangers (the
answer to the next pair's prompt) above the reference, which is at least 0 and has no gradient.

The file of these references is one line of JSON and then numbers (float64, little-endian). The line says what they
belong to: a hash of the model as it was, of the pairs, and of the length behind which pairs are left out. A file of
another model, of other pairs, or a damaged one is made again. Pairs that are left out have NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.consensus import run_or_raise_on_all_ranks
from isograd.core import rng
from isograd.core.mesh import Mesh
from isograd.data import files, read_tokenizer
from isograd.data.preferences import NOBODY
from isograd.engine.evaluation import merge
from isograd.errors import DataError, ModelError, headline
from isograd.hf.adapters import without_adapters
from isograd.io.untrusted import FileError, read_bytes
from isograd.train import config as configs
from isograd.train import sections, texts
from isograd.train.language import (
    build_model,
    flops_of_run,
    model_config,
    refuse_vocabulary,
    sample_text,
    use_switches,
)
from isograd.train.preference_model import PreferenceTransformer
from isograd.train.task import Evaluated, ProgressCallback, engine_of, of_first_rank, rows_of

LINE = 1024  # bytes of the first line at most
BOTH, STRANGER = range(2), range(2, 3)  # the answers of a pair


class PreferenceTask:
    """The job of a language model that learns from pairs of answers."""

    unit = "pairs"

    def __init__(self, config: configs.Config, mesh: Mesh, beat: ProgressCallback) -> None:
        self.options = config.preference or sections.Preference()
        self._open(config, mesh, self.options)
        self.reference: Tensor | None = None  # [pairs, answers], of the pairs by number; NaN for those left out
        if self.options.loss in ("dpo", "ipo", "kto"):
            self.starts_from, self.reference = read_or_compute(
                config.folder / "references",
                lambda: key_of(config, self.data.contents),
                (self.data.number, self.data.answers),
                mesh,
                lambda: self._made(beat),
            )

    def _open(self, config: configs.Config, mesh: Mesh, options: sections.Preference | sections.Grpo) -> None:
        """The data, the model with the loss of these options, and its engine."""
        assert config.data is not None
        self.config, self.mesh, self.seed = config, mesh, config.data.seed
        self.data = texts.pairs(config)
        notice = [said for said in (self.data.left_out, self.data.as_text) if said]
        if not self.data.held and texts.wants_evaluation(config):
            notice.append(f"no evaluation: no {self.data.unit} is held out (data.held_out)")
        self.per_step = config.batch
        self.decode = read_tokenizer(self.data) if config.log.sample else None
        refuse_vocabulary(self.data, config)
        self.fingerprint, self.starts_from = self.data.fingerprint, ""
        self.flops = 2 * self.data.mean_length * flops_of_run(config, round(self.data.mean_length))
        self.model, weights = build_model(config, mesh, partial(PreferenceTransformer, options=options))
        self.notice = "; ".join(notice + use_switches(config, self.model, mesh))
        self.engine = engine_of(config, self.model, mesh, weights)

    def _made(self, beat: ProgressCallback) -> Tensor:
        """The log probabilities of all pairs that fit, by the model as it is, without its adapters."""
        found = torch.full((self.data.number, self.data.answers), torch.nan, dtype=torch.float64)
        batches = self.data.batches(self.data.train + self.data.held)
        for number, pairs in enumerate(batches, 1):
            beat(f"computing references, batch {number} of {len(batches)}")
            with without_adapters(self.model):
                sums = self._sums(pairs, range(self.data.answers))
            there = [row for row, pair in enumerate(pairs) if pair != NOBODY]
            found[[pairs[row] for row in there]] = sums[there]
        return found

    def _sums(self, pairs: Sequence[int], answers: range) -> Tensor:
        """[batch, answers]: the log probability of each answer of a whole batch, on all ranks."""
        mine, mesh = rows_of(self.config, self.mesh), self.mesh
        rows = {name: part.to(mesh.device) for name, part in self.data.rows(pairs, mine, answers).items()}
        self.model.eval()
        with self.model.pair_loss.noting() as noted:
            self.engine.evaluate(rows, self.config.micro_batches)
        self.model.train()
        found = torch.zeros(len(pairs), len(answers), dtype=torch.float64, device=mesh.device)
        if noted and mesh.index("tp") == mesh.index("cp") == 0:  # one of those that have the same sums
            found[mine.start : mine.stop] = torch.cat(noted).double()
        return raw.all_reduce(found, mesh.group("world")).cpu()

    def batch(self, step: int) -> dict[str, Any]:
        """This data rank's pairs of a step."""
        mine = rows_of(self.config, self.mesh)
        samples = torch.arange(step * self.config.batch + mine.start, step * self.config.batch + mine.stop)
        rows = self._rows(self.data.numbers(step)) | {"samples": samples.to(self.mesh.device)}
        return {**rows, "key": rng.key(self.seed, "dropout", step)}

    def _rows(self, pairs: Sequence[int]) -> dict[str, Tensor]:
        mine = rows_of(self.config, self.mesh)
        rows = self.data.rows(pairs, mine, BOTH)
        if self.reference is None:
            rows["reference"] = torch.zeros(len(mine), 2, dtype=torch.float64)
        else:
            rows["reference"] = self._references(pairs)[mine.start : mine.stop, :2]
        return {name: tensor.to(self.mesh.device) for name, tensor in rows.items()}

    def _references(self, pairs: Sequence[int]) -> Tensor:
        """[batch, answers]: of a whole batch, so that all ranks refuse the same NaN; 0 for the rows of no pair."""
        assert self.reference is not None
        nobody = torch.tensor([pair == NOBODY for pair in pairs])
        found = self.reference[list(pairs)].masked_fill(nobody[:, None], 0.0)
        if found.isnan().any():
            number = pairs[int(found.isnan().any(1).nonzero()[0])]
            raise ModelError("IG425", seen=f"NaN for pair {number} (the first is 0)", where=self.mesh.describe_rank())
        return found

    def _baseline(self, pairs: Sequence[int]) -> Tensor:
        """KTO's, for each of this rank's pairs: the mean over the strangers of all of them."""
        there = [row for row, pair in enumerate(pairs) if pair != NOBODY]
        moved = (self._sums(pairs, STRANGER)[:, 0] - self._references(pairs)[:, 2])[there]
        mean = moved.sum() / max(1, len(there))
        return mean.clamp(min=0).expand(len(rows_of(self.config, self.mesh))).to(self.mesh.device)

    def accumulate(self, batch: dict[str, Any]) -> None:
        """Forward and backward of a step, in micro-batches."""
        if self.options.loss == "kto":
            step = int(batch["samples"][0]) // self.config.batch
            batch["baseline"] = self._baseline(self.data.numbers(step))
        self.engine.accumulate(batch, self.config.micro_batches)

    def evaluate(self, beat: ProgressCallback) -> Evaluated | None:
        """The loss of the first batches of held-out pairs, and how often the chosen answer is ahead."""
        if not self.data.held:
            return None
        found = []
        for number, pairs in enumerate(self.data.batches(self.data.held)[: self.config.evaluate.batches], 1):
            beat(f"evaluating, batch {number}")
            rows: dict[str, Any] = self._rows(pairs)
            if self.options.loss == "kto":
                rows["baseline"] = self._baseline(pairs)
            self.model.eval()
            found.append(self.engine.evaluate(rows, self.config.micro_batches))
            self.model.train()
        every = merge(found)
        return Evaluated(every.loss, every.weight, {name: term.mean for name, term in every.terms.items()})

    def finish(self, sample: int) -> str | None:
        """What the model answers to the first prompt that was held out."""
        if not sample or self.config.scores:
            return None
        assert self.decode is not None
        assert self.config.data is not None
        row = self.data.rows((self.data.held or self.data.train)[:1], range(1), range(1))
        tokens, labels = row["tokens"][0, 0], row["labels"][0, 0]
        return sample_text(self.model, self.mesh, tokens, labels, sample, self.config.data.length, self.decode)


def key_of(config: configs.Config, pairs: str) -> str:
    """A hash of the model that a run starts from, of its pairs, and of which of them fit."""
    assert config.data is not None
    model = config.model
    if config.by_transformers:
        from isograd.train.library import identity

        described = identity(config)
    else:
        described = str(model_config(config))
    weights = files.hashes_of_weights(Path(model.path)) if model.path and model.weights else model.seed
    return sha256(json.dumps([pairs, config.data.length, weights, model.dtype, described]).encode()).hexdigest()


def read_or_compute(
    file: Path, key: Callable[[], str], shape: tuple[int, int], mesh: Mesh, make: Callable[[], Tensor]
) -> tuple[str, Tensor]:
    """(key, the numbers of the file) on every rank; where the file is not there, `make` runs on all ranks and the first
    writes it."""
    world, first, name = mesh.group("world"), mesh.rank == 0, of_first_rank(key, mesh, unwritten)
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

    run_or_raise_on_all_ranks(write, mesh, DataError, unwritten)
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


def unwritten(error: Exception) -> DataError:
    """IG918, to be raised."""
    return DataError("IG918", seen=headline(error), doing="comparing with the model before the first step")
