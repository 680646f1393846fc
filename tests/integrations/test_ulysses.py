"""DeepSpeed's entrances of Ulysses on isograd: every number in its place, gradients of one device, misuse by name."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from isograd.errors import CommError, IntegrationError
from isograd.hf.force_fp64 import ForceFP64
from isograd.integrations import deepspeed
from isograd.launcher.launch import launch
from tests.integrations.stand_ins import model
from tests.integrations.worlds import as_torchrun_starts_it

ROOT = Path(__file__).parents[2]


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
    """Attention of [b, s, h, d]."""
    heads = (t.transpose(1, 2) for t in (q * scale, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def sequence_first(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
    return causal(*(t.transpose(0, 1) for t in (q, k, v)), scale=scale).transpose(0, 1)


def cut_apart() -> tuple[str, float]:
    """Rank 1 has a token less than rank 0, on torch's own group."""
    deepspeed.init_distributed()
    q, since = torch.randn(1, 4 - dist.get_rank(), 2, 4), time.monotonic()
    try:
        deepspeed.DistributedAttention(causal, dist.group.WORLD, 2, 1)(q, q, q)
    except CommError as error:
        return error.code, time.monotonic() - since
    return "attended", 0.0


def test_ranks_with_parts_of_other_lengths_find_it_out_by_themselves() -> None:
    for code, seconds in launch(cut_apart, 2):
        assert code == "IG215"
        assert seconds < 10


def attended(heads: int, gather: int, newer: bool) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    """What the class gives of my part, with its gradients, and what one device does."""
    deepspeed.init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(3, 10, heads, 4, dtype=torch.float64, generator=generator) for _ in range(4)]
    whole = [t if gather else t.transpose(0, 1).contiguous() for t in whole]
    local = causal if gather else sequence_first
    alone = [t.clone().requires_grad_() for t in whole[:3]]
    true = local(*alone, scale=0.7)
    (true * whole[3]).sum().backward()
    mine = [t.chunk(world, gather)[rank].clone().requires_grad_() for t in whole[:3]]
    layer = deepspeed.DistributedAttention(local, dist.group.WORLD, 2, gather)
    out = layer(*mine, 1 - gather, scale=0.7) if newer else layer(*mine, scale=0.7)
    (out * whole[3].chunk(world, gather)[rank]).sum().backward()
    part = [t.grad.chunk(world, gather)[rank] for t in alone]
    return out.detach(), [t.grad for t in mine], true.detach().chunk(world, gather)[rank], part


@pytest.mark.parametrize(("heads", "gather", "newer"), [(4, 0, True), (4, 1, False), (3, 1, True), (3, 0, False)])
def test_attention_and_its_gradients_are_those_of_one_device(worlds, heads: int, gather: int, newer: bool) -> None:
    for out, gradients, true, right in worlds(2).run(attended, heads, gather, newer):
        assert float((out - true).abs().max()) < 1e-12
        assert all(float((a - b).abs().max()) < 1e-12 for a, b in zip(gradients, right, strict=True))


def test_misuse_is_named() -> None:
    with pytest.raises(IntegrationError, match="scatter_idx=1, gather_idx=2"):
        deepspeed.DistributedAttention(causal, None, 1, 2)
    with pytest.raises(IntegrationError, match="process group of torch"):
        deepspeed.DistributedAttention(causal, None)
    register = deepspeed.UlyssesSPAttentionHF.register_with_transformers
    assert register("any", "sdpa", 1) is None
    for options in ({"sequence_parallel_size": 0}, {"sequence_parallel_size": 2, "disable_in_eval": True}):
        with pytest.raises(IntegrationError, match="IG868"):
            register("any", "sdpa", **options)


def calls_of_one_rank(_: int) -> list[str]:
    deepspeed.init_distributed()
    layer = deepspeed.DistributedAttention(causal, dist.group.WORLD, 2, 1)
    x, found = torch.zeros(1, 4, 2, 2), []
    for given, named in (((x, x, x, 1), {}), ((x[0], x[0], x[0], 0), {}), ((x, x, x, 0), {"rotary_pos_emb": x})):
        try:
            layer(*given, **named)
        except IntegrationError as error:
            found.append(str(error))
    return found


def test_calls_that_would_compute_something_else_are_named(worlds) -> None:
    for found in worlds(2).run(calls_of_one_rank, 0):
        assert [word in text for word, text in zip(("batch_dim_idx=1", "four dim", "rotary"), found, strict=True)]
        assert "batch_dim_idx=1" in found[0] and "four dimensions" in found[1] and "rotary_pos_emb" in found[2]


