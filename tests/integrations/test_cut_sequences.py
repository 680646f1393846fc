"""Sequences cut over cp, models cut over tp and ep, in other libraries' own loops: gradients by name, in fp64, those of
transformers on one device.

Labels are uneven, rows end in padding, the length does not divide, and a step has one or three micro-batches.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isograd as ig
from isograd.comm import world
from isograd.errors import IntegrationError, IsogradError
from isograd.hf.force_fp64 import ForceFP64
from isograd.integrations.world import layout_of_parallelism

from .toys import arguments
from .worlds import as_torchrun_starts_it

pytest.importorskip("accelerate")
VOCAB, LENGTH = 61, 11


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Each row has labels only behind a prompt of random length, and ends in padding; one has none in half of it."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
        prompt = torch.randint(LENGTH - 3, (rows, 1), generator=generator)
        ends = LENGTH - torch.arange(rows)[:, None] % 3
        self.mask = (torch.arange(LENGTH) < ends).long()
        self.labels = self.text.masked_fill((torch.arange(LENGTH) < prompt) | (self.mask == 0), -100)
        self.labels[0, (LENGTH + 1) // 2 + 1 :] = -100  # no label in the second of two parts

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.text[row], "attention_mask": self.mask[row], "labels": self.labels[row]}


def model(kind: str = "llama") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "qwen3_moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 6}
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, intermediate_size=31, **shape)
    config._experts_implementation = "eager"  # grouped products have no fp64
    return AutoModelForCausalLM.from_config(config).double()


@lru_cache
def one_device(rows: int, kind: str = "llama") -> dict[str, Tensor]:
    """transformers alone: gradients of the mean over all labels of so many rows, and the evaluated loss."""
    whole = model(kind)
    batch = torch.utils.data.default_collate([Rows(rows)[row] for row in range(rows)])
    count = (batch["labels"][:, 1:] != -100).sum()
    with ForceFP64():
        loss = whole(**batch, num_items_in_batch=count, use_cache=False).loss
        loss.backward()
    return {n: p.grad.clone() for n, p in whole.named_parameters()} | {"loss": loss.detach()}


def same(found: dict[str, Tensor], rows: int, kind: str = "llama") -> None:
    for name, true in one_device(rows, kind).items():
        error = (found[name].double() - true).abs().max() / true.abs().max()
        assert float(error) < 1e-9, (name, float(error))


def by_the_trainer(
    layout: str | None, accumulation: int, parallelism: dict[str, Any] | None = None, source: str | None = None
) -> dict[str, Any]:
    """One step of the Trainer's own loop: gradients by name, as a callback sees them; a model that it saves."""
    from transformers import Trainer, TrainerCallback

    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as folder:
        kind = ig.integrations.trainer(Trainer, layout)
        more: dict[str, Any] = {}
        if parallelism is not None:
            from accelerate.parallelism_config import ParallelismConfig

            more["parallelism_config"] = ParallelismConfig(**parallelism)
        options = arguments(
            folder, 1, 1, max_steps=1, gradient_accumulation_steps=accumulation, max_grad_norm=0.0, seed=1, **more
        )
        seen: dict[str, Any] = {}

        class Looks(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                seen.update({name: g.clone() for name, g in found.engine.grads().items()})

        ranks = world.world()[1]
        shared = 2 if parallelism else 2 ** sum(axis in str(layout) for axis in ("cp2", "tp2", "pp2"))
        data = ranks // shared if ranks > 1 else 1
        given = model() if source is None else ig.hf.load(source, ig.Mesh(layout), prove=False, dtype=torch.float64)
        given.config._experts_implementation = "eager"
        found = kind(given, options, train_dataset=Rows(data * accumulation), eval_dataset=Rows(4),
                     callbacks=[Looks()])  # fmt: skip
        with ForceFP64():
            found.train()
        seen |= {"layout": str(found.mesh.layout), "data": found.mesh.size("dp")}
        seen["loss"] = torch.tensor(found.state.log_history[0]["loss"])
        seen["rows"] = found.get_total_train_batch_size(found.args)
        seen["evaluated"] = found.evaluate()["eval_loss"]
        saved = f"{source or folder}/saved"
        found.save_model(saved)
        assert found.mesh.rank or "isograd" not in Path(saved, "config.json").read_text()
        return seen


@pytest.mark.parametrize(
    "ranks, cases",
    [
        (2, [("cp2 ulysses zero1", 1), ("cp2 ring zero3", 3)]),
        pytest.param(4, [("dp2 cp2 ulysses zero2", 3), ("cp2 ring", 1)], marks=pytest.mark.slow),
    ],
)
def test_the_trainers_loop_has_the_gradients_of_one_device_under_cp(worlds, ranks: int, cases: Any) -> None:
    for layout, accumulation in cases:
        rows = ranks // 2 * accumulation
        for found in worlds(ranks).run(by_the_trainer, layout, accumulation):
            assert found["rows"] == rows
            if found["data"] == 1:  # one batch of four rows
                assert found["evaluated"] == pytest.approx(float(one_device(4)["loss"]), rel=1e-4)
            found["loss"] = one_device(rows)["loss"]  # the Trainer logs fp32
            same(found, rows)


@pytest.mark.parametrize(
    "ranks, layout",
    [(2, "tp2 zero1"), pytest.param(4, "dp2 tp2 sp zero3", marks=pytest.mark.slow)],
)
def test_the_trainers_loop_has_the_gradients_of_one_device_under_tp(
    worlds, tmp_path: Path, ranks: int, layout: str
) -> None:
    model().save_pretrained(tmp_path)
    rows = ranks // 2 * 3
    for source in (None, str(tmp_path)):
        for found in worlds(ranks).run(by_the_trainer, layout, 3, None, source):
            found["loss"] = one_device(rows)["loss"]
            same(found, rows)
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert all(p.shape == q.shape for p, q in zip(saved.parameters(), model().parameters(), strict=True))


def classifier(adapter: bool) -> Any:
    """A decoder with three scores for each row; with an adapter in it, or without."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    config = model().config
    config.num_labels, config.pad_token_id = 3, VOCAB  # no token of a row
    torch.manual_seed(2)
    config.vocab_size = VOCAB + 1
    whole = AutoModelForSequenceClassification.from_config(config)
    if adapter:
        parts = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        whole = get_peft_model(whole, parts)
    return whole.double()


def classes(rows: int) -> list[dict[str, Tensor]]:
    """Rows of other lengths, and a class of each; the second has none."""
    given = Rows(rows)
    text = given.text.masked_fill(given.mask == 0, VOCAB)
    label = torch.arange(rows) % 3
    label[1] = -100
    return [{"input_ids": text[n], "attention_mask": given.mask[n], "labels": label[n]} for n in range(rows)]


def classified(layout: str, accumulation: int, adapter: bool) -> dict[str, Any]:
    """One step of the Trainer's own loop: gradients by name; and an evaluated loss."""
    from transformers import Trainer, TrainerCallback

    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as folder:
        options = arguments(folder, 2, 1, max_steps=1, gradient_accumulation_steps=accumulation, max_grad_norm=0.0)
        seen: dict[str, Any] = {}

        class Looks(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                seen.update({name: g.clone() for name, g in found.engine.grads().items()})

        options.learning_rate, rows = 0.0, 2 * accumulation * (2 if "dp2" in layout else 1)
        kind = ig.integrations.trainer(Trainer, layout)
        found = kind(classifier(adapter), options, train_dataset=classes(rows), eval_dataset=classes(rows),
                     callbacks=[Looks()])  # fmt: skip
        with ForceFP64():
            found.train()
            seen["evaluated"] = found.evaluate()["eval_loss"]
        return seen


@pytest.mark.parametrize(
    ("ranks", "layout", "accumulation", "adapter"),
    [
        (2, "cp2 ulysses zero1", 1, False),
        (2, "cp2 ring zero3", 3, False),
        (2, "cp2 ring", 3, True),
        (2, "tp2 zero1", 3, False),
        pytest.param(4, "dp2 cp2 ulysses zero2", 3, False, marks=pytest.mark.slow),
        pytest.param(4, "cp2 ring tp2", 1, False, marks=pytest.mark.slow),
    ],
)
def test_a_classifier_of_rows_has_the_gradients_of_one_device(
    worlds, ranks: int, layout: str, accumulation: int, adapter: bool
) -> None:
    rows = 2 * accumulation * (2 if "dp2" in layout else 1)
    whole, batch = classifier(adapter), torch.utils.data.default_collate(classes(rows))
    with ForceFP64():
        loss = whole(**batch, use_cache=False).loss
        loss.backward()
    for found in worlds(ranks).run(classified, layout, accumulation, adapter):
        assert adapter or accumulation > 1 or found["evaluated"] == pytest.approx(float(loss), rel=1e-5)
        for name, parameter in whole.named_parameters():
            if parameter.requires_grad:
                error = (found[name].double() - parameter.grad).abs().max() / parameter.grad.abs().max()
                assert float(error) < 1e-9, (name, float(error))


def told(kind: str, layout: str) -> tuple[str, str]:
    """What a Trainer of a classifier says of a layout: its error's code, and its fix."""
    from transformers import GPT2Config, GPT2ForSequenceClassification, Trainer

    shape = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2, "num_labels": 3, "pad_token_id": VOCAB}
    torch.manual_seed(0)
    plain = GPT2ForSequenceClassification(GPT2Config(vocab_size=VOCAB + 1, **shape))
    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as folder:
        whole, data = classifier(True).float() if kind == "adapter" else plain, classes(8)
        try:
            made = ig.integrations.trainer(Trainer, layout)
            made(whole, arguments(folder, 2, 1, max_steps=1), train_dataset=data).train()
        except IsogradError as error:
            return f"{error.code} {error.what}", error.fix or ""
        return "trained", ""


@pytest.mark.parametrize(
    ("kind", "code"),
    [("adapter", "IG440: this PeftModelForSequenceClassification"), ("gpt2", "IG463: GPT2ForSequenceClassification")],
)
def test_a_classifier_that_is_not_cut_names_itself_and_a_layout_that_trains_it(worlds, kind: str, code: str) -> None:
    for said, fix in worlds(2).run(told, kind, "tp2"):
        assert said.startswith(code[:5]) and code[7:] in said, said
        layout = fix.split("'")[1]
    assert worlds(2).run(told, kind, layout) == [("trained", "")] * 2


def scored(loop: str, layout: str, accumulation: int) -> dict[str, Any]:
    """One step of a loop of accelerate's, Fabric's or DeepSpeed's documentation: gradients by name, and the loss."""
    with as_torchrun_starts_it():
        whole, seen = classifier(False), dict[str, Any]()
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.0)
        loader = torch.utils.data.DataLoader(classes(2 * accumulation), batch_size=2)  # type: ignore[arg-type]
        if loop == "accelerate":
            over = ig.integrations.Accelerator(cpu=True, gradient_accumulation_steps=accumulation, layout=layout)
            prepared, optimizer, loader = over.prepare(whole, optimizer, loader)
            backward, syncs, engine = over.backward, lambda _: over.accumulate(prepared), over.engine
        elif loop == "fabric":
            from lightning.fabric import Fabric

            ranks = world.world()[1]
            fabric = Fabric(accelerator="cpu", devices=ranks, strategy=ig.integrations.FabricStrategy(layout))
            fabric.launch()
            prepared, optimizer = fabric.setup(whole, optimizer)
            backward, engine = fabric.backward, fabric.strategy.engine
            syncs = lambda last: fabric.no_backward_sync(prepared, enabled=not last)  # noqa: E731
        else:
            config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation}
            prepared, *_ = ig.integrations.deepspeed.initialize(
                model=whole, optimizer=optimizer, config=config, layout=layout
            )
            backward, syncs, engine = prepared.backward, lambda _: nullcontext(), prepared.engine
        with ForceFP64():
            for number, batch in enumerate(loader):
                with syncs(last := number + 1 == accumulation):
                    backward(prepared(**batch).loss)
                    if last:
                        seen |= {name: gradient.clone() for name, gradient in engine.grads().items()}
                        (prepared if loop == "deepspeed" else optimizer).step()
            with torch.no_grad():
                seen["evaluated"] = prepared(**batch).loss
        return seen


