"""Configs of Megatron-LM, GPT-NeoX and accelerate become configs that a run reads; every key of them has a fate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import isograd
from isograd.cli.main import main
from isograd.errors import IntegrationError
from isograd.integrations import accelerate_config, megatron_config
from isograd.integrations.config_from import read
from isograd.io import yaml_reader
from isograd.train.reading import load

SCRIPT = """#!/bin/bash
# it's a comment; --with-flags
export CUDA_DEVICE_MAX_CONNECTIONS=1
SAVE=${1:-"checkpoints/8b"}
GPUS=8
TP=4; PP=2
WORLD=(--nproc_per_node $GPUS --nnodes 4 --master_addr localhost)
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0.0
)
TRAIN=" --micro-batch-size 1 --global-batch-size 128 \\
  --train-iters 5000 --lr 3e-4 --min-lr 3.0e-5 --lr-decay-style cosine --lr-warmup-fraction .01 \\
  --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --bf16"
torchrun ${WORLD[@]} pretrain_gpt.py "${MODEL[@]}" $TRAIN \\
   --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} --sequence-parallel \\
   --use-distributed-optimizer --tokenizer-type NullTokenizer --vocab-size 128256 --overlap-grad-reduce \\
   --recompute-granularity full --data-path 0.3 a 0.7 b --split 99,1,0 --save $SAVE --log-interval $EVERY
