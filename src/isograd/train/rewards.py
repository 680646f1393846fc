"""What an answer is worth: the rewards that a config names, each a function of an answer and of the right one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isograd.core.mesh import Mesh
from isograd.errors import ConfigError
from isograd.hf.loading import config_of
from isograd.hf.sub_configs import text_of
from isograd.train.sections import Grpo, Reward

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Completion:
    """One that the model has given."""

    text: str
    right: str  # the one that is in the data
    tokens: Sequence[int]  # its own
    prompt: Sequence[int]  # those before them


def number_in(text: str) -> float | None:
    """The last number that a text has."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def rewards_of(options: Grpo, vocab: int, mesh: Mesh) -> Callable[[Completion], float]:
    """The sum of a config's rewards of an answer; the reward models among them are read here, whole on each rank."""
    parts = [(reward.weight, _reward(reward, options, vocab, mesh)) for reward in options.rewards]
    return lambda answer: sum(weight * float(worth(answer)) for weight, worth in parts)


def _reward(reward: Reward, options: Grpo, vocab: int, mesh: Mesh) -> Callable[[Completion], float]:
    if reward.path is not None:
        return _score(reward.path, vocab, mesh)
    pattern = re.compile(reward.pattern or "")
    return {
        "equal": lambda answer: answer.text.strip() == answer.right.strip(),
        "contains": lambda answer: answer.right.strip() in answer.text,
        "number": lambda answer: None is not number_in(answer.text) == number_in(answer.right),
        "pattern": lambda answer: pattern.search(answer.text) is not None,
        "length": lambda answer: 1 - len(answer.tokens) / options.tokens,
    }[reward.kind]


def refuse_reward_model(path: str, vocab: int, mesh: Mesh) -> None:
    """Refuse a folder that has no reward model of the run's tokens."""
    config = config_of(path, mesh)
    kind, size = (getattr(config, "architectures", None) or ["none"])[0], int(text_of(config).vocab_size)
    if not kind.endswith("ForSequenceClassification") or config.num_labels != 1 or size != vocab:
        raise ConfigError(
            "IG635", f"{path} is no reward model for this run", seen=f"{kind}, {config.num_labels} labels, {size} ids",
            expected=f"transformers' ...ForSequenceClassification of one label and the model's {vocab} ids",
            fix="preference.loss reward trains one, and isograd ckpt convert writes it",
        )  # fmt: skip


def _score(path: str, vocab: int, mesh: Mesh) -> Callable[[Completion], float]:
    from transformers import AutoModelForSequenceClassification

    refuse_reward_model(path, vocab, mesh)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        path, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto"
    )
    model.to(mesh.device).eval()

    @torch.no_grad()
    def score(answer: Completion) -> float:
        ids = torch.tensor([[*answer.prompt, *answer.tokens]], device=mesh.device)
        return float(model(input_ids=ids).logits[0, 0])

    return score
