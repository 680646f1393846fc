"""Answers that the model draws itself, and what they are worth: reinforcement learning with group-relative advantages.

Draws are those of generate/sampling.py, each a function of the data's seed, the number of the answer in the run, and
its place: so a resumed run draws the same answers, and so does every layout, up to rounding. The model that draws is
the one that is trained, under its layout and in eval mode.

`grpo.kl` compares with the model before the first step: adapters are left out for it; without adapters a second model
stands beside the first, cut by tp, and its weights are those that the run began from, also when it resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd import losses
from isograd.comm import raw
from isograd.core import rng
from isograd.core.mesh import Mesh
from isograd.data import read_tokenizer
from isograd.data.mixture import IGNORE
from isograd.data.preferences import NOBODY
from isograd.generate.rows import drawn_rows, write_rows
from isograd.generate.sampling import Sampling
from isograd.hf.adapters import without_adapters
from isograd.models import Transformer
from isograd.train.config import Config
from isograd.train.distillation import frozen
from isograd.train.language import first_answer, following, logits_function, model_config, vocabulary
from isograd.train.preference import PreferenceTask, key_of, unwritten
from isograd.train.rewards import Completion, rewards_of
from isograd.train.task import DTYPES, Evaluated, ProgressCallback, of_first_rank, rows_of


class GrpoTask(PreferenceTask):
    """The job of a language model that learns from rewards of its own answers."""

    unit = "answers"

    def __init__(self, config: Config, mesh: Mesh, beat: ProgressCallback) -> None:
        assert config.grpo is not None
        self.grpo, self.beat = config.grpo, beat
        self._open(config, mesh, config.grpo)
        self.words = read_tokenizer(self.data)
        self.worth = rewards_of(config.grpo, vocabulary(config), mesh)
        self.start: Transformer | None = None
        if config.grpo.kl:
            self.starts_from = of_first_rank(lambda: key_of(config, self.data.contents), mesh, unwritten)
        if config.grpo.kl and not config.by_transformers:
            folder = config.model.path if config.model.weights else None
            told = config.model
            start = Transformer(
                model_config(config), mesh, seed=told.seed, dtype=DTYPES[told.dtype], device=mesh.device
            )
            self.start = frozen(start, folder)

    def batch(self, step: int) -> dict[str, Any]:
        """The numbers of this data rank's answers; `accumulate` draws them."""
        mine = rows_of(self.config, self.mesh)
        samples = torch.arange(step * self.config.batch + mine.start, step * self.config.batch + mine.stop)
        return {"samples": samples.to(self.mesh.device), "key": rng.key(self.seed, "dropout", step)}

    def accumulate(self, batch: dict[str, Any]) -> None:
        """Draw the answers of a step, reward them, forward and backward."""
        step, each = int(batch["samples"][0]) // self.config.batch, self.grpo.answers
        prompts = [number for number in self.data.numbers(step) for _ in range(each)]
        how = Sampling(self.grpo.tokens, temperature=1.0, seed=self.seed)
        rows, rewards = self._answer(prompts, how, step * self.config.batch)
        groups = torch.arange(len(prompts)) // each
        apart = losses.group_advantages(rewards, groups, scale=self.grpo.scale)
        worth = torch.stack((apart, rewards, rewards.view(-1, each).std(1)[groups]), 1)
        mine = rows_of(self.config, self.mesh)
        batch |= {**rows, "baseline": worth[mine.start : mine.stop].to(self.mesh.device)}
        self.engine.accumulate(batch, self.config.micro_batches)

    @torch.no_grad()
    def _answer(self, prompts: Sequence[int], how: Sampling, first: int) -> tuple[dict[str, Tensor], Tensor]:
        """(this data rank's rows, the rewards of all): an answer to each of these prompts, which all ranks give here,
        as many for each data rank. first: the number of the first answer."""
        config, mesh = self.config, self.mesh
        assert config.data is not None
        share = len(prompts) // mesh.size("dp")
        mine = range(mesh.index("dp") * share, (mesh.index("dp") + 1) * share)
        given = self.data.rows(prompts, mine, range(1))
        starts, ends = zip(*(first_answer(row) for row in given["labels"][:, 0]), strict=True)
        asked = [row[:start].tolist() for row, start in zip(given["tokens"][:, 0], starts, strict=True)]
        right = [self.words(row[(row != IGNORE) & (row != ends[0])].tolist()) for row in given["labels"][:, 0]]
        self.model.eval()
        asks = following(self.model, mesh)
        numbers, drawn, size = [first + row for row in mine], list[list[int]](), -(-share // config.micro_batches)
        with self.engine.untracked_forward():
            for at in range(0, share, size):
                self.beat("asking the model")
                part = slice(at, at + size)
                room = config.data.length
                made = drawn_rows(asks, asked[part], ends[:1], how, numbers[part], room, mesh)
                drawn += write_rows(asked[part], made)
            rewards = torch.zeros(len(prompts), dtype=torch.float64, device=mesh.device)
            if mesh.index("tp") == mesh.index("cp") == 0:  # one of those that have the same rows
                said = [self.words([token for token in answer if token != ends[0]]) for answer in drawn]
                answers = map(Completion, said, right, drawn, asked)
                rewards[mine.start : mine.stop] = rewards.new_tensor([self.worth(answer) for answer in answers])
            rows = {name: found.to(mesh.device) for name, found in _rows(asked, drawn).items()}
            if self.grpo.kl and how.temperature:
                rows["reference"] = self._log_probs(rows, size)
        self.model.train()
        return rows, raw.all_reduce(rewards, mesh.group("world")).cpu()

    def _log_probs(self, rows: dict[str, Tensor], size: int) -> Tensor:
        """[rows, 1, length]: of each token of an answer, by the model before the first step."""
        found = []
        with without_adapters(self.model) if self.start is None else nullcontext():
            logits = logits_function(self.model if self.start is None else self.start, self.mesh)
            for tokens, labels in zip(rows["tokens"].split(size), rows["labels"].split(size), strict=True):
                there = logits(tokens[:, 0])
                wide = there.to(torch.promote_types(there.dtype, torch.float32)).transpose(1, 2)
                found.append(-F.cross_entropy(wide, labels[:, 0], ignore_index=IGNORE, reduction="none"))
        return torch.cat(found)[:, None]

    def evaluate(self, beat: ProgressCallback) -> Evaluated | None:
        """What the likeliest answers to the first held-out prompts are worth on average; the loss is minus that."""
        if not self.data.held:
            return None
        found: list[float] = []
        for number, prompts in enumerate(self.data.batches(self.data.held)[: self.config.evaluate.batches], 1):
            beat(f"evaluating, batch {number}")
            there = [prompt for prompt in prompts if prompt != NOBODY]
            filled = there + there[:1] * (-len(there) % self.mesh.size("dp"))
            _, rewards = self._answer(filled, Sampling(self.grpo.tokens, temperature=0.0), 0)
            found += rewards[: len(there)].tolist()
        mean = sum(found) / len(found)
        return Evaluated(-mean, float(len(found)), {"reward": mean})


def _rows(asked: Sequence[Sequence[int]], drawn: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """tokens and labels [rows, 1, length] of prompts with their answers; only these are labels."""
    width = max(len(prompt) + len(answer) for prompt, answer in zip(asked, drawn, strict=True))
    tokens = torch.zeros(len(asked), 1, width, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE)
    for row, (prompt, answer) in enumerate(zip(asked, drawn, strict=True)):
        tokens[row, 0, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        labels[row, 0, len(prompt) - 1 : len(prompt) + len(answer) - 1] = torch.tensor(answer)
    return {"tokens": tokens, "labels": labels}