@pytest.mark.parametrize("loop", ["accelerate", "fabric", "deepspeed"])
@pytest.mark.parametrize(
    ("layout", "accumulation"), [("cp2 ulysses zero1", 3), ("cp2 ring zero3", 1), ("tp2 zero1", 3)]
)
def test_a_classifier_of_rows_has_them_in_the_other_loops(worlds, loop: str, layout: str, accumulation: int) -> None:
    if loop == "fabric":
        pytest.importorskip("lightning")
    whole, rows = classifier(False), classes(2 * accumulation)
    with ForceFP64():
        whole(**torch.utils.data.default_collate(rows), use_cache=False).loss.backward()
        held_out = float(whole(**torch.utils.data.default_collate(rows[-2:])).loss.detach())
    for found in worlds(2).run(scored, loop, f"dp1 {layout}", accumulation):
        assert float(found.pop("evaluated")) == pytest.approx(held_out, rel=1e-9)
        assert found.keys() == {name for name, _ in whole.named_parameters()}
        for name, parameter in whole.named_parameters():
            error = (found[name].double() - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert float(error) < 1e-9, (name, float(error))


@pytest.mark.parametrize(
    ("ranks", "layout", "accumulation"),
    [
        (2, "pp2 1f1b", 3),
        (2, "pp2 zb zero1", 1),
        pytest.param(4, "dp2 pp2 1f1b zero2", 3, marks=pytest.mark.slow),
        pytest.param(4, "tp2 sp pp2 1f1b", 3, marks=pytest.mark.slow),
    ],
)
def test_the_trainers_loop_has_the_gradients_of_one_device_under_pp(
    worlds, tmp_path: Path, ranks: int, layout: str, accumulation: int
) -> None:
    model().save_pretrained(tmp_path)
    for source in (None, str(tmp_path)):
        found = worlds(ranks).run(by_the_trainer, layout, accumulation, None, source)
        rows = found[0]["rows"]
        assert rows == (2 if "dp2" in layout else 1) * accumulation
        whole = {name: value for each in found for name, value in each.items()}  # each has those of its stage
        whole["loss"] = one_device(rows)["loss"]
        same(whole, rows)
        if "dp2" not in layout:
            assert whole["evaluated"] == pytest.approx(float(one_device(4)["loss"]), rel=1e-2)  # behind a step


@pytest.mark.parametrize(
    ("sizes", "layout", "here"),
    [({"sp_size": 2}, "zero2", "cp2 ulysses zero2"), ({"cp_size": 2}, None, "cp2 ring zero3")],
)
def test_a_parallelism_config_of_accelerate_says_the_layout(worlds, sizes: Any, layout: str | None, here: str) -> None:
    for found in worlds(2).run(by_the_trainer, layout, 3, sizes):
        assert found["layout"] == here
        found["loss"] = one_device(3)["loss"]
        same(found, 3)


@pytest.mark.parametrize(
    ("sizes", "layout", "words"),
    [
        ({"dp_shard_size": 4, "sp_size": 2}, None, "dp4 cp2 ulysses zero3"),
        ({"dp_replicate_size": 4, "sp_size": 2}, "zero1", "dp4 cp2 ulysses zero1"),
        ({"dp_shard_size": 2, "tp_size": 2}, "zero0", "dp2 tp2 zero0"),
    ],
)
def test_sizes_become_axes(sizes: Any, layout: str | None, words: str) -> None:
    from accelerate.parallelism_config import ParallelismConfig

    assert layout_of_parallelism(ParallelismConfig(**sizes), layout) == words
    for wrong in ({"dp_replicate_size": 2, "dp_shard_size": 2}, {"dp_shard_size": 2}):
        with pytest.raises(IntegrationError, match="IG855"):
            layout_of_parallelism(ParallelismConfig(**wrong), "dp2" if len(wrong) == 1 else None)


def by_accelerate(
    accumulation: int, sizes: dict[str, int] | None, layout: str = "cp2 ring", source: str | None = None
) -> dict[str, Any]:
    """A loop of accelerate's documentation, without a weight. `source`: the folder of a model that tp cuts."""
    with as_torchrun_starts_it():
        from accelerate.parallelism_config import ParallelismConfig

        given: dict[str, Any] = {"layout": layout} if sizes is None else {}
        given |= {} if sizes is None else {"parallelism_config": ParallelismConfig(**sizes)}
        accelerator = ig.integrations.Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **given)
        rows = accelerator._mesh.size("dp") * accumulation
        whole = ig.hf.load(source, accelerator._mesh, dtype=torch.float64) if source else model()
        whole.config._experts_implementation = "eager"
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(Rows(rows), batch_size=1)
        prepared, optimizer, loader = accelerator.prepare(whole, optimizer, loader)
        seen: dict[str, Any] = {"codes": []}
        with ForceFP64():
            for batch in loader:
                with accelerator.accumulate(prepared):
                    loss = prepared(**batch).loss
                    if accelerator._cut_models.shares_rows:
                        try:
                            accelerator.backward(loss, weight=3)
                        except IsogradError as error:
                            seen["codes"].append(error.code)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and accelerator._by_engine:
                        seen |= accelerator._trained[0].engine.grads()
                    elif accelerator.sync_gradients:
                        seen |= {name: p.grad.clone() for name, p in whole.named_parameters()}
                    optimizer.step()
                    optimizer.zero_grad()
        return seen


