"""A folder that transformers' own code runs in `isograd train`, with adapters and without: gradients of plain torch."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from isograd.cli.main import main
from isograd.core.mesh import Mesh
from isograd.data import Mixture, builtin_chats
from isograd.errors import CheckpointError, IsogradError, LaunchError
from isograd.hf.force_fp64 import ForceFP64
from isograd.hf.training_rows import positions, refuse_packing
from isograd.train import journal, library, loop, preference, texts
from isograd.train.config import Config
from isograd.train.loop import RunOptions
from isograd.train.optimizers import LearningRateSchedule
from isograd.train.tasks import make_task
from tests.sizes import few
from tests.train.test_preference import pairs

peft = pytest.importorskip("peft")
QUIET = RunOptions(show="none", signals=())
STEPS, ROWS = 3, 4
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 256}
LORA = {"rank": 3, "alpha": 5, "targets": ["q_proj", "o_proj", "up_proj", "down_proj"]}


def base(folder: Path, kind: str = "qwen2", **sizes: int) -> Path:
    """A folder with a small model, with noise on what would be ones and zeros, and a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **sizes}), dtype=torch.float64)
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    builtin_chats.tokenizer(folder / "base")
    made.save_pretrained(folder / "base")
    return folder / "base"


def config_of(folder: Path, task: str, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "run": str(folder),
        "task": task,
        "model": {"path": str(folder.parent / "base"), "dtype": "fp64"},
        "adapter": LORA,
        "data": {"sources": [{"builtin": "sums"}], "length": 100},
        "optimizer": {"lr": 1e-2, "warmup": 1},
        "steps": STEPS,
        "batch": ROWS,
        "micro_batches": 2,
        "log": {"sample": 0},
        "evaluate": {"batches": 1},
    }
    return Config.model_validate({**values, **changes})


Step = tuple[float, dict[str, Tensor]]


def steps_of(config: Config) -> Iterator[tuple[Any, Step]]:
    """The task of a run on this rank: after each step its loss, and the gradients before it by name."""
    job = make_task(config, Mesh(config.layout), lambda _: None)
    schedule = LearningRateSchedule(config.optimizer, job.engine.optimizer, config.steps)
    for step in range(STEPS):
        schedule.set(step)
        job.accumulate(job.batch(step))
        found = {name: gradient.clone() for name, gradient in job.engine.grads().items()}
        yield job, (job.engine.step().loss, found)


def under(configs: list[Config]) -> list[tuple[list[Step], float]]:
    """Of each: its steps; and, of pairs, how far the references without adapters are from what they were at first."""
    found = []
    for config in configs:
        every, moved = list(steps_of(config)), 0.0
        job, steps = every[-1][0], [step for _, step in every]
        if config.task == "preference":
            moved = float((job._made(lambda _: None) - job.reference).abs().max())
        found.append((steps, moved))
    return found


def plain(config: Config, started: Path) -> Any:
    """transformers and peft, and the optimizer that the config says; adapters as they start."""
    from transformers import AutoModelForCausalLM

    whole: Any = AutoModelForCausalLM.from_pretrained(str(config.model.path), dtype=torch.float64)
    if config.adapter is None:
        return whole
    return peft.PeftModel.from_pretrained(whole, started, is_trainable=True, autocast_adapter_dtype=False)


