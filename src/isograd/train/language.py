"""A language model in training: what a step's batch is, what is evaluated, and a sample of what it writes.

Everything a step needs is a function of the step: rows of the data, dropout's key, the learning rate. So a run that was
stopped resumes where it was, under any other layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isograd.core import rng
from isograd.core.mesh import Mesh
from isograd.data import Mixture, read_tokenizer
from isograd.data.mixture import refuse_other_tokenizer
from isograd.data.preferences import Preferences
from isograd.engine.evaluation import merge
from isograd.errors import ConfigError
from isograd.generate.harness import harness
from isograd.generate.rows import drawn_rows, write_rows
from isograd.generate.sampling import Sampling
from isograd.generate.scoring import Scorer, end_of
from isograd.generate.writer import tokenizer_in, words_of
from isograd.hf.configs import load_config
from isograd.hf.families import HuggingFace
from isograd.hf.training_rows import LibraryFollowing, logits_of
from isograd.models import Transformer, TransformerConfig, preset
from isograd.nn.experts import Experts
from isograd.nn.float8 import use_float8
from isograd.nn.loss import IGNORE
from isograd.train import texts
from isograd.train.config import Config
from isograd.train.distillation import DistilTransformer, identity
from isograd.train.task import DTYPES, Evaluated, ProgressCallback, engine_of, rows_of


def model_config(config: Config) -> TransformerConfig:
    """What the config's `model` describes, before anything is built."""
    model = config.model
    if config.by_transformers:
        raise ConfigError(
            "IG643", "this command needs isograd's own decoder", seen="a model that transformers' code runs",
            expected="a family that isograd's decoder knows, without adapter",
            fix="--model.code isograd, without adapter; `isograd train --dry-run` tries a run of any model",
        )  # fmt: skip
    named = load_config(model.path) if model.path else preset(model.preset) if model.preset else None
    base = vars(named) if named else {}
    score = {"score": True} if config.scores else {}
    return TransformerConfig.from_dict({**base, **model.options, **score}, "model")


def refuse_vocabulary(data: Mixture | Preferences, config: Config) -> None:
    """Token ids that the model does not have, or has for other words, are an error, in the parent and on every rank."""
    path = config.model.path if config.model.weights else None
    if path is not None:
        own = Path(data.sources[0].path).is_relative_to(config.folder / "data")
        refuse_other_tokenizer(data, Path(path), f"--data.tokenizer {path}, in a new --run" if own else None)
    vocab = vocabulary(config)
    if data.vocab > vocab:
        larger = f"--model.options.vocab {data.vocab}, or " if path is None and not config.by_transformers else ""
        raise ConfigError(
            "IG635", "the data has more token ids than the model", seen=f"{data.vocab} ids in the data",
            expected=f"at most model vocab {vocab}",
            fix=f"{larger}data built with the model's tokenizer (isograd data build --tokenizer)",
        )  # fmt: skip


def vocabulary(config: Config) -> int:
    """How many token ids the model has."""
    if config.by_transformers:
        from isograd.train import library

        return library.vocabulary(config)
    return model_config(config).vocab


def flops_of_run(config: Config, length: int) -> float:
    """Of one token, in sequences of this length, forward and backward."""
    if config.by_transformers:
        from isograd.train import library

        found = library.counted(config)
        return found.flops + 12 * found.layers * found.hidden * length  # PaLM's convention
    return flops_per_token(model_config(config), length)


def build_model(config: Config, mesh: Mesh, make: Callable[..., Transformer]) -> tuple[Any, HuggingFace | None]:
    """The model of a config on this mesh, and what an Engine reads its first values from. `make`: isograd's decoder."""
    if config.by_transformers:
        from isograd.train import library

        return library.opened(config, mesh), None
    described = model_config(config)
    stored = replace(described, score=False)  # a reward model's score is new
    weights = HuggingFace(config.model.path, stored) if config.model.path and config.model.weights else None
    model = make(
        described, mesh, seed=config.model.seed, dtype=DTYPES[config.model.dtype],
        device="meta" if mesh.layout.zero == 3 else None,
    )  # fmt: skip
    model.recompute = config.model.recompute
    return model, weights