@pytest.mark.parametrize(
    "ranks, accumulation, sizes",
    [(2, 1, {"sp_size": 2}), (2, 3, None), pytest.param(4, 3, {"sp_size": 2}, marks=pytest.mark.slow)],
)
def test_a_loop_of_accelerate_has_the_gradients_of_one_device_under_cp(
    worlds, ranks: int, accumulation: int, sizes: Any
) -> None:
    rows = ranks // 2 * accumulation
    for found in worlds(ranks).run(by_accelerate, accumulation, sizes):
        assert found["codes"] == ["IG861"] * accumulation
        found["loss"] = one_device(rows)["loss"]
        same(found, rows)


@pytest.mark.parametrize("layout", ["dp1 cp2 ulysses zero1", "dp1 cp2 ring zero3", "dp1 tp2", "dp1 tp2 sp zero3"])
def test_a_loop_of_accelerate_has_them_under_zero_stages_and_tp(worlds, tmp_path: Any, layout: str) -> None:
    sources = [None]
    if "tp" in layout:  # one that is loaded, and one that is built and cut in place
        sources.append(str(tmp_path))
        model().save_pretrained(tmp_path)
    for source in sources:
        for found in worlds(2).run(by_accelerate, 2, None, layout, source):
            assert found["codes"] == ["IG861"] * 2
            found["loss"] = one_device(2)["loss"]
            same(found, 2)


