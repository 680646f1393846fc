"""task: preference beside a training of its own in plain torch, written from the papers' formulas alone.

    DPO    Rafailov et al. 2023, eq. 7       IPO    Azar et al. 2023, eq. 17     SimPO  Meng et al. 2024, eq. 6
    ORPO   Hong et al. 2024, eq. 4 to 7      KTO    Ethayarajh et al. 2024, eq. 8

transformers renders the pairs and says which tokens are answers; every answer is one row without padding; the steps are
torch's AdamW. Only the numbers of the pairs of a step, and the values of the first model, are isograd's.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.data import builtin_chats
from isograd.models import Transformer
from isograd.train import journal, loop, texts
from isograd.train.config import Config
from isograd.train.language import model_config
from isograd.train.loop import RunOptions
from isograd.train.preference import PreferenceTask

pytest.importorskip("transformers")
OPTIONS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.4, "smoothing": 0.1},
    "ipo": {"beta": 0.3},
    "simpo": {"beta": 2.5, "margin": 0.7},
    "orpo": {"beta": 0.6},
    "kto": {"beta": 0.5, "weights": [1.3, 0.8]},
}
STEPS, BATCH, RATE = 3, 6, 2e-2
LAYOUTS = ("dp2 zero3", "tp2 sp", "cp2 ring", "cp2 ulysses", "pp2")


def written(folder: Path) -> list[dict[str, Any]]:
    """Pairs whose prompts and answers have all lengths; some are talks of several turns."""
    lines: list[dict[str, Any]] = []
    for i in range(16):
        asked: list[dict[str, Any]] = [{"role": "user", "content": "What" + "?" * (1 + i % 5)}]
        if i % 4 == 1:
            asked += [{"role": "assistant", "content": "No."}, {"role": "user", "content": f"And {i}"}]
        if i % 4 == 2:
            asked = [{"role": "system", "content": "Be brief."}, *asked]
        chosen = f"{i} is ü" + " yes" * (i % 3)
        rejected = "n" + "o" * (i % 7) if i != 5 else chosen
        lines.append({"messages": asked, "chosen": chosen, "rejected": rejected})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def config_of(folder: Path, loss: str, layout: str = "1") -> Config:
    return Config.model_validate(
        {"run": str(folder), "task": "preference", "layout": layout,
         "model": {"options": {"vocab": 259, "hidden": 24, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 40},
                   "dtype": "fp64"},
         "data": {"sources": [{"path": str(folder.parent / "pairs.jsonl")}], "length": 90, "held_out": 0.2,
                  "tokenizer": str(builtin_chats.tokenizer(folder.parent / "tokenizer"))},
         "preference": {"loss": loss, **OPTIONS[loss]}, "optimizer": {"lr": RATE, "warmup": 1, "clip": None},
         "steps": STEPS, "batch": BATCH, "micro_batches": 2, "log": {"sample": 0}, "evaluate": {"batches": 1}}
    )  # fmt: skip


class Truth:
    """One device, whole batches, one answer at a time."""

    def __init__(self, config: Config, lines: list[dict[str, Any]]) -> None:
        from transformers import AutoTokenizer

        assert config.preference is not None and config.data is not None
        self.loss, self.options = config.preference.loss, OPTIONS[config.preference.loss]
        self.talks: Any = AutoTokenizer.from_pretrained(str(config.data.tokenizer), local_files_only=True)
        self.model = Transformer(model_config(config), Mesh("dp1"), dtype=torch.float64)
        self.lines, self.baselines = lines, list[float]()
        with torch.no_grad():
            self.before = [[self.sum(i, a).item() for a in ("chosen", "rejected", "other")] for i in range(len(lines))]

    def answer(self, pair: int, which: str) -> Tensor:
        """The log probabilities of the tokens of an answer; 'other': the next pair's chosen one."""
        said = self.lines[(pair + 1) % len(self.lines)]["chosen"] if which == "other" else self.lines[pair][which]
        messages = [*self.lines[pair]["messages"], {"role": "assistant", "content": said}]
        found = self.talks.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = found["input_ids"], found["assistant_masks"]
        begin = len(self.talks.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"])
        places = [place for place in range(begin, len(ids)) if mask[place]]
        logits = self.model(torch.tensor([ids]))[0]
        return torch.stack([F.log_softmax(logits[place - 1], -1)[ids[place]] for place in places])

    def sum(self, pair: int, which: str) -> Tensor:
        return self.answer(pair, which).sum()

    def of(self, pairs: list[int]) -> Tensor:
        """The loss of a batch."""
        beta, values, nll, tokens = self.options["beta"], [], torch.zeros(()).double(), 0
        z = torch.zeros(()).double()
        if self.loss == "kto":
            with torch.no_grad():
                z = max(z, sum(self.sum(pair, "other") - self.before[pair][2] for pair in pairs) / len(pairs))
            self.baselines.append(z.item())
        for pair in pairs:
            w, r = self.answer(pair, "chosen"), self.answer(pair, "rejected")
            ref_w, ref_r, _ = self.before[pair]
            nll, tokens = nll - w.sum(), tokens + len(w)
            if self.loss == "dpo":
                h, e = beta * (w.sum() - ref_w) - beta * (r.sum() - ref_r), self.options["smoothing"]
                values.append(-(1 - e) * torch.sigmoid(h).log() - e * torch.sigmoid(-h).log())
            elif self.loss == "ipo":
                h = (w.sum() - r.sum()) - (ref_w - ref_r)
                values.append((h - 1 / (2 * beta)) ** 2)
            elif self.loss == "simpo":
                gap = beta / len(w) * w.sum() - beta / len(r) * r.sum() - self.options["margin"]
                values.append(-torch.sigmoid(gap).log())
            elif self.loss == "orpo":
                p, q = w.mean().exp(), r.mean().exp()
                values.append(-beta * torch.sigmoid(torch.log((p / (1 - p)) / (q / (1 - q)))).log())
            else:
                good, bad = self.options["weights"]
                values += [good * (1 - torch.sigmoid(beta * (w.sum() - ref_w - z))) / 2]
                values[-1] = values[-1] + bad * (1 - torch.sigmoid(beta * (z - (r.sum() - ref_r)))) / 2
        whole = torch.stack(values).mean()
        return whole + nll / tokens if self.loss == "orpo" else whole

    def train(self, batches: list[list[int]]) -> tuple[list[float], list[dict[str, Tensor]]]:
        """(losses, gradients) of steps by AdamW under the config's schedule."""
        named = dict(self.model.named_parameters())
        groups = [{"params": [p for p in named.values() if (p.dim() > 1) == matrix], "weight_decay": decay}
                  for matrix, decay in ((True, 0.1), (False, 0.0))]  # fmt: skip
        optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
        losses, gradients = [], []
        for step, pairs in enumerate(batches):
            way = max(0, step - 1) / (STEPS - 1)
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 + math.cos(math.pi * way)) / 2
            optimizer.zero_grad()
            loss = self.of(pairs)
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
            optimizer.step()
        return losses, gradients


