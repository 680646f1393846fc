"""verl's own TrainingWorker where ranks share their sequences or their model: gradients of its policy and its critic by
name, in fp64, those of plain torch on one device.

Sequences are of very different lengths, and a step has one or three micro-batches. Runs are resumed under another
layout. Llama's norms compute in fp32, which ForceFP64 turns into fp64, but not where blocks are recomputed: GPT-2 does.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isograd.core.layout import Layout
from isograd.errors import IsogradError
from isograd.hf.force_fp64 import ForceFP64

pytest.importorskip("verl")

from . import test_verl_worker as whole

pytestmark = pytest.mark.peers
SEQUENCES = 6


def saved(folder: Path, family: str) -> dict[str, str]:
    """A policy and a critic, small and in fp64."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "qwen3_moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 6}
    if family == "gpt2":
        shape = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 24}
        shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = AutoConfig.for_model(family, vocab_size=whole.VOCAB, intermediate_size=31, **shape)
    config.num_labels, config.bos_token_id, config.eos_token_id, config._experts_implementation = 1, 0, 0, "eager"
    kinds = {"language_model": AutoModelForCausalLM, "value_model": AutoModelForTokenClassification}
    for name, kind in kinds.items():
        torch.manual_seed(0)
        kind.from_config(config).double().save_pretrained(folder / name)
    return {name: str(folder / name) for name in kinds}