@pytest.mark.parametrize("ranks, layout", [(2, "dp2 ep2"), (2, "dp2 ep2 zero3"), (4, "dp2 tp2 ep4 zero1")])
def test_loops_have_the_gradients_of_one_device_under_ep(worlds, tmp_path: Path, ranks: int, layout: str) -> None:
    source = str(tmp_path)
    model("qwen3_moe").save_pretrained(source)
    for found in worlds(ranks).run(by_accelerate, 3, None, layout, source):
        found["loss"] = one_device(6, "qwen3_moe")["loss"]
        same(found, 6, "qwen3_moe")
    for found in worlds(ranks).run(by_the_trainer, layout, 3, None, source):
        found["loss"] = one_device(6, "qwen3_moe")["loss"]
        same(found, 6, "qwen3_moe")
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert {n: p.shape for n, p in saved.named_parameters()} == {
        n: p.shape for n, p in model("qwen3_moe").named_parameters()
    }


def saved_by_accelerate(layout: str, source: str, folder: str) -> dict[str, Any]:
    """What the loop writes, and what it goes on with when it has read it again."""
    with as_torchrun_starts_it():
        accelerator = ig.integrations.Accelerator(cpu=True, layout=layout)
        prepared = ig.hf.load(source, accelerator._mesh, dtype=torch.float64, prove=False)
        prepared, _ = accelerator.prepare(prepared, torch.optim.SGD(prepared.parameters(), lr=0.1))
        accelerator.save_state(folder)
        accelerator.save_model(prepared, f"{folder}/model")
        before = accelerator.get_state_dict(prepared)
        with accelerator.engine.full_parameters(), torch.no_grad():
            for parameter in prepared.parameters():
                parameter.zero_()
        accelerator.load_state(folder)
        after = accelerator.get_state_dict(prepared)
        return {"before": before, "after": after}


