"""verl's own TrainingWorker on our engine: a policy, a critic and a reference, as its trainers drive them."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isograd.comm import world
from isograd.errors import IsogradError

pytest.importorskip("verl")
pytestmark = pytest.mark.peers
VOCAB, SEQUENCES, STEPS, COUNTED = 41, 8, 3, "response_mask"
PROMPTS, RESPONSES = [2, 4, 1, 3, 5, 2, 1, 3], [1, 9, 3, 7, 2, 11, 6, 1]
OPTIONS = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "clip_grad": 0.3, "lr_warmup_steps": 2}
ENTROPY, KL = 0.02, 0.05
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")  # of a mean, in each step


def saved(folder: Path, kind: str) -> str:
    """A small model in fp64; its dropout is off."""
    from transformers import GPT2Config, GPT2ForTokenClassification, GPT2LMHeadModel

    torch.manual_seed(0)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 24}
    config = GPT2Config(bos_token_id=0, eos_token_id=0, num_labels=1, classifier_dropout=0.1, **shape, **none)
    made = GPT2LMHeadModel if kind == "language_model" else GPT2ForTokenClassification
    made(config).double().save_pretrained(folder / kind)
    return str(folder / kind)


def rows(step: int, count: int = SEQUENCES) -> list[dict[str, Tensor]]:
    """The sequences of a step; of one nothing counts, and of others only some tokens."""
    draw = torch.Generator().manual_seed(step)
    found = []
    for number, (prompt, response) in enumerate(zip(PROMPTS[:count], RESPONSES[:count], strict=True)):
        mask = (torch.rand(response, generator=draw) < 0.7).long() * int(number != 2)
        numbers = torch.randn(6, response, generator=draw, dtype=torch.float64)
        found.append({
            "input_ids": torch.randint(VOCAB, (prompt + response,), generator=draw),
            "loss_mask": torch.cat((torch.zeros(prompt).long(), mask)), "response_mask": mask,
            "old_log_probs": 0.3 * numbers[0] - 3.7, "advantages": numbers[1], "ref_log_prob": 0.3 * numbers[2] - 3.7,
            "values": 0.3 * numbers[3], "returns": numbers[4], "temperature": 0.7 + 0.1 * torch.tensor(float(number)),
        })  # fmt: skip
    return found


def batch(step: int, data: tuple[int, int] | None = None, count: int = SEQUENCES, **settings: Any) -> Any:
    """This data rank's sequences, as verl's trainer sends them."""
    from verl.utils import tensordict_utils as tu

    rank, ranks = data or world.world()
    mine = rows(step, count)[rank::ranks]
    prompts = PROMPTS[:count][rank::ranks]

    def nested(parts: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    tensors = {name: nested([row[name] for row in mine]) for name in mine[0] if name != "temperature"}
    tensors["prompts"] = nested([row["input_ids"][:n] for row, n in zip(mine, prompts, strict=True)])
    tensors["responses"] = nested([row["input_ids"][n:] for row, n in zip(mine, prompts, strict=True)])
    tensors["position_ids"] = nested([torch.arange(len(row["input_ids"])) for row in mine])
    tensors["temperature"] = torch.stack([row["temperature"] for row in mine])
    return tu.get_tensordict(
        tensors, {"global_batch_size": count, "calculate_entropy": True, "update_lr_scheduler": True, **settings}
    )


def actor(mode: str) -> Any:
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="isograd", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode=mode, clip_ratio_high=0.28,
        entropy_coeff=ENTROPY, use_kl_loss=True, kl_loss_coef=KL, kl_loss_type="low_var_kl",
    )  # fmt: skip


def worker(kind: str, model: str, layout: str, ready: bool = True, **more: Any) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    options = import_module("isograd.integrations.verl").EngineOptions
    eager = {"attn_implementation": "eager"}
    rows = {"micro_batch_size_per_gpu": 1, "infer_micro_batch_size_per_gpu": 2}
    looks, optim = more.get("forward_only", False), OPTIONS | more.pop("optim", {})
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type=kind,
            model_config=HFModelConfig(
                path=model, load_tokenizer=False, override_config=eager, **more.pop("changes", {})
            ),
            engine_config=options(
                layout=layout, model_dtype="float64", max_token_len_per_gpu=24, infer_max_token_len_per_gpu=24,
                **{"use_dynamic_bsz": False, **rows, **more},
            ),
            optimizer_config=None if looks else FSDPOptimizerConfig(**optim),
            checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
        )
    )  # fmt: skip
    if ready:
        made.reset()
    return made


def said(output: Any) -> dict[str, Any]:
    from verl.utils import tensordict_utils as tu

    return tu.get(output, "metrics")


def policy(folder: Path, model: str, layout: str, then: str) -> dict[str, Any]:
    """Three steps, cut behind the second and resumed under another stage."""
    from verl.workers.utils.losses import ppo_loss

    ours, seen = worker("language_model", model, layout), []
    for step in range(STEPS):
        if step == 2:
            ours.save_checkpoint(str(folder / "global_step_2"), global_step=2)
            ours = worker(
                "language_model", model, then, use_dynamic_bsz=True, changes={"enable_gradient_checkpointing": False}
            )
            ours.load_checkpoint(str(folder / "global_step_2"))
        ours.set_loss_fn(partial(ppo_loss, config=actor(MODES[step])))
        metrics = said(ours.train_batch(batch(step)))
        seen.append((metrics["loss"], metrics["grad_norm"], metrics["lr"]))
    looked = ours.infer_batch(batch(0, compute_loss=False, calculate_sum_pi_squared=True))
    weights = {name: value.clone() for name, value in ours.engine.get_per_tensor_param()[0]}
    names = ("log_probs", "entropy", "sum_pi_squared")
    return {"seen": seen, "weights": weights, "looked": {n: [row.clone() for row in looked[n].unbind()] for n in names}}


def critic(model: str, layout: str) -> dict[str, Any]:
    """verl's own cut of a batch into mini-batches, each a step."""
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    torch.manual_seed(world.world()[0])  # of a head that would be drawn
    ours = worker("value_model", model, layout, optim={"lr_warmup_steps": 0})  # the schedule moves at its end
    ours.set_loss_fn(partial(value_loss, CriticConfig(strategy="isograd", ppo_micro_batch_size_per_gpu=1)))
    metrics = said(ours.train_mini_batch(batch(0, num_mini_batch=1, epochs=2, update_lr_scheduler=None)))
    looked = ours.infer_batch(batch(0, compute_loss=False))["values"]
    weights = {name: value.clone() for name, value in ours.engine.get_per_tensor_param()[0]}
    return {"metrics": metrics, "weights": weights, "looked": [row.clone() for row in looked.unbind()]}