def logp(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """[labels that count]: of one text by itself."""
    with ForceFP64():
        logits = model(input_ids=tokens[None]).logits[0]
    return -F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")[labels != -100]


def chat_loss(model: Any, config: Config, step: int) -> Tensor:
    """The mean over all labels, of conversations one by one."""
    data = texts.mixture(config, "train")
    assert isinstance(data, Mixture)
    rows = data.rows(step, range(ROWS))
    found = []
    for tokens, labels, documents in zip(rows["tokens"], rows["labels"], rows["documents"], strict=True):
        found += [logp(model, tokens[documents == d], labels[documents == d]) for d in documents.unique()]
    return -torch.cat(found).mean()


def dpo_loss(model: Any, config: Config, step: int) -> Tensor:
    """-log sigmoid of the margin over the model without its adapters, of pairs one by one."""
    data = texts.pairs(config)
    rows = data.rows(data.numbers(step), range(ROWS), range(2))
    found = []
    for tokens, labels in zip(rows["tokens"], rows["labels"], strict=True):
        sums = [logp(model, tokens[answer], labels[answer]).sum() for answer in range(2)]
        with model.disable_adapter(), torch.no_grad():
            before = [logp(model, tokens[answer], labels[answer]).sum() for answer in range(2)]
        assert config.preference is not None
        margin = (sums[0] - before[0]) - (sums[1] - before[1])
        found.append(-F.logsigmoid(config.preference.strength * margin))
    return torch.stack(found).mean()


def expected(config: Config, started: Path) -> tuple[list[Step], Any]:
    """The steps of one device, and its model behind them."""
    model = plain(config, started)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    matrices, rest = ([p for p in trained.values() if (p.dim() > 1) == kind] for kind in (True, False))
    groups = [{"params": matrices, "weight_decay": config.optimizer.weight_decay}, {"params": rest, "weight_decay": 0}]
    options = config.optimizer
    adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=options.lr, betas=options.betas, eps=options.eps)
    schedule, steps = LearningRateSchedule(options, adam, config.steps), []
    for step in range(STEPS):
        schedule.set(step)
        loss = (chat_loss if config.task == "chat" else dpo_loss)(model, config, step)
        loss.backward()
        found = {n.removeprefix("base_model.model."): p.grad.clone() for n, p in trained.items()}
        steps.append((loss.item(), found))
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        adam.step()
        adam.zero_grad()
    return steps, model


def is_equal(found: list[Step], truth: list[Step], layout: str) -> None:
    for (loss, gradients), (true_loss, true) in zip(found, truth, strict=True):
        assert loss == pytest.approx(true_loss, rel=1e-9), layout
        floor = 1e-6 * torch.stack([g.norm() for g in true.values()]).norm()
        assert gradients.keys() == true.keys()
        for name, gradient in true.items():
            assert (gradients[name] - gradient).norm() <= 1e-9 * torch.maximum(gradient.norm(), floor), (layout, name)


def written(config: Config, to: Path) -> Path:
    """The adapters of a run's newest checkpoint, as a folder of peft."""
    assert main(["ckpt", "convert", str(config.folder / "checkpoints"), str(to), "--adapters"]) == 0
    return to


LAYOUTS = {"chat": ["dp2 zero2", "dp2 zero3", "tp2 sp zero1", "cp2 ring", "pp2"], "preference": []}
LAYOUTS["preference"] = ["dp2 zero1", "dp2 zero3", "tp2 sp", "cp2 ring"]
MORE: dict[str, dict[str, Any]] = {"chat": {}, "preference": {"preference": {"loss": "dpo", "beta": 0.5}}}


@pytest.mark.slow
@pytest.mark.parametrize("task", LAYOUTS)
def test_adapters_have_the_gradients_of_plain_torch_under_every_layout(worlds, tmp_path: Path, task: str) -> None:
    base(tmp_path)
    pairs(tmp_path)
    few = {"sources": [{"path": str(tmp_path / "pairs.jsonl")}], "length": 70, "held_out": 0.2}
    config = config_of(tmp_path / "run", task, **({} if task == "chat" else {"data": few}), **MORE[task])
    config.folder.mkdir()
    texts.prepare(config)
    from isograd.hf import export_adapters

    job = make_task(config, Mesh("dp1"), lambda _: None)
    export_adapters(job.engine, tmp_path / "start")
    truth, _ = expected(config, tmp_path / "start")
    assert len(truth[-1][1]) == 2 * 2 * len(LORA["targets"])
    assert all(gradient.abs().max() > 0 for gradient in truth[-1][1].values())
    (alone,) = under([config])
    configs = [config.model_copy(update={"layout": layout}) for layout in LAYOUTS[task]]
    for each in [[alone], *worlds(2).run(under, configs, timeout=280)]:
        for (steps, moved), layout in zip(each, LAYOUTS[task] if len(each) > 1 else ["dp1"], strict=True):
            if "pp" not in layout:
                is_equal(steps, truth, layout)
            assert moved <= 1e-12, layout
    both = worlds(2).run(under, configs[-1:], timeout=280) if task == "chat" else []
    if both:  # each stage has the gradients of its own layers
        merged = [(a[0], a[1] | b[1]) for a, b in zip(both[0][0][0], both[1][0][0], strict=True)]
        is_equal(merged, truth, "pp2")