@pytest.mark.parametrize("layout", ["dp2 ep2 zero3", "dp1 tp2", "dp1 tp2 zero3"])
def test_what_accelerate_writes_of_a_model_that_is_cut_is_whole(worlds, tmp_path: Path, layout: str) -> None:
    from safetensors.torch import load_file

    source, folder = str(tmp_path / "source"), str(tmp_path / "saved")
    whole = model("qwen3_moe")
    whole.save_pretrained(source)
    found = worlds(2).run(saved_by_accelerate, layout, source, folder)
    written = load_file(tmp_path / "saved" / "model" / "model.safetensors")
    for name, value in whole.state_dict().items():
        assert all(torch.equal(one[when][name], value) for one in found for when in ("before", "after")), name
        assert torch.equal(written[name], value), name


def by_a_second_accelerator(layout: str, source: str | None) -> dict[str, Any]:
    """The gradients of a model that another accelerator has prepared before."""
    with as_torchrun_starts_it():
        whole: Any = None
        for _ in range(2):
            accelerator = ig.integrations.Accelerator(cpu=True, layout=layout)
            mesh = accelerator._mesh
            whole = whole or (ig.hf.load(source, mesh, dtype=torch.float64) if source else model())
            loader = torch.utils.data.DataLoader(Rows(1), batch_size=1)
            optimizer = torch.optim.SGD(whole.parameters(), lr=0.0)
            prepared, optimizer, loader = accelerator.prepare(whole, optimizer, loader)
            with ForceFP64():
                for batch in loader:
                    accelerator.backward(prepared(**batch).loss)
            found = dict(accelerator.engine.grads().items())
            optimizer.step()
        return found