def reference(model: str, layout: str) -> list[Tensor]:
    ours = worker("language_model", model, layout, forward_only=True)
    with pytest.raises(IsogradError, match="IG872"):
        ours.save_checkpoint("nowhere")
    return [row.clone() for row in ours.infer_batch(batch(0, compute_loss=False))["log_probs"].unbind()]


def split(model: str) -> tuple[float, float]:
    """A backward that is thrown away, and a step in parts, as verl's Tinker worker takes it: their norms."""
    from verl.workers.utils.losses import sft_loss

    engine = worker("language_model", model, "zero2").engine
    loss, cut = partial(sft_loss, None), {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    found = []
    for _ in range(2):
        with engine.train_mode(zero_grad_on_exit=False):  # is dropped
            engine.forward_backward_batch(batch(1, **cut), loss)
        with engine.train_mode():
            found.append(engine.train_batch(batch(0, **cut), loss)["metrics"]["grad_norm"])
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
    with engine.train_mode():  # dropped where the mode ends
        engine.forward_backward_batch(batch(1, **cut), loss)
    with engine.train_mode():
        data = batch(0, return_model_output=True, **cut)
        kept = engine.forward_backward_batch(data, loss)
        assert len(kept["model_output"]["log_probs"].unbind()) == len(data)
        found.append(engine.optimizer_step())
    assert found[1] == pytest.approx(found[2], rel=1e-12)
    return found[0], found[2]


def all_of_it(folder: Path, models: dict[str, str]) -> dict[str, Any]:
    from .verl_cpu import as_a_worker

    with as_a_worker(str(folder)):
        language, value = models["language_model"], models["value_model"]
        return {
            "policy": policy(folder, language, "zero1", "zero3"), "critic": critic(value, "zero2"),
            "reference": reference(language, "zero3"), "split": split(language),
        }  # fmt: skip


# -- the same in plain torch


def heads(logits: Tensor, row: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(log probabilities of the response, entropies there)."""
    scores = (logits / row["temperature"]).log_softmax(-1)
    response = len(row["response_mask"])
    at = slice(len(scores) - response - 1, len(scores) - 1)
    return scores[at].gather(-1, row["input_ids"][-response:, None])[:, 0], -(scores.exp() * scores).sum(-1)[at]


def true_policy(model: nn.Module, step: int, sequences: int = SEQUENCES) -> Tensor:
    """PPO's loss with an entropy bonus and a KL, each token counted as the mode says."""
    mode, given = MODES[step], rows(step, sequences)
    tokens = sum(int(row[COUNTED].sum()) for row in given)
    total = torch.zeros((), dtype=torch.float64)
    for row in given:
        logp, entropy = heads(model(input_ids=row["input_ids"][None]).logits[0], row)
        for i in row[COUNTED].nonzero()[:, 0].tolist():
            ratio, a = (logp[i] - row["old_log_probs"][i]).exp(), row["advantages"][i]
            loss = torch.stack((-a * ratio, -a * ratio.clamp(0.8, 1.28))).max()
            if a < 0:
                loss = torch.stack((loss, -3.0 * a)).min()
            apart = row["ref_log_prob"][i] - logp[i]
            loss = loss - ENTROPY * entropy[i] + KL * (apart.exp() - apart - 1).clamp(max=10)
            count = {"token-mean": tokens, "seq-mean-token-mean": sequences * float(row[COUNTED].sum())}
            total = total + loss / count.get(mode, sequences)
    return total


def true_value(model: nn.Module, step: int, sequences: int = SEQUENCES) -> Tensor:
    given, total = rows(step, sequences), torch.zeros((), dtype=torch.float64)
    for row in given:
        response = len(row[COUNTED])
        values = model(input_ids=row["input_ids"][None]).logits[0, -response - 1 : -1, 0]
        for i in row[COUNTED].nonzero()[:, 0].tolist():
            near = row["values"][i] + (values[i] - row["values"][i]).clamp(-0.5, 0.5)
            total = (
                total + torch.stack(((values[i] - row["returns"][i]) ** 2, (near - row["returns"][i]) ** 2)).max() / 2
            )
    return total / sum(int(row[COUNTED].sum()) for row in given)


def trained(model: nn.Module, losses: list[Any], schedule: Any) -> list[tuple[float, float, float]]:
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    rates, seen = torch.optim.lr_scheduler.LambdaLR(adam, schedule), []
    for loss in losses:
        adam.zero_grad()
        (found := loss(model)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        adam.step()
        rates.step()
        seen.append((found.item(), norm.item(), rates.get_last_lr()[0]))
    return seen


def equal(found: dict[str, Tensor], model: nn.Module) -> None:
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_verls_worker_trains_as_one_device_does(worlds, ranks: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    models = {kind: saved(tmp_path, kind) for kind in ("language_model", "value_model")}
    language = AutoModelForCausalLM.from_pretrained(models["language_model"], attn_implementation="eager")
    value = AutoModelForTokenClassification.from_pretrained(
        models["value_model"], attn_implementation="eager", classifier_dropout=0.0
    )
    with torch.no_grad():
        before = [heads(language(input_ids=row["input_ids"][None]).logits[0], row)[0] for row in rows(0)]
    sft = [row["input_ids"] for row in rows(0)]
    language.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row, tokens in zip(rows(0), sft, strict=True):
        logp, _ = heads(language(input_ids=tokens[None]).logits[0], row)
        total = total - (logp * row[COUNTED]).sum()
    (total / sum(int(row[COUNTED].sum()) for row in rows(0))).backward()
    norm = torch.cat([p.grad.flatten() for p in language.parameters() if p.grad is not None]).norm()
    seen = trained(language, [partial(true_policy, step=step) for step in range(STEPS)], lambda n: min(1.0, n / 2))
    values = trained(value, [partial(true_value, step=0)] * 2, lambda n: 1.0)
    place = tmp_path / str(ranks)
    place.mkdir()
    for rank, found in enumerate(worlds(ranks).run(all_of_it, place, models, timeout=280)):
        mine = found["policy"]
        for (loss, *rest), (expected, *truth) in zip(mine["seen"], seen, strict=True):
            assert loss == pytest.approx(expected, rel=1e-6)  # which verl adds up in float32
            assert rest == pytest.approx(truth, rel=1e-8)
        equal(mine["weights"], language)
        for row, logp in zip(found["reference"], before[rank::ranks], strict=True):
            torch.testing.assert_close(row[-len(logp) - 1 : -1], logp, rtol=1e-9, atol=1e-10)
        with torch.no_grad():
            for number, row in enumerate(rows(0)[rank::ranks]):
                logits = language(input_ids=row["input_ids"][None]).logits[0]
                logp, entropy = heads(logits, row)
                at = slice(-len(logp) - 1, -1)
                squares = (logits / row["temperature"]).softmax(-1).square().sum(-1)[at]
                for name, truth in (("log_probs", logp), ("entropy", entropy), ("sum_pi_squared", squares)):
                    torch.testing.assert_close(mine["looked"][name][number][at], truth, rtol=1e-8, atol=1e-9, msg=name)
                said = value(input_ids=row["input_ids"][None]).logits[0, :, 0]
                torch.testing.assert_close(found["critic"]["looked"][number], said, rtol=1e-8, atol=1e-9)
        equal(found["critic"]["weights"], value)
        metrics = found["critic"]["metrics"]
        assert metrics["grad_norm"] == [pytest.approx(one[1], rel=1e-8) for one in values]
        for name in ("loss", "critic/vf_loss"):
            assert metrics[name] == [pytest.approx(one[0], rel=1e-6) for one in values], name
        assert found["split"][0] == pytest.approx(float(norm), rel=1e-9)
    exported = AutoModelForCausalLM.from_pretrained(place / "global_step_2" / "huggingface")
    assert exported.config.vocab_size == VOCAB
