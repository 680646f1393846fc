"""An encoder trained on pairs of texts: every row of a step is every other row's negative, whatever the layout.

Its vector of a text is the mean of the last hidden states, or the first one. Dropout is off unless asked for: it draws
per rank, so with it layouts differ in noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.comm import raw
from isograd.comm.group import even_sizes
from isograd.core.layout import Layout
from isograd.core.mesh import DATA, Mesh
from isograd.data.pairs import Pairs
from isograd.errors import ConfigError
from isograd.losses.contrastive import GradientCache, InfoNCE
from isograd.train import config as configs
from isograd.train import texts
from isograd.train.task import DTYPES, Evaluated, ProgressCallback, engine_of, rows_of


class Encoder(nn.Module):
    """A body, and how its hidden states become one vector. The loss stands beside it, as it may learn its scale."""

    def __init__(self, body: nn.Module, loss: nn.Module, pooling: str) -> None:
        super().__init__()
        self.body, self.loss, self.pooling = body, loss, pooling

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """One vector per text."""
        states: Tensor = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.pooling == "first":
            return states[:, 0]
        weights = attention_mask.to(states.dtype)
        return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)


class PairsTask:
    """The job of an encoder: pairs of texts in, one optimizer step out."""

    starts_from = ""
    unit = "pairs"

    def __init__(self, config: configs.Config, mesh: Mesh) -> None:
        pairs = config.pairs
        assert pairs is not None
        self.config, self.options, self.mesh = config, pairs, mesh
        _refuse_cuts(mesh.layout)
        self.data = Pairs(pairs.path, keys=pairs.keys, batch=config.batch, seed=pairs.seed, held_out=pairs.held_out)
        self.fingerprint = self.data.fingerprint
        unheld = not self.data.held_out and texts.wants_evaluation(config)
        self.notice = "no evaluation: no pair is held out (pairs.held_out)" if unheld else ""
        self.per_step = config.batch
        self.tokenizer, body = _open(config)
        self.loss = loss = InfoNCE(mesh, pairs.scale, learn_scale=pairs.learn_scale, both=pairs.both)
        self.model = Encoder(body, loss, pairs.pooling).to(mesh.device, DTYPES[config.model.dtype])
        self.model.train()
        self.engine = engine_of(config, self.model, mesh)
        self.cache = GradientCache(self.engine, loss, encode=self.model, chunk=pairs.chunk, keep_mb=pairs.keep_mb)
        self.flops = 2 * pairs.length * 6.0 * sum(p.numel() for p in body.parameters() if p.dim() > 1)

    def batch(self, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This data rank's pairs of a step as tokens, each side for itself."""
        pairs = self.data.rows(step, rows_of(self.config, self.mesh))
        return self._tokens([a for a, _ in pairs]), self._tokens([b for _, b in pairs])

    def _tokens(self, texts: list[str]) -> dict[str, Tensor]:
        found = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.options.length, return_tensors="pt"
        )
        return {name: found[name].to(self.mesh.device) for name in ("input_ids", "attention_mask")}

    def accumulate(self, batch: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
        """Forward and backward of a step, chunk by chunk."""
        self.cache.backward(*batch)

    @torch.no_grad()
    def evaluate(self, beat: ProgressCallback) -> Evaluated | None:
        """Loss over held-out pairs, and how often a text's nearest is the one it belongs to, both ways."""
        count = min(self.data.held_out, self.options.evaluate)
        if not count:
            return None
        self.model.eval()
        share = even_sizes(count, self.mesh.size("dp"))
        first = sum(share[: self.mesh.index("dp")])
        mine = self.data.held_out_pairs(range(first, first + share[self.mesh.index("dp")]))
        sides = list(zip(*mine, strict=True)) or [(), ()]
        # Ranks without a pair go through the same forwards: at ZeRO 3 each is a collective.
        towers = [self._vectors(texts, max(share), beat) for texts in sides]
        queries, answers = (raw.all_gather(t, self.mesh.group(DATA), share) for t in towers)
        self.model.train()
        near = queries @ answers.T
        right = torch.arange(count, device=near.device)
        with self.engine.full_parameters():
            scale = float(self.loss.log_scale.detach().double().exp())
        return Evaluated(
            float(F.cross_entropy(near * scale, right)),
            float(count),
            {
                "accuracy": float((near.argmax(1) == right).double().mean()),
                "accuracy_back": float((near.argmax(0) == right).double().mean()),
            },
        )

    def _vectors(self, texts: tuple[str, ...], most: int, beat: ProgressCallback) -> Tensor:
        """Normalised, in fp64. All ranks go through as many chunks: at ZeRO 3 a forward is a collective."""
        parts = []
        for start in range(0, most, self.options.chunk):
            beat(f"evaluating from text {start}")
            chunk = list(texts[start : start + self.options.chunk])
            vectors = self.model(**self._tokens(chunk or [" "])).double()
            parts.append(vectors[: len(chunk)])
        return F.normalize(torch.cat(parts), dim=-1)

    def finish(self, sample: int) -> str | None:
        """The trained model as a Hugging Face folder."""
        to = self.config.folder / "model"
        with self.engine.full_parameters():
            if self.mesh.rank == 0:
                body: Any = self.model.body
                body.save_pretrained(to)
                self.tokenizer.save_pretrained(to)
        return f"the encoder, for transformers: {to}"


def refuse_unbuildable(config: configs.Config, layout: Layout) -> None:
    """Raise in one process what every rank would raise: a layout that cuts the encoder, files that are missing."""
    _refuse_cuts(layout)
    folder = Path(_path(config))
    if not (folder / "config.json").is_file():
        raise ConfigError("IG641", seen=f"no {folder / 'config.json'}")
    pairs = config.pairs
    assert pairs is not None
    if not Path(pairs.path).is_file():
        Pairs(pairs.path, keys=pairs.keys, batch=config.batch, seed=pairs.seed, held_out=pairs.held_out)  # says why


def _path(config: configs.Config) -> str:
    if config.model.path is None:
        raise ConfigError("IG641", seen="no model.path")
    return config.model.path


def _refuse_cuts(layout: Layout) -> None:
    if layout.world_size != layout.dp:
        raise ConfigError(
            "IG640", "a Hugging Face encoder trains on data ranks", seen=str(layout),
            expected="a layout of dp and zero", fix="for example --layout 'dp2 zero1'",
        )  # fmt: skip


def _open(config: configs.Config) -> tuple[Any, nn.Module]:
    from transformers import AutoConfig, AutoModel, AutoTokenizer
    from transformers.utils import logging

    quiet: Any = logging
    quiet.set_verbosity_error()  # every rank would tell of poolers that are not used
    quiet.disable_progress_bar()
    assert config.pairs is not None
    path = _path(config)
    described = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if not config.pairs.dropout:
        for name in vars(described):
            if "dropout" in name and isinstance(getattr(described, name), float):
                setattr(described, name, 0.0)
    for name, value in config.model.options.items():
        setattr(described, name, value)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    keyword = {"config": described, "use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    try:
        body = AutoModel.from_pretrained(path, add_pooling_layer=False, **keyword)
    except TypeError as error:
        if "add_pooling_layer" not in str(error):
            raise
        body = AutoModel.from_pretrained(path, **keyword)  # DistilBERT and others have no pooling layer to leave out
    return tokenizer, body