@pytest.mark.parametrize("layout", ["dp1 cp2 ring zero1", "dp1 tp2"])
def test_a_model_that_another_accelerator_has_prepared_has_them_too(worlds, tmp_path: Any, layout: str) -> None:
    source = None
    if "tp" in layout:
        source = str(tmp_path)
        model().save_pretrained(source)
    for found in worlds(2).run(by_a_second_accelerator, layout, source):
        same(found | {"loss": one_device(1)["loss"]}, 1)


def refused() -> dict[str, str]:
    """What under cp cannot be right: the words of each refusal."""
    from transformers import Trainer

    class Own(Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    said = {}
    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as folder:
        cases = {
            "compute_loss_func": (Trainer, {}, {"compute_loss_func": lambda *_, **__: None}),
            "Own.compute_loss": (Own, {}, {}),
            "label_smoothing_factor": (Trainer, {"label_smoothing_factor": 0.1}, {}),
            "compute_metrics": (Trainer, {}, {"compute_metrics": lambda _: {}}),
        }
        for what, (kind, options, more) in cases.items():
            try:
                ig.integrations.trainer(kind, "cp2 ring")(model(), arguments(folder, 1, 1, **options), **more)
            except IsogradError as error:
                said[what] = f"{error.code} {error.seen}"
        unlike = model()
        with torch.no_grad():
            unlike.lm_head.weight += world.world()[0]
        for what, given in (("unlike", unlike), ("foreign", torch.nn.Linear(2, 2))):
            try:
                ig.integrations.trainer(Trainer, "tp2")(given, arguments(folder, 1, 1))
            except IsogradError as error:
                said[what] = f"{error.code} {error.seen}"
    return said


def gathered(_: int) -> Tensor:
    with as_torchrun_starts_it():
        from isograd.integrations.shared_rows import gather_data_ranks

        return gather_data_ranks(torch.ones(2, requires_grad=True).unbind()[0], ig.Mesh("dp2")).detach()


def test_a_loss_with_a_graph_is_gathered_from_data_ranks(worlds) -> None:
    for found in worlds(2).run(gathered, 0):
        assert torch.equal(found, torch.ones(2))


def test_what_would_shift_labels_of_a_part_is_refused_by_name(worlds) -> None:
    for rank, said in enumerate(worlds(2).run(refused)):
        assert said.pop("unlike") == f"IG440 ['lm_head.weight'] of rank {1 - rank} are not those of rank {rank}"
        assert said.pop("foreign").startswith("IG440 ")
        assert len(said) == 4 and all(text.startswith("IG856 cp with ") and what in text for what, text in said.items())


def test_the_page_has_the_words_of_other_libraries() -> None:
    from isograd.core.layout import ELSEWHERE

    page = (Path(__file__).parents[2] / "docs" / "how-to" / "words.md").read_text()
    for names, here in ELSEWHERE.items():
        assert f"| {', '.join(f'`{name}`' for name in names.split())} | `{here.format(n='N')}` |" in page