@pytest.mark.medium
def test_a_run_with_adapters_resumes_under_another_layout_and_is_written_for_peft(worlds, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base(tmp_path)
    whole = config_of(tmp_path / "whole", "chat", log={"sample": 4})
    assert loop.run(whole, QUIET).code == 0
    lines = journal.read(whole.folder / "metrics.jsonl")
    assert any("▮" in str(line.get("text")) for line in lines)
    cut = config_of(tmp_path / "cut", "chat", layout="dp2 zero1")
    assert worlds(2).run(loop.run, cut, RunOptions(show="none", signals=(), until=2))[0].code == 75
    assert worlds(2).run(loop.run, cut.model_copy(update={"layout": "tp2"}), QUIET)[0].code == 0
    logged = [
        [line["loss"] for line in journal.read(c.folder / "metrics.jsonl") if "loss" in line] for c in (whole, cut)
    ]
    assert logged[0] == pytest.approx(logged[1], rel=1e-9) and len(logged[0]) == STEPS + 1
    folders = [written(config, tmp_path / f"peft-{config.folder.name}") for config in (whole, cut)]
    models = [plain(whole, folder) for folder in folders]
    states = [peft.get_peft_model_state_dict(model) for model in models]
    assert len(states[0]) == 16 and all(value.any() for value in states[0].values())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-7, atol=1e-9, msg=name)
    assert json.loads((folders[0] / "adapter_config.json").read_text())["base_model_name_or_path"] == whole.model.path
    assert main(["ckpt", "convert", str(whole.folder / "checkpoints"), str(tmp_path / "merged")]) == 0
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(merged(tokens).logits, models[0](tokens).logits, rtol=1e-6, atol=1e-6)
    bad = ["ckpt", "convert", str(whole.folder / "checkpoints"), str(tmp_path / "x"), "--adapters", "--dtype", "bf16"]
    assert main(bad) == 2


@pytest.mark.medium
def test_a_resume_with_another_scale_of_adapters_or_other_positions_is_refused(tmp_path: Path) -> None:
    """Both leave the shapes of all tensors as they are."""
    base(tmp_path)
    config = config_of(tmp_path / "run", "chat", evaluate={})
    assert loop.run(config, replace(QUIET, until=1)).code == 75
    other = config_of(tmp_path / "run", "chat", evaluate={}, adapter={**LORA, "alpha": 6})
    with pytest.raises(CheckpointError, match=r"IG937[\s\S]*adapters of \S+q_proj is 1\.66\d* there and 2\.0 h"):
        loop.run(other, QUIET)
    described = tmp_path / "base" / "config.json"
    described.write_text(described.read_text().replace('"rope_theta": 1', '"rope_theta": 2'))
    with pytest.raises(CheckpointError, match=r"IG937[\s\S]*rope_parameters is .* there and"):
        loop.run(config, QUIET)


@pytest.mark.medium
def test_dora_and_rslora_have_the_gradients_of_peft_and_are_exported_merged(worlds, tmp_path: Path) -> None:
    """Gradients of A, B and the rows' lengths under ZeRO 3 and stages; then peft's folder and the merged model."""
    from transformers import AutoModelForCausalLM

    from isograd.hf import export_adapters

    base(tmp_path)
    adapter = {**LORA, "dora": True, "rslora": True, "targets": ["q_proj", "down_proj"]}
    config = config_of(tmp_path / "run", "chat", adapter=adapter)
    config.folder.mkdir()
    texts.prepare(config)
    export_adapters(make_task(config, Mesh("dp1"), lambda _: None).engine, tmp_path / "start")
    described = json.loads((tmp_path / "start" / "adapter_config.json").read_text())
    assert (described["use_dora"], described["use_rslora"]) == (True, True)
    truth, _ = expected(config, tmp_path / "start")
    assert sum("lora_magnitude_vector" in name for name in truth[0][1]) == 2 * 2
    for layout in ("dp2 zero3", "pp2"):
        both = worlds(2).run(under, [config.model_copy(update={"layout": layout})], timeout=280)
        stages = [each[0][0] for each in both] if layout == "pp2" else [both[0][0][0]]
        merged = [
            (steps[0][0], {n: g for _, part in steps for n, g in part.items()}) for steps in zip(*stages, strict=True)
        ]
        is_equal(merged, truth, layout)
    assert loop.run(config, QUIET).code == 0
    assert main(["ckpt", "convert", str(config.folder / "checkpoints"), str(tmp_path / "merged")]) == 0
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    tokens, adapted = torch.arange(20)[None], plain(config, written(config, tmp_path / "peft"))
    torch.testing.assert_close(whole(tokens).logits, adapted(tokens).logits, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="takes dora without tp"):
        config_of(tmp_path / "cut", "chat", adapter=adapter, layout="tp2")