def documented_loop(uneven: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Each rank has a loader of its own; the group computes both micro-batches. And one device."""
    deepspeed.init_distributed()
    mpu = deepspeed.UlyssesSPAttentionHF.register_with_transformers("any", "sdpa", 2, 1)
    assert mpu is not None
    rank, world, group = (
        mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_world_size(), mpu.get_sequence_parallel_group()
    )  # fmt: skip
    rows = [[rows_of(r)] * (1 + (uneven and r)) for r in range(2)]
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model("Llama").double(), config=config, mpu=mpu)
    loader = deepspeed.UlyssesSPDataLoaderAdapter(rows[rank], rank, group, world, engine.device)
    assert len(loader) == 2 * len(rows[rank])
    found, said = {}, ""
    try:
        for number, batch in enumerate(loader):
            with ForceFP64():
                engine.backward(engine(**batch).loss)
            if number == 1:
                found = {name: gradient.clone() for name, gradient in engine.engine.grads().items()}
                try:
                    batch["shift_labels"]
                except IntegrationError as error:
                    said = str(error)
            engine.step()
    except IntegrationError as error:
        said = str(error)
    alone, weight = model("Llama").double(), 0
    for r in range(2):
        count = int((rows_of(r)["labels"][:, 1:] != -100).sum())
        with ForceFP64():
            (alone(**rows_of(r)).loss * count).backward()
        weight += count
    return found, {name: p.grad / weight for name, p in alone.named_parameters()}, said


def rows_of(rank: int) -> dict[str, Tensor]:
    """Of a length that two ranks do not divide."""
    tokens = torch.randint(1, 50, (2, 11), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(11) < 2 + 3 * rank, -100)}


def test_the_documented_loop_has_the_gradients_of_one_device(worlds) -> None:
    for found, right, said in worlds(2).run(documented_loop, False):
        assert found.keys() == right.keys()
        worst = max(float((found[n] - g).norm() / g.norm()) for n, g in right.items())
        assert worst < 1e-9, worst
        assert "engine.backward(loss)" in said


def test_loaders_of_different_lengths_are_named_on_all_ranks(worlds) -> None:
    for _, _, said in worlds(2).run(documented_loop, True):
        assert "loaders of sequence ranks [0]" in said


def a_loader_that_raises(odd: bool) -> list[str]:
    """On rank 1, or a batch that holds no tensor; and a loader that is right, after it."""
    deepspeed.init_distributed()
    mpu = deepspeed.UlyssesSPAttentionHF.register_with_transformers("any", "sdpa", 2, 1)
    assert mpu is not None
    rank, group = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group()

    def batches() -> Iterator[dict[str, Any]]:
        yield rows_of(rank)
        if rank == 1 and odd:
            yield {"text": "a"}
        if rank == 1:
            raise OSError("no such shard")
        yield rows_of(rank)

    said = []
    for loader in (batches(), [rows_of(rank)] * 2):
        count = 0
        try:
            for _ in deepspeed.UlyssesSPDataLoaderAdapter(loader, rank, group, 2):
                count += 1
        except (OSError, IntegrationError) as error:
            said.append(str(error))
        said.append(str(count))
    return said


@pytest.mark.parametrize("odd", [False, True])
def test_a_loader_that_raises_is_told_to_all_ranks(worlds, odd: bool) -> None:
    first, second = worlds(2).run(a_loader_that_raises, odd)
    assert first[1:] == second[1:] == ["2", "4"]
    assert "{1: " in first[0] and ("are no tensors" if odd else "OSError: no such shard") in first[0]
    assert ("are no tensors" if odd else "no such shard") in second[0]


FOUNDING = ("deepspeed_5664.py", "deepspeed_5248.py", "deepspeed_1902.py")


def program(script: str) -> tuple[Any, str]:
    """A script in a rank that is there already, which stays in its world: how it ended, and what it printed."""
    path, out = ROOT / "examples" / "founding" / script, io.StringIO()
    stays = mock.patch.object(dist, "destroy_process_group", lambda *_: None)
    with as_torchrun_starts_it(), mock.patch.object(sys, "argv", [str(path)]), stays, redirect_stdout(out):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return end.code, out.getvalue()
    return 0, out.getvalue()


@pytest.mark.medium
@pytest.mark.parametrize("script", FOUNDING)
def test_a_founding_case_is_right_on_four_ranks(worlds, script: str) -> None:
    for code, said in worlds(4).run(program, script):
        assert not code, said


@pytest.mark.slow
@pytest.mark.parametrize("script", FOUNDING)
def test_so_it_is_under_torchrun(script: str) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run([*words, f"examples/founding/{script}"])


@pytest.mark.slow
def test_the_case_of_neox_is_right(tmp_path: Path) -> None:
    run([sys.executable, "examples/founding/neox_1257.py", "--out", str(tmp_path / "neox.png")])
    assert (tmp_path / "neox.png").stat().st_size > 10_000


@pytest.mark.peers
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("deepspeed_5664.py", ["right"] * 12),
        pytest.param("deepspeed_5248.py", ["1.3 to 2.0", "1.3 to 2.0", "0.6 to 1.0"], marks=pytest.mark.slow),
    ],
)
def test_deepspeed_itself_does_what_the_page_says(script: str, said: list[str]) -> None:
    pytest.importorskip("deepspeed")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    told = run([*words, f"examples/founding/{script}", "--there"])
    page = (ROOT / "docs" / "founding.md").read_text()
    found = re.findall(r"heads: (.*)|factors (\S+) to (\S+),", told)
    assert [right or f"{float(low):.1f} to {float(high):.1f}" for right, low, high in found] == said
    assert "| deepspeed 0.19.8 | right | right |" in page and all(one in page for one in said)


def run(words: list[str]) -> str:
    told = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=told, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
