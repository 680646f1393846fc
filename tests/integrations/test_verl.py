"""verl's own train_batch and infer_batch on our engine, with its loss and with one of ours, against plain torch."""

from __future__ import annotations

import tomllib
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isograd.comm import world
from isograd.errors import IsogradError

pytest.importorskip("verl")
pytestmark = pytest.mark.peers
VOCAB, SEQUENCES, STEPS = 43, 8, 3
OPTIONS = {
    "lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "clip_grad": 0.5, "lr_warmup_steps": 1,
    "lr_scheduler_type": "cosine", "total_training_steps": 5, "min_lr_ratio": 0.1,
}  # fmt: skip
LENGTHS = [3, 11, 5, 2, 9, 4, 12, 7]


def gpt() -> nn.Module:
    """In float64 throughout: Llama's norms compute in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=16, **none)
    ).double()


def sequences(step: int) -> list[tuple[Tensor, Tensor]]:
    """(tokens, which of them count) of a step: of all lengths; of one nothing counts, of another all but the first."""
    draw = torch.Generator().manual_seed(step)
    found = []
    for number, length in enumerate(LENGTHS):
        mask = (torch.rand(length, generator=draw) < 0.6).long()
        mask = torch.zeros_like(mask) if number == 1 else torch.ones_like(mask) if number == 6 else mask
        mask[0] = 0
        found.append((torch.randint(VOCAB, (length,), generator=draw), mask))
    return found


def batch(step: int) -> Any:
    """This rank's sequences, as verl's trainer deals them out."""
    from verl.utils import tensordict_utils as tu

    rank, ranks = world.world()
    mine = sequences(step)[rank::ranks]
    tokens, masks = (torch.nested.as_nested_tensor([row[i] for row in mine], layout=torch.jagged) for i in (0, 1))
    return tu.get_tensordict(
        {"input_ids": tokens, "loss_mask": masks},
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "calculate_entropy": True},
    )


def weighed(model_output: Any, data: Any, dp_group: Any) -> Any:
    """A loss of ours: a mean, and how many tokens it is the mean of."""
    mask = data["loss_mask"].values().roll(-1)
    total = -(model_output["log_probs"].values() * mask).sum()
    return (total / mask.sum().clamp(min=1), mask.sum()), {}


def made(layout: str) -> Any:
    from verl.workers.engine.base import EngineRegistry

    module = import_module("isograd.integrations.verl")

    class Engine(module.IsogradEngine):  # type: ignore[misc]
        def model(self) -> nn.Module:
            return gpt()

    options = SimpleNamespace(**OPTIONS)
    assert EngineRegistry.get_engine_cls("language_model", "isograd") is Engine.__mro__[1]
    found = Engine(SimpleNamespace(), module.EngineOptions(layout=layout), options, SimpleNamespace())
    found.initialize()
    return found


def trained(layout: str, theirs: bool, folder: Path) -> Any:
    from verl.workers.utils.losses import sft_loss

    loss = partial(sft_loss, None) if theirs else weighed
    engine, seen = made(layout), []
    for step in range(STEPS):
        if step == 2 and theirs:  # cut, and resumed under another stage
            engine.save_checkpoint(str(folder), global_step=step)
            engine = made("zero2")
            engine.load_checkpoint(str(folder))
        with engine.train_mode():
            output = engine.train_batch(batch(step), loss)
            assert engine.module.training
        seen.append((output["metrics"]["grad_norm"], engine.lr_scheduler_step()))
    with engine.eval_mode():
        looked = engine.infer_batch(batch(0))["model_output"]
    weights, adapter = engine.get_per_tensor_param()
    assert adapter is None and engine.get_data_parallel_size() == world.world()[1]
    return seen, dict(weights), {name: [row.clone() for row in value.unbind()] for name, value in looked.items()}


def plain() -> tuple[list[tuple[float, float]], dict[str, Tensor], list[Tensor]]:
    from verl.utils import torch_functional

    model, seen = gpt(), []
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch_functional.get_cosine_schedule_with_warmup(adam, 1, 5, min_lr_ratio=0.1)

    def logp(tokens: Tensor) -> Tensor:
        return torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1], -1).gather(-1, tokens[1:, None])[:, 0]

    for step in range(STEPS):
        adam.zero_grad()
        rows = sequences(step)
        total = sum((logp(tokens) * mask[1:]).sum() for tokens, mask in rows)
        (-total / sum(mask.sum() for _, mask in rows)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        schedule.step()
        seen.append((norm.item(), schedule.get_last_lr()[0]))
    with torch.no_grad():
        return seen, model.state_dict(), [logp(tokens) for tokens, _ in sequences(0)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_train_batch_of_verl_has_the_steps_of_one_device(worlds, ranks: int, tmp_path: Path) -> None:
    seen, weights, logps = plain()
    for layout, theirs in (("zero1", True), ("zero3", False)):
        found = worlds(ranks).run(trained, layout, theirs, tmp_path / str(theirs), timeout=280)
        for rank, (norms, state, looked) in enumerate(found):
            assert norms == [pytest.approx(pair, rel=1e-9) for pair in seen]
            assert state.keys() == weights.keys()
            for name, value in weights.items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9, msg=name)
            for row, truth in zip(looked["log_probs"], logps[rank::ranks], strict=True):
                torch.testing.assert_close(row[:-1], truth, rtol=1e-9, atol=1e-9)
            assert all((row > 0).all() for row in looked["entropy"])


def failing(layout: str, ranks_that_fail: list[int]) -> tuple[str, dict[str, Tensor]]:
    """A loss function raises in step 1, behind a backward; the engine then goes on."""
    calls: list[int] = []

    def loss(**given: Any) -> Any:
        calls.append(1)
        if len(calls) == 4 and world.world()[0] in ranks_that_fail:  # two micro-batches in a step
            raise ValueError("a bad row")
        return weighed(**given)

    engine, said = made(layout), ""
    for step in range(STEPS):
        for _ in range(2 if step == 1 else 1):
            with engine.train_mode():
                try:
                    engine.train_batch(batch(step), loss)
                except (ValueError, IsogradError) as error:
                    said = str(error)
        engine.lr_scheduler_step()
    return said, dict(engine.get_per_tensor_param()[0])


@pytest.mark.parametrize("layout, fail", [("zero2", [0, 1]), ("zero2", [1]), ("zero3", [1])])
def test_a_loss_function_that_fails_drops_the_step_on_all_ranks(worlds, layout: str, fail: list[int]) -> None:
    truth = plain()[1]
    for rank, (said, found) in enumerate(worlds(2).run(failing, layout, fail, timeout=280)):
        if rank in fail or layout != "zero3":
            assert ("a bad row" in said) and ("IG550" in said) == (rank not in fail)
        else:  # in its backward already, where it gathers parameters
            assert "IG571" in said and "an exception on rank 1 ended a ZeRO 3 gather" in said
        for name, value in truth.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "where, name, value",
    [("model", "lora_rank", 8), ("options", "optimizer", "AdamW8bit"), ("options", "lr_scheduler_type", "linear"),
     ("options", "optimizer_impl", "torchao.optim"), ("given", "param_offload", True), ("model", "use_liger", True),
     ("model", "trust_remote_code", True), ("kept", "load_contents", ["model"])],
)  # fmt: skip
def test_options_that_would_be_left_out_without_a_word_are_refused(where: str, name: str, value: Any) -> None:
    module = import_module("isograd.integrations.verl")
    given = module.EngineOptions(**({name: value} if where == "given" else {}))
    options = SimpleNamespace(**{**OPTIONS, **({name: value} if where == "options" else {})})
    model = SimpleNamespace(**({name: value} if where == "model" else {}))
    kept = SimpleNamespace(**({name: value} if where == "kept" else {}))
    with pytest.raises(IsogradError, match="IG872"):
        module.IsogradEngine(model, given, options, kept).initialize()


def refused(folder: Path) -> list[str]:
    """What is wrong in a batch of one rank is said on all; then a loss with weights is the mean over all ranks."""
    engine, said = made("zero1"), []

    def tried(change: Any, theirs: Any = weighed) -> None:
        change(data := batch(0))
        with pytest.raises(IsogradError) as error:
            engine.infer_batch(data, theirs)
        said.append(error.value.code)

    def first_counts(data: Any) -> None:
        if world.world()[0] == 0:
            data["loss_mask"].values()[0] = 1

    def padded(data: Any) -> None:
        data["loss_mask"] = data["loss_mask"].to_padded_tensor(0)

    tried(first_counts)
    tried(padded)
    tried(lambda data: data.update({"temperature": torch.ones(len(data), 2)}))
    with pytest.raises(IsogradError, match="IG860"):
        engine.load_checkpoint(str(folder))
    with pytest.raises(IsogradError, match="IG872"):
        engine.train_batch(batch(0), None)
    looked = engine.infer_batch(batch(0), weighed)["loss"]
    with engine.train_mode():
        trained_on = engine.train_batch(batch(0), weighed)["loss"]
    return [*said, *map(str, looked + trained_on)]


def test_wrong_batches_are_refused_on_all_ranks_and_a_loss_with_weights_is_told_whole(worlds, tmp_path: Path) -> None:
    model, rows = gpt(), sequences(0)
    with torch.no_grad():
        total = sum(
            (torch.log_softmax(model(input_ids=t[None]).logits[0, :-1], -1).gather(-1, t[1:, None])[:, 0] * m[1:]).sum()
            for t, m in rows
        )
    truth = -float(total) / sum(int(m.sum()) for _, m in rows)
    for *codes, looked, trained_on in worlds(2).run(refused, tmp_path, timeout=280):
        assert codes == ["IG872"] * 3
        assert [float(looked), float(trained_on)] == [pytest.approx(truth, rel=1e-9)] * 2


def test_the_entry_point_names_the_engine() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["entry-points"]["verl.plugins"] == {"isograd": "isograd.integrations.verl"}