def second_step(folder: Path, layout: str) -> dict[str, dict[str, Tensor]]:
    """The gradients of the second step, in which no model is its reference any more, of each loss."""
    found = {}
    for loss in OPTIONS:
        config = config_of(folder / loss, loss, layout)
        mesh = Mesh(layout)
        job = PreferenceTask(config, mesh, lambda _: None)
        job.accumulate(job.batch(0))
        job.engine.step()
        job.accumulate(job.batch(1))
        found[loss] = {name: gradient.clone() for name, gradient in job.engine.grads().items()}
    return found


@pytest.mark.slow
def test_gradients_and_losses_of_all_five_are_those_of_the_papers(worlds, tmp_path: Path) -> None:
    lines, losses, truths = written(tmp_path), {}, {}
    for loss in OPTIONS:
        config = config_of(tmp_path / loss, loss)
        config.folder.mkdir()
        texts.prepare(config)
        data = texts.pairs(config)
        truth = Truth(config, lines)
        losses[loss], gradients = truth.train([data.numbers(step) for step in range(STEPS)])
        truths[loss] = gradients[1]
        assert loss != "kto" or max(truth.baselines) > 0.1, truth.baselines
    for layout in LAYOUTS:
        for found in worlds(2).run(second_step, tmp_path, layout):
            for loss, truth in truths.items():
                assert found[loss].keys() == truth.keys()
                for name, gradient in truth.items():
                    assert gradient.abs().max() > 0, name
                    error = (found[loss][name] - gradient).norm() / gradient.norm()
                    assert error < 1e-9, (layout, loss, name, error)
    cuts = {"dpo": "cp2 ring", "ipo": "pp2", "simpo": "tp2 sp", "orpo": "cp2 ulysses", "kto": "pp2"}
    for loss, after in cuts.items():
        first, then = config_of(tmp_path / loss, loss, "dp2 zero2"), config_of(tmp_path / loss, loss, after)
        assert worlds(2).run(loop.run, first, RunOptions(show="none", signals=(), until=1))[0].code == 75
        assert worlds(2).run(loop.run, then, RunOptions(show="none", signals=()))[0].code == 0
        seen = [line["loss"] for line in journal.read(first.folder / "metrics.jsonl") if "event" not in line]
        assert seen == pytest.approx(losses[loss], rel=1e-9), loss