"""
NEOX = {
    "pipe-parallel-size": 0, "model-parallel-size": 4, "sequence-parallel": True, "num-layers": 44,
    "hidden-size": 6144, "num-attention-heads": 64, "seq-length": 2048, "max-position-embeddings": 2048,
    "norm": "layernorm", "pos-emb": "rotary", "rotary-pct": 0.25, "no-weight-tying": True, "gpt-j-residual": True,
    "optimizer": {"type": "Adam", "params": {"lr": 9.7e-5, "betas": [0.9, 0.95], "eps": 1e-8}}, "min_lr": 9.7e-6,
    "zero_optimization": {"stage": 1, "overlap_comm": True}, "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 48, "weight-decay": 0.01, "gradient_clipping": 1.0, "train-iters": 150000,
    "lr-decay-iters": 150000, "lr-decay-style": "cosine", "warmup": 0.01, "precision": "bfloat16",
    "checkpoint-activations": True, "checkpoint-factor": 500, "init_method": "small_init", "vocab-file": "20B.json",
}  # fmt: skip
FSDP = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_activation_checkpointing": True},
    "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2,
                           "parallelism_config_sp_size": 2},
}  # fmt: skip


def recipe(name: str) -> Any:
    return yaml_reader.parse((Path(isograd.__file__).parent / "recipes" / f"{name}.yaml").read_text())


def fates(rows: list[Any]) -> dict[str, str]:
    return {row.key: row.fate for row in rows}


def test_a_script_of_megatron_becomes_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, file = tmp_path / "train.sh", tmp_path / "run.yaml"
    source.write_text(SCRIPT)
    assert main(["config", "from", str(source), str(file)]) == 0
    config = load(file).config
    assert (config.layout, config.batch, config.micro_batches) == ("dp4 tp4 sp pp2 zero1", 128, 32)
    assert (config.steps, config.model.dtype, config.model.recompute, config.run) == (
        5000,
        "bf16",
        True,
        "checkpoints/8b",
    )
    made = config.optimizer
    assert (made.lr, made.min_lr, made.warmup, made.schedule) == (3e-4, 3e-5, 50, "cosine")
    assert (made.betas, made.weight_decay, made.clip) == ((0.9, 0.95), 0.1, 1.0)
    llama = recipe("llama-8b")["model"]["options"]
    assert {name: config.model.options[name] for name in llama} == llama
    shown = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    open_ = {words[1] for words in shown if words[:1] == ["open"]}
    assert open_ == {"log_interval", "tokenizer_type", "data_path", "split"}  # EVERY is set nowhere
    assert main(["config", "from", str(source), str(file)]) == 2  # never overwritten


def test_a_file_of_neox_becomes_the_recipe_of_its_issue() -> None:
    config, rows = megatron_config.convert(NEOX, 32, neox=True)
    known = recipe("neox-20b")
    options = known["model"]["options"] | {"vocab": 50304}  # the tokenizer's, which no config of NeoX has
    assert {name: config["model"]["options"][name] for name in options} == options
    assert config["model"]["dtype"] == "bf16"
    for part in ("layout", "steps", "batch", "micro_batches"):
        assert config[part] == known[part], part
    assert {name: config["optimizer"][name] for name in known["optimizer"]} == known["optimizer"]
    assert "refused" not in fates(rows).values()
    assert fates(rows)["init_method"] == "open"


def test_feed_forward_sizes_are_those_of_each_program() -> None:
    neox = {"num_layers": 2, "hidden_size": 4096, "num_attention_heads": 32}
    llama = {"activation": "swiglu", "intermediate_size": 32768, "mlp_multiple_of": 256}
    assert megatron_config.convert(neox | llama, 1, neox=True)[0]["model"]["options"]["mlp"] == 11008
    assert megatron_config.convert(neox, 1, neox=True)[0]["model"]["options"]["mlp"] == 16384
    megatron = megatron_config.convert(neox | {"swiglu": True}, 1)[0]["model"]["options"]
    assert (megatron["mlp"], megatron["activation"], megatron["gated"]) == (10880, "silu", True)
    usual = megatron_config.convert(neox, 1)[0]["model"]["options"]
    assert (usual["activation"], usual["positions"], usual["norm"], usual["tied"]) == (
        "gelu_tanh",
        "learned",
        "layer",
        True,
    )
    assert (usual["dropout"], usual["qkv_bias"], usual["mlp_bias"]) == (0.1, True, True)


def test_experts_and_virtual_stages_of_megatron() -> None:
    words = (
        "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 4 --context-parallel-size 2 "
        "--cp-comm-type a2a --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --use-distributed-optimizer"
    )
    config, rows = megatron_config.convert(megatron_config.arguments_of(words), 16)
    assert config["layout"] == "dp4 cp2 ulysses pp2 vpp2 ep4 zero1"
    experts = config["model"]["options"]["experts"]
    assert (experts["number"], experts["per_token"], experts["width"], experts["balance"]) == (8, 2, 32, "batch")
    assert "refused" not in fates(rows).values()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--fp8-format hybrid", "fp8_format"),
        ("--rampup-batch-size 16 16 100", "rampup_batch_size"),
        ("--squared-relu", "squared_relu"),
        ("--train-iters 100 --lr-decay-iters 50", "lr_decay_iters"),
        ("--weight-decay 0.1 --end-weight-decay 0.2", "end_weight_decay"),
        ("--optimizer sgd", "optimizer"),
        ("--micro-batch-size 3 --global-batch-size 8", "global_batch_size"),
        ("--lr-decay-style WSD --lr-wsd-decay-style exponential", "lr_wsd_decay_style"),
        ("--tensor-model-parallel-size two", "tensor_model_parallel_size"),
        ("--wandb-exp-name run#3 --squared-relu", "squared_relu"),  # a # within a word begins no comment
        ("--tensorboard-dir ${SAVE##*/} --squared-relu", "squared_relu"),
        ("(--bf16 \\\n # --fp16 \\\n --squared-relu)", "squared_relu"),  # and one ends with its line
        ("--bf16 # \"it's a comment\n--squared-relu", "squared_relu"),
    ],
)
def test_what_would_train_otherwise_is_refused_by_name(words: str, key: str) -> None:
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    rows = megatron_config.convert(megatron_config.arguments_of(model + words), 1)[1]
    assert [row.key for row in rows if row.fate == "refused"] == [key]


def test_an_unknown_argument_has_its_nearest_name_and_nothing_is_written(tmp_path: Path, capsys) -> None:
    source, file = tmp_path / "args.txt", tmp_path / "run.yaml"
    source.write_text("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --adam-beta3 0.9\n")
    assert main(["config", "from", str(source), str(file)]) == 2
    assert "did you mean 'adam_beta" in capsys.readouterr().out
    assert not file.exists()


@pytest.mark.parametrize("text", ["--a 'b", "--num-layers 2", "# nothing --at-all"])
def test_scripts_without_a_model_are_refused(text: str) -> None:
    with pytest.raises(IntegrationError, match="IG863"):
        megatron_config.convert(megatron_config.arguments_of(text), 1)


def test_a_variable_of_itself_is_what_the_script_adds() -> None:
    for text in ('A="$A --bf16"\nprogram $A', 'A="$B --bf16"\nB="$A --fp16"\nprogram $B'):
        assert megatron_config.arguments_of(text)["bf16"] is True


@pytest.mark.parametrize(("kinds", "fate"), [("flash", "taken"), ("global", "taken"), ("local", "refused")])
def test_an_attention_that_is_not_full_is_refused(kinds: str, fate: str) -> None:
    found = megatron_config.convert(NEOX | {"attention-config": [[[kinds], "all"]]}, 96, neox=True)[1]
    assert fates(found)["attention_config"] == fate


@pytest.mark.parametrize(
    "text",
    [
        "train_batch_size: 8\non: 1\n",
        "train_batch_size: 8\nzero_optimization: {on: 1}\n",
        "distributed_type: FSDP\nfsdp_config: {3: 4}\n",
        "num_layers: 2\nhidden_size: 8\nnum_attention_heads: 1\n1: 2\n",
    ],
)
def test_keys_that_are_no_words_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    assert main(["config", "from", str(tmp_path / "odd.yaml"), str(tmp_path / "run.yaml")]) == 2
    assert capsys.readouterr().out.startswith("refused")


@pytest.mark.parametrize("text", ["A=$A$A$A\n" * 60, ("A=" + "$A" * 20 + "\n") * 6, "--lr " + "$A" * 300_000])
def test_variables_of_a_script_grow_up_to_a_limit(text: str) -> None:
    with pytest.raises(IntegrationError, match="IG863: variables that grow"):
        megatron_config.arguments_of("A=aaaa\n" + text)


def test_yaml_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    for text, line in (("{a: " * 20_000, 1), ("a: 1\nb: [", 2)):
        (tmp_path / "deep.yaml").write_text(text)
        with pytest.raises(IntegrationError, match=rf"IG863: no file of YAML\n  seen:     .*deep.yaml:{line}:"):
            read(str(tmp_path / "deep.yaml"), None)


def test_a_script_is_never_run(tmp_path: Path) -> None:
    text = (
        f'X=$(touch {tmp_path}/made)\n`touch {tmp_path}/made`\n--num-layers "$(touch {tmp_path}/made)" --hidden-size $X'
    )
    megatron_config.arguments_of(text)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("program", "fate"), [("pretrain_bert.py", "refused"), ("$HERE/pretrain_gpt.py", None), ("# pretrain_t5.py", None)]
)
def test_a_program_of_another_model_is_refused(program: str, fate: str | None) -> None:
    """BERT's became a causal decoder."""
    words = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8"
    text = f"torchrun --nproc-per-node 2 {program}\\\n {words} --global-batch-size 4 --train-iters 3 --lr 0.1"
    text = text if program[0] != "#" else f"{program}\ntorchrun pretrain_gpt.py {words} --nproc-per-node 2"
    _, rows = megatron_config.convert(megatron_config.arguments_of(text), 2)
    assert fates(rows).get("program") == fate