def dies(step: int, job: Any) -> None:
    """Rank 1 is killed before step 3."""
    if step == 2 and job.mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.medium
@pytest.mark.parametrize("task", few(["chat", "preference"], slow=["preference"]))
def test_adapters_of_a_run_that_was_killed_and_stopped_are_those_of_one_that_was_not(
    worlds, tmp_path: Path, task: str
) -> None:
    """A rank dies, the run goes on under tp, is stopped, and ends on one device; peft's model has the same logits."""
    from transformers import AutoModelForCausalLM

    base(tmp_path)
    pairs(tmp_path)
    few = {"sources": [{"path": str(tmp_path / "pairs.jsonl")}], "length": 70, "held_out": 0.2}
    more: dict[str, Any] = {"steps": 5, "checkpoint": {"every": 1}, **MORE[task]} | (
        {"data": few} if task == "preference" else {}
    )
    whole, cut = (config_of(tmp_path / name, task, **more) for name in ("whole", "cut"))
    assert loop.run(whole, QUIET).code == 0
    with pytest.raises(LaunchError, match="SIGKILL"):
        worlds(2).run(
            loop.run, cut.model_copy(update={"layout": "dp2 zero1"}),
            RunOptions(show="none", signals=(), before_step=dies),
        )  # fmt: skip
    again = cut.model_copy(update={"layout": "tp2"})
    assert worlds(2).run(loop.run, again, RunOptions(show="none", signals=(), until=4))[0].code == 75
    assert loop.run(cut, QUIET).code == 0
    logged = [
        {line["step"]: line["loss"] for line in journal.read(c.folder / "metrics.jsonl") if "loss" in line}
        for c in (whole, cut)
    ]
    assert logged[0].keys() == logged[1].keys() == set(range(1, 6))
    assert list(logged[1].values()) == pytest.approx(list(logged[0].values()), rel=1e-9)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        logits = [plain(whole, written(c, tmp_path / f"peft-{c.folder.name}"))(tokens).logits for c in (whole, cut)]
        before = AutoModelForCausalLM.from_pretrained(str(whole.model.path), dtype=torch.float64)(tokens).logits
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-6, atol=1e-6)
    assert (logits[0] - before).abs().max() > 1e-3


@pytest.mark.medium
def test_dropout_of_adapters_is_a_function_of_the_step(tmp_path: Path) -> None:
    base(tmp_path)
    losses = []
    for name, until in (("whole", None), ("cut", 1), ("cut", None)):
        config = config_of(tmp_path / name, "chat", adapter={**LORA, "dropout": 0.3})
        torch.manual_seed(len(losses))
        loop.run(config, RunOptions(show="none", signals=(), until=until))
        losses.append([line["loss"] for line in journal.read(config.folder / "metrics.jsonl") if "loss" in line])
    assert losses[2] == losses[0] and len(losses[0]) == STEPS + 1
    plain_run = config_of(tmp_path / "none", "chat")
    loop.run(plain_run, QUIET)
    none = [line["loss"] for line in journal.read(plain_run.folder / "metrics.jsonl") if "loss" in line]
    assert none[0] == losses[0][0] and none[1] != losses[0][1]  # B is 0 at first


@pytest.mark.medium
def test_a_class_that_the_own_decoder_does_not_know_trains_whole(worlds, tmp_path: Path) -> None:
    base(tmp_path, "starcoder2")
    model = {"path": str(tmp_path / "base"), "dtype": "fp64"}
    with pytest.raises(IsogradError, match=r"IG607[\s\S]*--model.code transformers"):
        loop.run(config_of(tmp_path / "own", "chat", adapter=None, model=model), QUIET)
    config = config_of(tmp_path / "run", "chat", adapter=None, model={**model, "code": "transformers"})
    config.folder.mkdir()
    texts.prepare(config)
    truth, _ = expected(config, tmp_path)
    ((steps, _),) = under([config])
    is_equal(steps, truth, "dp1")
    for each in worlds(2).run(under, [config.model_copy(update={"layout": "tp2 zero1"})], timeout=280):
        is_equal(each[0][0], truth, "tp2 zero1")