def use_switches(config: Config, model: nn.Module, mesh: Mesh) -> list[str]:
    """Products in 8 bits and compiled blocks, if the config says so; sentences about what is left as it is."""
    switches = config.model
    wide = use_float8(model, mesh, switches.float8, emulate=switches.float8_emulate) if switches.float8 else []
    said = [f"not in float8: {', '.join(wide)}: 16 does not divide their sizes"] if wide else []
    left = model.compile_blocks() if config.model.compile and isinstance(model, Transformer) else {}
    return said + [
        f"not compiled: {', '.join(n for n in left if left[n] == why)}: {why}" for why in dict.fromkeys(left.values())
    ]


class LanguageTask:
    """The job of a language model: token shards in, one optimizer step out."""

    unit = "tokens"

    def __init__(self, config: Config, mesh: Mesh) -> None:
        assert config.data is not None
        self.config, self.mesh, self.length, self.seed = config, mesh, config.data.length, config.data.seed
        self.per_step = config.batch * self.length
        data = texts.mixture(config, "train")
        assert data is not None
        self.data, self.held_out = data, texts.mixture(config, "validation")
        notice = [said for said in (data.left_out, data.as_text, texts.ignored_share(config)) if said]
        if self.held_out is None and texts.wants_evaluation(config):
            more = "--data.held_out" if config.task == "chat" else "--validation"
            notice.append("no evaluation, and no held-out loss: no document of the data was assigned to validation; "
                         f"build it with a larger {more}, or from more documents")  # fmt: skip
        self.decode = read_tokenizer(data) if config.log.sample else None  # its package may be missing: said here
        refuse_vocabulary(data, config)
        self.starts_from = ""
        self.fingerprint, self.flops = self.data.fingerprint, flops_of_run(config, self.length)
        make: Callable[..., Transformer] = Transformer
        if config.distil is not None:
            make = partial(DistilTransformer, options=config.distil)
            self.starts_from = identity(config.distil, mesh)
        self.model, weights = build_model(config, mesh, make)
        self.notice = "; ".join(notice + use_switches(config, self.model, mesh))
        self.engine = engine_of(config, self.model, mesh, weights)

    def batch(self, step: int) -> dict[str, Any]:
        """This data rank's rows of a step."""
        return {**self._rows(self.data, step), "key": rng.key(self.seed, "dropout", step)}

    def _rows(self, mixture: Mixture, step: int) -> dict[str, Tensor]:
        rows = mixture.rows(step, rows_of(self.config, self.mesh))
        return {name: tensor.to(self.mesh.device) for name, tensor in rows.items()}

    def accumulate(self, batch: dict[str, Any]) -> None:
        """Forward and backward of a step, in micro-batches."""
        self.engine.accumulate(batch, self.config.micro_batches)

    def evaluate(self, beat: ProgressCallback) -> Evaluated | None:
        """The mean loss of the first batches of held-out text, the same ones every time and under every layout.

        A text counts once, also where there are fewer than `evaluate.batches` ask for.
        """
        if self.held_out is None:
            return None
        self.model.eval()
        found = []
        for step in filter(self.held_out.has_new, range(self.config.evaluate.batches)):
            beat(f"evaluating, batch {step + 1}")
            found.append(self.engine.evaluate(self._rows(self.held_out, step), self.config.micro_batches))
        more = self._reached(beat)
        self.model.train()
        every = merge(found)
        terms = {f"loss/{name}": term.mean for name, term in every.terms.items()}
        return Evaluated(every.loss, every.weight, {**terms, **more})

    def _reached(self, beat: ProgressCallback) -> dict[str, float]:
        """What the model reaches in the tasks of lm-eval-harness that the config names."""
        asked = self.config.evaluate
        if not asked.tasks:
            return {}
        words = words_of(tokenizer_in(self.config.folder, self.config.model_dump()))
        scorer = Scorer(
            logits_function(self.model, self.mesh), self.mesh, words["encode"], words["decode"], end_of(words),
            self.length, beat=beat,
        )  # fmt: skip
        return harness(scorer, asked.tasks, asked.task_folder, asked.task_limit)

    def finish(self, sample: int) -> str | None:
        """A sample of the model's writing."""
        if not sample:
            return None
        assert self.decode is not None
        row = {name: tensor[0] for name, tensor in (self.held_out or self.data).rows(0, range(1)).items()}
        labels = row["labels"] if self.config.task == "chat" else None
        return sample_text(self.model, self.mesh, row["tokens"], labels, sample, self.length, self.decode)