def loaded(models: dict[str, str], name: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    kind = AutoModelForCausalLM if name == "language_model" else AutoModelForTokenClassification
    found: nn.Module = kind.from_pretrained(models[name], attn_implementation="eager", dtype=torch.float64)
    found.config._experts_implementation = "eager"
    return found


def worker(kind: str, models: dict[str, str], layout: str, micro: int, family: str) -> Any:
    """verl's, and the gradients of its last step, before clipping."""
    sizes = {"micro_batch_size_per_gpu": micro, "infer_micro_batch_size_per_gpu": 1}
    recomputes = {"enable_gradient_checkpointing": family == "gpt2"}
    made = whole.worker(kind, models[kind], layout, changes=recomputes, **sizes)
    engine, seen = made.engine, {}
    engine.module.config._experts_implementation = "eager"
    step = engine.optimizer_step

    def looks() -> float:
        seen.clear()
        seen.update({name: g.clone() for name, g in engine.engine.grads().items()})
        return step()

    engine.optimizer_step = looks
    return made, seen


def trained(folder: Path, models: dict[str, str], layout: str, then: str, micros: int, family: str) -> dict[str, Any]:
    """Three steps of the policy, the last one resumed under another layout; one of the critic, and a reference."""
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    from .verl_cpu import as_a_worker

    critic_layout = layout.replace(" sp", "").replace("cp2 ring tp2", "dp2 cp2 ring")  # a score has neither
    found: dict[str, Any] = {"steps": {}, "grads": []}
    with as_a_worker(str(folder)), ForceFP64():
        for step in range(whole.STEPS):
            if step in (0, 2):
                on = then if step else layout
                ours, seen = worker("language_model", models, on, SEQUENCES // micros // dp_of(on), family)
            if step == 2:
                ours.load_checkpoint(str(folder / "two"))
            ours.set_loss_fn(partial(ppo_loss, config=whole.actor(whole.MODES[step])))
            output = ours.train_batch(given(ours, step))
            first = ours.engine.mesh.index("cp") == ours.engine.mesh.index("tp") == 0
            assert (output is not None) == first == ours.engine.is_mp_src_rank_with_outputs()
            found["grads"].append(dict(seen))
            if first:
                metrics = whole.said(output)
                found["steps"][step] = metrics["loss"], metrics["grad_norm"], metrics["lr"]
            if step == 1:
                ours.save_checkpoint(str(folder / "two"), global_step=2)
        found["weights"] = {name: value.clone() for name, value in ours.engine.get_per_tensor_param()[0]}
        found["looked"] = looked(ours, ("log_probs", "entropy"))
        size = SEQUENCES // micros // dp_of(critic_layout)
        critic, seen = worker("value_model", models, critic_layout, size, family)
        critic.set_loss_fn(partial(value_loss, CriticConfig(strategy="isograd", ppo_micro_batch_size_per_gpu=1)))
        critic.train_batch(given(critic, 0))
        found["critic"], found["values"] = dict(seen), looked(critic, ("values",))
        reference = whole.worker(
            "language_model", models["language_model"], layout, forward_only=True, infer_micro_batch_size_per_gpu=1
        )
        reference.engine.module.config._experts_implementation = "eager"
        found["reference"] = looked(reference, ("log_probs",))
    return found


def dp_of(layout: str) -> int:
    return int(next((word[2:] for word in layout.split() if word.startswith("dp")), 1))


def given(ours: Any, step: int, **settings: Any) -> Any:
    """The sequences of this data rank, as verl deals them."""
    engine = ours.engine
    data = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    return whole.batch(step, data, SEQUENCES, **settings)


def looked(ours: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """What it says of the sequences of the first step, and which these are; on the ranks that verl asks."""
    output = ours.infer_batch(given(ours, 0, compute_loss=False))
    assert (output is not None) == ours.engine.is_mp_src_rank_with_outputs()
    if output is None:
        return {}
    mine = slice(ours.engine.get_data_parallel_rank(), None, ours.engine.get_data_parallel_size())
    return {"rows": mine} | {name: [row.clone() for row in output[name].unbind()] for name in names}


def near(found: dict[str, Tensor], truth: dict[str, Tensor], case: object) -> float:
    """The largest error of a gradient, of its largest entry."""
    assert found.keys() == truth.keys()
    errors = {n: float((found[n] - t).abs().max() / t.abs().max().clamp(min=1e-12)) for n, t in truth.items()}
    assert max(errors.values()) < 1e-9, (case, errors)
    return max(errors.values())


@pytest.mark.parametrize(
    "ranks, layout, then, micros, family",
    [
        (2, "cp2 ulysses zero1", "tp2 zero2", 3, "llama"),
        (2, "cp2 ring zero3", "dp2 zero1", 1, "gpt2"),
        (2, "tp2", "cp2 ring zero3", 1, "llama"),
        (2, "tp2 sp zero3", "tp2", 3, "llama"),
        (2, "dp2 ep2 zero1", "dp2 zero3", 3, "qwen3_moe"),
        (4, "dp2 cp2 ulysses zero2", "dp2 tp2 sp zero3", 3, "llama"),
        (4, "dp2 tp2 sp zero2", "cp2 ulysses tp2", 1, "llama"),
        (4, "cp2 ring tp2 zero1", "dp2 cp2 ring", 3, "llama"),
    ],
)
def test_verls_worker_has_the_gradients_of_one_device(
    worlds, tmp_path: Path, ranks: int, layout: str, then: str, micros: int, family: str
) -> None:
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    models = saved(tmp_path, family)
    grads, steps = [], []
    with ForceFP64():
        policy, critic = loaded(models, "language_model"), loaded(models, "value_model")
        with torch.no_grad():
            before = says(policy)
        whole.true_value(critic, 0, SEQUENCES).backward()

        def loss(model: nn.Module, step: int) -> Tensor:
            return whole.true_policy(model, step, SEQUENCES)

        adam = torch.optim.AdamW(policy.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        rates = torch.optim.lr_scheduler.LambdaLR(adam, lambda n: min(1.0, n / 2))
        for step in range(whole.STEPS):
            adam.zero_grad()
            (value := loss(policy, step)).backward()
            grads.append({name: p.grad.clone() for name, p in policy.named_parameters()})
            norm = nn.utils.clip_grad_norm_(policy.parameters(), 0.3)
            adam.step()
            rates.step()
            steps.append((value.item(), norm.item(), rates.get_last_lr()[0]))
        with torch.no_grad():
            after = says(policy)
            values = {"values": [critic(row["input_ids"][None]).logits[0, :, 0] for row in whole.rows(0, SEQUENCES)]}
    weights = dict(unfuse_moe_params(iter(policy.state_dict().items()), policy.config.model_type))
    (folder := tmp_path / "run").mkdir()
    every = worlds(ranks).run(trained, folder, models, layout, then, micros, family, timeout=280)
    for found in every:
        for step, truth in enumerate(grads):
            near(found["grads"][step], truth, step)
        near(found["critic"], {name: p.grad for name, p in critic.named_parameters()}, "critic")
        for step, (first, *rest) in found["steps"].items():
            true, *others = steps[step]
            assert first == pytest.approx(true, rel=1e-6)  # which verl adds up in float32
            assert rest == pytest.approx(others, rel=1e-9)
        assert found["weights"].keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-9, atol=1e-10, msg=name)
        for said, truth in ((found["looked"], after), (found["reference"], before), (found["values"], values)):
            for name in said.keys() - {"rows"}:
                for row, true in zip(said[name], truth[name][said["rows"]], strict=True):
                    mine = row if name == "values" else row[-len(true) - 1 : -1]
                    torch.testing.assert_close(mine, true, rtol=1e-9, atol=1e-10, msg=name)
    assert len(every[0]["steps"]) == whole.STEPS
    assert all(every[0][name] for name in ("looked", "reference", "values"))


def says(policy: nn.Module) -> dict[str, list[Tensor]]:
    """Log probabilities and entropies of responses."""
    pairs = [whole.heads(policy(row["input_ids"][None]).logits[0], row) for row in whole.rows(0, SEQUENCES)]
    return {"log_probs": [pair[0] for pair in pairs], "entropy": [pair[1] for pair in pairs]}


def failing(folder: Path, models: dict[str, str], layout: str, fails: int, family: str) -> tuple[str, Any, float]:
    """A loss with weights raises on a data rank behind a backward; the step is taken again. Its loss, for the logs."""
    from .test_verl import weighed
    from .verl_cpu import as_a_worker

    calls: list[int] = []

    def loss(**given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and ours.engine.get_data_parallel_rank() == fails:
            raise ValueError("a bad row")
        if said:
            torch.distributed.all_reduce(one := torch.ones(()), group=given["dp_group"])
            assert one == dp_of(layout)
        return weighed(**given)

    said = ""
    with as_a_worker(str(folder)), ForceFP64():
        ours, seen = worker("language_model", models, layout, 1, family)
        ours.set_loss_fn(loss)
        try:
            ours.train_batch(given(ours, 0))
        except (ValueError, IsogradError) as error:
            said = str(error)
        output = ours.train_batch(given(ours, 0, use_dynamic_bsz=True))
        return said, seen, 0.0 if output is None else whole.said(output)["loss"]


@pytest.mark.parametrize(
    "ranks, layout, fails, family",
    [(2, "cp2 ulysses zero1", 0, "gpt2"), (4, "dp2 tp2", 1, "llama"), (4, "dp2 tp2 zero3", 1, "llama")],
)
def test_a_loss_with_weights_that_fails_on_a_data_rank_drops_the_step(
    worlds, tmp_path: Path, ranks: int, layout: str, fails: int, family: str
) -> None:
    models = saved(tmp_path, family)
    with ForceFP64():
        policy, total = loaded(models, "language_model"), torch.zeros((), dtype=torch.float64)
        given = whole.rows(0, SEQUENCES)
        for row in given:
            logits = policy(row["input_ids"][None]).logits[0, :-1] / row["temperature"]
            scores = logits.log_softmax(-1).gather(-1, row["input_ids"][1:, None])
            total = total - (scores[:, 0] * row["loss_mask"][1:]).sum()
        (mean := total / sum(int(row["loss_mask"].sum()) for row in given)).backward()
    truth = {name: p.grad for name, p in policy.named_parameters()}
    for rank, (said, seen, loss) in enumerate(worlds(ranks).run(failing, tmp_path, models, layout, fails, family)):
        assert "a bad row" in said or "IG5" in said, (rank, said)
        near(seen, truth, rank)
        assert loss in (0.0, pytest.approx(mean.item(), rel=1e-6))


def words(**options: Any) -> str:
    module = import_module("isograd.integrations.verl")
    return module.layout_of(module.EngineOptions(**options))


def test_verls_own_words_name_axes() -> None:
    assert words(layout="zero1", ulysses_sequence_parallel_size=2).split() == ["zero1", "cp2", "ulysses"]
    assert words(ulysses_sequence_parallel_size=2, tensor_parallel_size=4).split() == ["cp2", "ulysses", "tp4"]
    assert words(layout="tp2 sp", tensor_model_parallel_size=2) == "tp2 sp"
    with pytest.raises(IsogradError, match="'tp' is given twice"):
        Layout.parse(words(layout="dp2 tp2", tensor_parallel_size=4))