@pytest.mark.medium
@pytest.mark.parametrize("layout", few(["dp1", "dp2 zero3"], slow=["dp1"]))
def test_compiled_layers_of_transformers_train_as_eager_ones_do(worlds, tmp_path: Path, layout: str) -> None:
    """By inductor, in fp32: sums in another order, and nothing else."""
    from transformers import AutoModelForCausalLM

    from isograd.train.library import _blocks

    base(tmp_path)
    found = []
    for compiled in (False, True):
        model = {"path": str(tmp_path / "base"), "code": "transformers", "compile": compiled}
        config = config_of(tmp_path / f"run-{compiled}", "chat", adapter=None, model=model, layout=layout)
        ranks = 2 if "dp2" in layout else 1
        assert worlds(ranks).run(loop.run, config, QUIET, timeout=280)[0].code == 0
        found.append([line["loss"] for line in journal.read(config.folder / "metrics.jsonl") if "loss" in line])
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert list(_blocks(whole, whole.config)) == list(whole.model.layers)  # what is compiled
    assert found[1] == pytest.approx(found[0], rel=1e-5) and len(found[0]) == STEPS + 1


@pytest.mark.medium
def test_attention_is_computed_as_the_config_says_with_the_gradients_of_any_other(worlds, tmp_path: Path) -> None:
    base(tmp_path)
    model = {"path": str(tmp_path / "base"), "dtype": "fp64", "attn_implementation": "eager"}
    config = config_of(tmp_path / "run", "chat", model=model)
    config.folder.mkdir()
    texts.prepare(config)
    from isograd.hf import export_adapters

    job = make_task(config, Mesh("dp1"), lambda _: None)
    assert job.engine.model.config._attn_implementation == "eager"
    export_adapters(job.engine, tmp_path / "start")
    truth, whole = expected(config, tmp_path / "start")
    assert whole.get_base_model().config._attn_implementation == "sdpa"
    layouts = ["dp2 zero3", "tp2 sp"]
    configs = [config.model_copy(update={"layout": layout}) for layout in layouts]
    for each in worlds(2).run(under, configs, timeout=280):
        for (steps, _), layout in zip(each, layouts, strict=True):
            is_equal(steps, truth, layout)
    text = {"sources": [{"builtin": "stdlib"}], "length": 16, "packing": "stream"}
    flash = {"model": {**model, "attn_implementation": "flash_attention_2"}}
    with pytest.raises(IsogradError, match=r"IG479[\s\S]*--model\.attn_implementation sdpa"):
        library.opened(config_of(tmp_path / "flash", "language", data=text, **flash), Mesh("dp1"))
    for changes in (flash, {"model": model, "layout": "cp2"}, {"model": {**model, "code": "isograd"}, "adapter": None}):
        with pytest.raises(ValueError, match=r"attn_implementation|flash_attention_2 takes"):
            config_of(tmp_path / "other", "chat", **changes)


def test_positions_begin_again_with_each_document() -> None:
    found = positions(torch.tensor([[0, 0, 1, 1, 1], [2, 3, 3, 5, 5]]))
    assert found.tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 0, 1]]


def test_a_class_whose_documents_see_each_other_is_refused() -> None:
    from transformers import MambaConfig, Qwen2Config

    refuse_packing(Qwen2Config(**SHAPE), Mesh("dp1"))
    small = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(IsogradError, match="IG477"):
        refuse_packing(small, Mesh("dp1"))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"preset": "quickstart"}}, {"model": {"path": "x", "code": "isograd"}},
        {"model": {"path": "x", "options": {"hidden": 3}}}, {"optimizer": {"lr": 0.1, "name": "muon"}},
        {"task": "preference", "layout": "pp2"}, {"adapter": {"targets": []}}, {"adapter": {"rank": 0}},
        {"model": {"path": "x", "recompute": "offload"}}, {"layout": "tp2", "model": {"path": "x", "recompute": True}},
    ],
)  # fmt: skip
def test_what_does_not_belong_to_a_model_of_transformers_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"takes|trains|at least one|greater than 0"):
        config_of(tmp_path / "run", **{"task": "chat", **changes})


def test_commands_for_the_own_decoder_refuse_and_a_folders_config_decides_its_references(
    tmp_path: Path, capsys: Any
) -> None:
    folder = base(tmp_path)
    config = config_of(tmp_path / "run", "preference")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    for words in (["plan", str(file)], ["rehearse", str(file)], ["verify", str(file)]):
        assert main(words) == 2
        assert "IG643" in capsys.readouterr().err
    before = preference.key_of(config, "pairs")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "rms_norm_eps": 1e-3}))
    assert preference.key_of(config, "pairs") != before