def sample_text(
    model: nn.Module,
    mesh: Mesh,
    tokens: Tensor,
    labels: Tensor | None,
    count: int,
    window: int,
    decode: Callable[[Sequence[int]], str],
) -> str:
    """What a model writes, as the log says it: behind the beginning of a text [n], or as its first answer."""
    if mesh.layout.pp > 1:
        return "no sample: the model of a pipeline is not called; 'isograd ckpt convert' makes one that is"
    start, stop = (32, IGNORE) if labels is None else first_answer(labels)
    prompt: list[int] = tokens[:start].tolist()
    model.eval()
    rows = drawn_rows(following(model, mesh), [prompt], (stop,), Sampling(count), [0], window, mesh)
    (written,) = write_rows([prompt], rows)
    return f"a sample of what the model writes (▮ is where it begins):\n{decode(prompt)}▮{decode(written)}"


def logits_function(model: nn.Module, mesh: Mesh) -> Callable[[Tensor], Tensor]:
    """From tokens to logits, on all ranks, of a model that has no pipeline."""
    return model if isinstance(model, Transformer) else partial(logits_of, model, mesh)


def following(model: nn.Module, mesh: Mesh) -> Callable[[], Callable[[Tensor], Tensor]]:
    """What `drawn_rows` asks, on all ranks, of a model that has no pipeline. Keys and values are kept where a rank has
    whole rows; under cp and sp, and of compiled blocks, the rows go through the model anew."""
    compiled = any(block._compiled_call_impl is not None for block in model.modules())
    if compiled or mesh.layout.sp or mesh.size("cp") > 1:
        return partial(_anew, logits_function(model, mesh))
    return (lambda: partial(model, cache={})) if isinstance(model, Transformer) else partial(LibraryFollowing, model)


def _anew(logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    given: list[Tensor] = []

    def last(tokens: Tensor) -> Tensor:
        given.append(tokens)
        return logits(torch.cat(given, 1))[:, -1]

    return last


def first_answer(labels: Tensor) -> tuple[int, int]:
    """(the place of the first token that is a label, the last token of its answer)."""
    counts = (labels != IGNORE).tolist()
    first = counts.index(True)
    length = [*counts[first:], False].index(False)
    return first + 1, int(labels[first + length - 1])


def flops_per_token(c: TransformerConfig, length: int) -> float:
    """PaLM's convention: 6 per parameter, 12 * layers * width * length for attention, nothing for recompute."""
    # With these a token is multiplied: not the input embedding, where it is looked up, nor experts it does not go to.
    model = Transformer(c, Mesh.unbound("dp1"), device="meta")
    count = sum(p.numel() for p in model.parameters())
    for layer in model.modules():
        if isinstance(layer, Experts) and c.experts is not None:
            idle = 1 - c.experts.per_token / c.experts.number
            count -= int(idle * sum(p.numel() for p in layer.parameters()))
    count -= 0 if c.tied else c.vocab * c.hidden
    return 6 * count + 12 * c.layers * c.heads * c.features_per_head * length