def test_each_key_of_accelerates_sections_is_named_and_micro_batches_are_taken() -> None:
    sizes = FSDP["parallelism_config"] | {"parallelism_config_sp_backend": "deepspeed"}
    found = fates(accelerate_config.convert(FSDP | {"parallelism_config": sizes}, None)[1])
    assert found["parallelism_config.parallelism_config_sp_backend"] == "meaningless"
    words = {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2, "megatron_lm_num_micro_batches": 3}
    config, _ = accelerate_config.convert({"num_processes": 8, "megatron_lm_config": words}, None)
    assert (config["layout"], config["batch"], config["micro_batches"]) == ("dp2 tp2 pp2", 6, 3)


def test_files_of_accelerate() -> None:
    config, rows = accelerate_config.convert(FSDP, None)
    assert (config["layout"], config["model"]["dtype"]) == ("dp2 cp2 ulysses tp2 zero3", "bf16")
    assert config["model"]["recompute"] is True
    assert "refused" not in fates(rows).values()
    for strategy, stage in ((1, 3), (2, 2), ("NO_SHARD", 0), ("SHARD_GRAD_OP", 2)):
        of = {"num_processes": 2, "distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": strategy}}
        assert accelerate_config.convert(of, None)[0]["layout"] == (f"dp2 zero{stage}" if stage else "dp2")
    speed = {"zero_stage": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    config = accelerate_config.convert({"num_processes": 4, "deepspeed_config": speed}, None)[0]
    assert (config["layout"], config["micro_batches"], config["batch"]) == ("dp4 zero2", 4, 16)
    megatron = {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2, "megatron_lm_sequence_parallelism": True}
    assert accelerate_config.convert({"num_processes": 8, "megatron_lm_config": megatron}, None)[0]["layout"] == (
        "dp2 tp2 sp pp2"
    )
    for part, key in (
        ({"fsdp_config": {"fsdp_offload_params": True}}, "fsdp_config.fsdp_offload_params"),
        ({"mixed_precision": "fp8"}, "mixed_precision"),
        ({"num_processes": 3, "parallelism_config": {"parallelism_config_tp_size": 2}}, "num_processes"),
        ({"deepspeed_config": {"deepspeed_config_file": "ds.json"}}, "deepspeed_config.deepspeed_config_file"),
        ({"fp8_config": {"backend": "TE"}}, "fp8_config"),
    ):
        rows = accelerate_config.convert(part, None)[1]
        assert [row.key for row in rows if row.fate == "refused"] == [key]


@pytest.mark.parametrize("text", ["[]", "{}", '["batch"]', "8", '"zero"'])
def test_a_file_without_keys_is_no_config(tmp_path: Path, text: str) -> None:
    for name in ("args.json", "args.yaml"):
        (tmp_path / name).write_text(text)
        with pytest.raises(IntegrationError, match=r"IG863[\s\S]*no config of another program"):
            read(str(tmp_path / name), None)


def test_whose_file_it_is_is_seen_by_its_keys(tmp_path: Path) -> None:
    for name, text, kind in (
        ("a.json", '{"zero_optimization": {"stage": 1}}', "deepspeed"),
        ("b.yml", yaml.safe_dump(NEOX), "neox"),
        ("c.yaml", yaml.safe_dump(FSDP), "accelerate"),
        ("d.yaml", "learning_rate: 1.0e-4", "trainer"),
        ("e.sh", SCRIPT, "megatron"),
    ):
        (tmp_path / name).write_text(text)
        assert read(str(tmp_path / name), None)[1] == kind
    assert read(str(tmp_path / "d.yaml"), "accelerate")[1] == "accelerate"
