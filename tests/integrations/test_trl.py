"""TRL's SFTTrainer and DPOTrainer with the integration, against the stock ones in one process."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

import isograd as ig

from . import toys
from .worlds import as_torchrun_starts_it

pytest.importorskip("trl")
pytestmark = pytest.mark.slow
WORDS = [f"w{number}" for number in range(toys.VOCAB - 3)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(kind: str) -> Any:
    """Prompts and answers of very different lengths."""
    from datasets import Dataset

    rows = []
    for row in range(24):
        said = [WORDS[(7 * row + 3 * place) % len(WORDS)] for place in range(10)]
        answer = f" {' '.join(said[4 : 5 + row % 6])}"
        rows.append({"prompt": " ".join(said[:4]), "completion": answer})
        if kind == "DPO":
            rows[-1] = {"prompt": " ".join(said[:4]), "chosen": answer, "rejected": f" {' '.join(said[: 1 + row % 5])}"}
    return Dataset.from_list(rows)


def trained(kind: str, layout: str | None, ours: bool, options: dict[str, Any]) -> dict[str, Any]:
    import trl

    with as_torchrun_starts_it() as (_, ranks), tempfile.TemporaryDirectory() as scratch:
        made_class = getattr(trl, f"{kind}Trainer")
        standard = vars(toys.arguments(scratch, 2, ranks))
        names = ("output_dir", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "use_cpu")
        names += (
            "learning_rate",
            "max_grad_norm",
            "logging_steps",
            "save_strategy",
            "report_to",
            "disable_tqdm",
            "seed",
        )
        given = {name: standard[name] for name in names} | {"bf16": False, "activation_checkpointing": False}
        arguments = getattr(trl, f"{kind}Config")(**given, max_length=toys.LENGTH, **options)
        made_class = ig.integrations.trainer(made_class, layout) if ours else made_class
        reference = {"ref_model": toys.model()} if kind == "DPO" else {}
        found = made_class(
            toys.model(), args=arguments, train_dataset=texts(kind), processing_class=tokenizer(), **reference
        )
        found.train()
        if ours:
            with found.engine.full_parameters():
                return toys.trained(found)
        return toys.trained(found)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("SFT", {}),
        ("SFT", {"packing": False, "completion_only_loss": False}),
        ("DPO", {}),
        ("DPO", {"loss_type": "ipo"}),
    ],
)
def test_trl_trains_as_its_stock_trainer_does_in_one_process(worlds, kind: str, options: dict[str, Any]) -> None:
    """TRL computes log-probabilities in fp32."""
    expected = trained(kind, None, False, options)
    assert any(row["grad_norm"] > 0 for row in expected["log"])
    for ranks, layout in ((1, None), (2, "zero1"), (4, "zero2")):
        found = worlds(ranks).run(trained, kind, layout, True, options) if ranks > 1 else [
            trained(kind, layout, True, options)
        ]  # fmt: skip
        for one in found:
            for name, value in expected["parameters"].items():
                assert torch.allclose(one["parameters"][name], value, rtol=1e-4, atol=2e-5), (ranks, name)
            for mine, theirs in zip(one["log"], expected["log"], strict=True):
                assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
                assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_task_preference_has_the_loss_and_the_gradients_of_dpo_trainer(tmp_path: Any) -> None:
    """One batch of uneven pairs, a policy that differs from its reference; TRL computes log-probabilities in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    from isograd.hf.configs import to_hf_config
    from isograd.hf.families import to_hf
    from isograd.models import TransformerConfig
    from isograd.train.preference_model import PreferenceTransformer
    from isograd.train.sections import Preference

    words, mesh = tokenizer(), ig.Mesh("dp1")
    config = TransformerConfig(vocab=len(words), hidden=24, layers=2, heads=4, kv_heads=2, mlp=40, tied=False)
    loss = Preference(beta=0.3)
    policy, before = (PreferenceTransformer(config, mesh, loss, seed=s, dtype=torch.float64) for s in (0, 1))

    def theirs(model: Any) -> Any:
        found = LlamaForCausalLM(LlamaConfig(**to_hf_config(config))).double()
        found.load_state_dict(to_hf(model))
        return found

    options: dict[str, Any] = {"bf16": False, "use_cpu": True, "report_to": "none", "gradient_checkpointing": False}
    arguments = DPOConfig(str(tmp_path), beta=0.3, max_length=64, per_device_train_batch_size=6, **options)
    model = theirs(policy)
    trainer = DPOTrainer(
        model, ref_model=theirs(before), args=arguments, train_dataset=texts("DPO"), processing_class=words
    )
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()

    counted = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100).roll(-1, 1)
    counted[:, -1] = -100
    tokens, labels = (t.unflatten(0, (2, -1)).transpose(0, 1) for t in (batch["input_ids"], counted))
    with before.pair_loss.noting() as noted, torch.no_grad():
        before(tokens, labels)
    ours, pairs = policy(tokens, labels, reference=noted[0])
    ours.backward()
    assert pairs == 6 and abs(float(ours.detach()) - 0.6931) > 1e-3
    assert loss.item() == pytest.approx(ours.item(), rel=1e-5)
    gradients = to_hf(policy, {name: parameter.grad for name, parameter in policy.named_parameters()})
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
