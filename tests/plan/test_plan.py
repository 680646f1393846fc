"""A plan is right where it can be known: machines, schedules, memory, searches, long runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import time
from pathlib import Path

import pytest

from isograd.cli.main import main
from isograd.core.contract_table import contracts
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.errors import PipelineError, PlanError
from isograd.models import Transformer, TransformerConfig
from isograd.pipeline import build
from isograd.plan import machine
from isograd.plan.comm_volume import Transfer
from isograd.plan.costs import Costs
from isograd.plan.goodput import best_interval, goodput, share
from isograd.plan.memory import memory, most_in_flight, of_stage, states
from isograd.plan.search import SearchResult, layouts, search
from isograd.plan.step_time import predict, timeline
from isograd.plan.work import Work, params_on_rank
from isograd.train import reading
from isograd.train.language import flops_per_token
from isograd.train.resources import forecast, work_of

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = TransformerConfig(vocab=32000, hidden=2048, layers=16, heads=16, kv_heads=8, mlp=5632)
H100 = machine.load("h100")


def work(**more: object) -> Work:
    return dataclasses.replace(Work(model=SMALL, length=4096, batch=64, micro_batches=8), **more)


# -- machines


def test_every_machine_reads_back_what_it_writes(tmp_path: Path, capsys) -> None:
    for name in machine.names():
        made = machine.load(name)
        assert made.name == name
        file = tmp_path / f"{name}.yaml"
        file.write_text(machine.text(made))
        assert machine.load(str(file)) == made
    assert {"a100", "b200", "h100", "h200", "mi300x"} <= set(machine.names())
    assert main(["machine"]) == 0
    assert "mi300x   AMD" in capsys.readouterr().out
    assert main(["machine", "show", "h100"]) == 0
    assert machine.from_dict(machine.yaml_reader.parse(capsys.readouterr().out), "shown") == H100


def test_a_machine_with_mistakes_is_refused_with_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    text = machine.text(H100).replace("memory_gb_s", "memory_gbs").replace("devices: 8", "devices: -8")
    file.write_text(text)
    with pytest.raises(PlanError, match="IG272") as refused:
        machine.load(str(file))
    for part in (
        "memory_gbs (did you mean 'memory_gb_s'?)",
        "memory_gb_s is missing",
        "devices: Input should be greater than 0, not -8",
    ):
        assert part in str(refused.value)
    for right, wrong, why in (
        ("links: 0.8", "links: 9", "rates.links: Input should be less than or equal to 1, not 9"),
        ("bf16: 0.71", "bf16: 7", "rates.matmul.bf16: Input should be less than or equal to 1, not 7"),
        ("reserved_gb: 5", "reserved_gb: 500", "reserved_gb 500 leaves nothing"),
        ("devices: 8", "devices: 8\nmemory_gb: 4000", "'memory_gb' is given twice"),
    ):
        assert right in machine.text(H100)
        file.write_text(machine.text(H100).replace(right, wrong, 1))
        with pytest.raises(PlanError, match="IG272") as refused:
            machine.load(str(file))
        assert why in str(refused.value)
    with pytest.raises(PlanError, match="did you mean 'h100'"):
        machine.load("h10")
    with pytest.raises(PlanError, match="IG272"):
        machine.load(str(tmp_path / "missing.yaml"))


def test_a_machine_without_a_link_or_a_dtype_refuses_what_needs_it() -> None:
    alone = dataclasses.replace(H100, between=None)
    assert predict(work(), Layout.parse("dp8 zero1"), alone).seconds > 0
    with pytest.raises(PlanError, match="IG273: h100 has no link between nodes"):
        predict(work(), Layout.parse("dp16 zero1"), alone)
    with pytest.raises(PlanError, match="IG273: a100 is not described for products in fp8"):
        predict(work(products="fp8"), Layout.parse("dp8 zero1"), machine.load("a100"))


def test_groups_that_cross_nodes_use_the_links_of_their_members() -> None:
    """A collective of 64 ranks uses all 8 links of a node; one with a single member in each node uses one."""
    whole, sparse = (Costs(work(), Layout.parse(text), H100) for text in ("dp64", "dp8 tp8"))
    gigabyte = Transfer("dp cp", "collective", 1e9)
    rate = H100.rates.links * 1e9
    assert H100.between is not None
    assert whole.move(gigabyte) == pytest.approx(1e9 / (rate * 8 * H100.between.gb_s), rel=0.05)
    assert sparse.move(gigabyte) == pytest.approx(1e9 / (rate * H100.between.gb_s), rel=0.05)
    assert sparse.move(Transfer("tp", "collective", 1e9)) == pytest.approx(1e9 / (rate * H100.inside.gb_s), rel=0.05)


# -- time


def test_parts_add_up_to_the_step_and_more_devices_are_faster() -> None:
    before = math.inf
    for layout in ("dp2 zero1", "dp4 zero1", "dp2 tp4 sp zero1", "dp2 tp4 sp pp2 zero1", "dp8 pp4 vpp2 zero1"):
        step = predict(work(batch=256, micro_batches=32), Layout.parse(layout), H100)
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        assert step.low < step.seconds < step.high
        assert 0.05 < step.mfu < 0.8
        assert step.seconds < before
        before = step.seconds


PIPELINES = [f"pp{pp} vpp{vpp}" for pp in (2, 4, 8) for vpp in (1, 2, 3, 4, 8)]
PIPELINES += [f"pp{pp} {kind}" for pp in (2, 4, 8) for kind in ("gpipe", "zb")]


@pytest.mark.parametrize("recipe", ["llama-8b", "llama-70b"])
@pytest.mark.parametrize("micro", [61, 64])
def test_a_step_lasts_as_long_as_all_its_micro_batches_and_no_rank_is_busier(recipe: str, micro: int) -> None:
    """What a long pipeline continues with is the pace of the whole schedule, and that of no rank is faster."""
    described = work_of(reading.load(RECIPES / f"{recipe}.yaml").config)
    described = dataclasses.replace(described, batch=2 * micro, micro_batches=micro)
    judged = 0
    for pipeline in PIPELINES:
        layout = Layout.parse(f"dp2 tp4 sp {pipeline} zero1")
        with contextlib.suppress(PipelineError):  # 32 layers have no 64 stages
            described.split(layout)
            step, (ranks, rows) = predict(described, layout, H100), timeline(described, layout, H100)
            after = max(sum(rank.after.values()) for rank in ranks)
            assert step.seconds == pytest.approx(max(row[-1].end for row in rows) + after, rel=1e-6), pipeline
            busiest = max(ranks, key=lambda rank: rank.busy)
            compute = micro * sum(forward.compute + backward.compute for forward, backward in busiest.stages)
            assert step.parts["compute"] == pytest.approx(compute)
            assert step.seconds - after >= micro * busiest.busy * (1 - 1e-12) >= compute * (1 - 1e-12), pipeline
            assert sum(step.parts.values()) == pytest.approx(step.seconds)
            assert min(step.parts.values()) >= 0
            judged += 1
    assert judged > 15


def test_a_bubble_is_what_the_schedule_says() -> None:
    """Stages of equal cost, sends that take no time: the idle share of 1f1b is (p - 1) / (m + p - 1)."""
    even = dataclasses.replace(SMALL, vocab=64)
    step = predict(work(model=even, batch=8), Layout.parse("pp4"), H100)
    assert step.parts["bubble"] / (step.seconds - step.parts["optimizer"]) == pytest.approx(3 / 11, rel=0.06)


def test_a_layout_is_judged_in_milliseconds() -> None:
    predict(work(), Layout.parse("dp8 tp8 sp zero1"), H100)
    began = time.process_time()
    for _ in range(100):
        predict(work(), Layout.parse("dp8 tp8 sp pp4 vpp2 zero1"), H100, simulated=False)
    assert (time.process_time() - began) / 100 < 0.01


def test_windows_cost_what_their_tokens_see() -> None:
    layout, long = Layout.parse("dp8 zero1"), work(length=32768, batch=8, micro_batches=1)
    described = {
        "full": SMALL,
        "window": dataclasses.replace(SMALL, sliding_window=1024),
        "half": dataclasses.replace(SMALL, sliding_window=1024, full_layers=tuple(range(0, 16, 2))),
        "wide": dataclasses.replace(SMALL, sliding_window=32768),
    }
    seconds = {name: predict(dataclasses.replace(long, model=m), layout, H100).seconds for name, m in described.items()}
    assert seconds["wide"] == seconds["full"]
    assert seconds["window"] < seconds["half"] < seconds["full"]
    assert seconds["half"] == pytest.approx((seconds["window"] + seconds["full"]) / 2, rel=1e-6)


def test_blocks_of_attention_are_counted_as_they_are_computed() -> None:
    from isograd.plan.costs import blocks_and_pairs

    assert blocks_and_pairs(512, 1, 1, None) == (7, 128 * (128 + 256 + 384 + 512))
    assert blocks_and_pairs(512, 2, 1, 1) == (4, 4 * 128 * 128)
    assert blocks_and_pairs(512, 1, 2, None) == (2, 256 * 256 + 256 * 128)
    assert blocks_and_pairs(4096, 1, 4, 1)[0] < blocks_and_pairs(4096, 1, 4, None)[0]


# -- memory


def test_a_mask_of_documents_is_held_where_a_kernel_takes_one() -> None:
    whole, ring = Layout.parse("cp4 ulysses"), Layout.parse("cp4 ring")
    long = work(length=32768, batch=1, micro_batches=1)
    packed, wide = dataclasses.replace(long, masked=True), dataclasses.replace(long, masked=True, dtype="fp32")
    assert memory(packed, whole, gpu=True).activations == memory(long, whole).activations
    assert memory(packed, ring, gpu=True).activations == memory(long, ring).activations
    assert memory(packed, whole).activations > memory(long, whole).activations + 2 * 32768**2
    assert memory(wide, whole, gpu=True).activations == memory(wide, whole).activations


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [("dp8 zero3", "false"), ("tp4 sp pp4", "true"), ("dp2 cp2 ulysses tp2 pp2 vpp2 zero1", "false")],
)
def test_memory_is_that_of_parameters_counted_on_the_model(layout: str, recompute: str) -> None:
    """The forecast of plan, train and the dry run, against the contracts of a model that is built on each stage."""
    options = ["--layout", layout, "--model.recompute", recompute, "--micro_batches", "8"]
    config = reading.load(RECIPES / "llama-1b.yaml", [*options, "--model.options.layers", "8"]).config
    planned, cut = forecast(config), Layout.parse(layout)
    for index, found in enumerate(planned.stages):
        assert (found.parameters, found.gradients, found.optimizer) == counted(work_of(config), cut, index)
    assert memory(work_of(config), cut).total == planned.largest.total
    whole = Transformer(work_of(config).model, Mesh.unbound("dp1"), device="meta")
    assert planned.parameters == planned.trained == sum(parameter.numel() for parameter in whole.parameters())


def counted(described: Work, layout: Layout, index: int) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer: every parameter of a stage's model, by its contract."""
    mesh = Mesh.unbound(layout, layout.rank({"pp": index, "dp": 0, "cp": 0, "tp": 0}))
    table = contracts(Transformer(described.model, mesh, device="meta"), mesh)
    parts: dict[str, int] = {}  # by block; "" is what is in none
    for record in table:
        part = ".".join(record.name.split(".")[:2]) if record.name.startswith("blocks.") else ""
        parts[part] = parts.get(part, 0) + record.parameter.numel()
    gathered = parts.get("", 0) + 2 * max(size for part, size in parts.items() if part)
    owned = sum(record.parameter.numel() / mesh.size(record.contract.data) for record in table)
    return states(layout, described.size, sum(parts.values()), owned, gathered, 0, whole=described.keeps_whole)


@pytest.mark.parametrize("words", ["pp4", "pp4 vpp2", "pp3 vpp3", "pp4 gpipe", "pp4 zb", "pp2 vpp4"])
def test_forwards_in_flight_in_closed_form_are_those_of_the_schedule(words: str) -> None:
    layout = Layout.parse(words)
    for micro in (1, 3, 4, 8, 12, 24):
        schedule = build(layout.schedule, layout.pp, layout.vpp, micro)
        for index in range(layout.pp):
            bound = most_in_flight(layout, micro, index)
            assert schedule.in_flight(index) <= bound
            if micro % layout.pp == 0:
                assert schedule.in_flight(index) == bound, f"{micro} micro-batches, rank {index}"


@pytest.mark.parametrize(
    ("recipe", "parameters", "active", "spread"),
    [("llama-70b", 70_553_706_496, 70_553_706_496, 1), ("qwen3-30b-a3b", 30_532_122_624, 3_353_370_624, 4)],
)
def test_parameters_states_and_products_are_those_that_anybody_counts(
    recipe: str, parameters: int, active: int, spread: int
) -> None:
    """The published counts of both models; 12 bytes of AdamW's states for each element that a rank owns; 6 N D."""
    described = work_of(reading.load(RECIPES / f"{recipe}.yaml").config)
    c = described.model
    assert params_on_rank(described, Layout(), 0).all == parameters
    layout = Layout.parse(f"dp4 tp4 sp pp4 ep{spread} zero1")
    stages = [of_stage(described, layout, index) for index in range(4)]
    replicas = 0.001 * parameters  # norms and routers, which each tp rank has
    assert sum(stage.parameters for stage in stages) * 4 == pytest.approx(2 * parameters, abs=2 * replicas * 4)
    assert sum(stage.optimizer for stage in stages) * 4 * 4 == pytest.approx(12 * parameters, abs=12 * replicas * 4)
    assert sum(stage.gradients for stage in stages) * 4 == pytest.approx(4 * parameters * 1.25, abs=6 * replicas * 4)
    tokens, inner = described.batch * described.length, c.heads * (c.head_dim or c.hidden // c.heads)
    attention = 12 * c.layers * inner * described.length * tokens  # PaLM's convention: of all tokens to all
    products = 6 * (active - c.vocab * c.hidden) * tokens
    assert described.flops == pytest.approx(products + attention, rel=1e-3)
    assert described.flops == pytest.approx(flops_per_token(c, described.length) * tokens, rel=1e-3)  # of the journal


# -- search


def test_a_search_finds_the_fastest_that_fits_and_says_why_others_fell_out() -> None:
    found = search(work(batch=8, micro_batches=1), 8, H100, shown=3)
    assert [one.step.seconds for one in found.best] == sorted(one.step.seconds for one in found.best)
    assert all(one.layout.world_size == 8 for one in found.best)
    assert all(one.memory.total <= 80e9 for one in found.best)
    assert found.tried == found.fitting + sum(out.count for out in found.out.values())
    small = dataclasses.replace(H100, memory_gb=12)
    tight = search(work(batch=8), 8, small)
    assert "more memory than a device has" in tight.out
    assert tight.best[0].memory.total <= 7e9
    assert tight.best[0].step.seconds >= found.best[0].step.seconds


def test_a_search_tries_the_micro_batches_of_the_config_too() -> None:
    """5 micro-batches of 3 sequences each: 3 is no power of two."""
    tried = {
        micro: {one.work.micro_batches for one in search(work(batch=15, micro_batches=micro), 1, H100, shown=24).best}
        for micro in (5, 2)  # 2 do not divide 15
    }
    assert tried == {5: {5, 15}, 2: {15}}


def test_a_search_offers_zero3_with_and_without_a_pipeline_and_predicts_what_it_costs_there() -> None:
    tiny = work(model=dataclasses.replace(SMALL, layers=4), batch=16)
    offered = list(layouts(tiny, 8, H100, SearchResult([], 0, 0)))
    assert {(layout.pp > 1, layout.zero) for layout in offered if layout.dp > 1} == {
        (False, 1), (False, 3), (True, 1), (True, 3)
    }  # fmt: skip
    one, three = (predict(work(), Layout.parse(f"dp4 pp2 zero{stage}"), H100) for stage in (1, 3))
    assert three.parts["dp"] > 4 * one.parts["dp"]  # each micro-batch gathers each block twice
    held, kept = (of_stage(work(), Layout.parse(f"dp4 pp2 zero{stage}"), 0) for stage in (1, 3))
    assert kept.parameters < held.parameters and kept.gradients == held.gradients


def test_a_search_without_an_answer_says_what_was_in_the_way() -> None:
    with pytest.raises(PlanError, match="IG276") as refused:
        search(work(batch=8), 8, dataclasses.replace(H100, memory_gb=5.5))
    assert "more memory than a device has" in str(refused.value)
    with pytest.raises(PlanError, match="IG276: no layout of 17") as refused:
        search(work(), 17, H100)
    assert "more devices" not in str(refused.value)
    with pytest.raises(PlanError, match="IG275"):
        search(work(), 0, H100)


# -- long runs


def simulated(interval: float, mean: float, save: float, restart: float, hours: float) -> float:
    """The share of time that is kept, in a run with failures at random."""
    draw = random.Random(1)
    now = kept = 0.0
    until = draw.expovariate(1 / mean)
    while now < hours * 3600:
        if until > interval + save:
            until -= interval + save
            now, kept = now + interval + save, kept + interval
            continue
        now += until
        until = draw.expovariate(1 / mean)
        while until < restart:  # a restart fails, too
            now += until
            until = draw.expovariate(1 / mean)
        now, until = now + restart, until - restart
    return kept / now


def test_the_best_interval_and_its_share_are_those_of_a_simulation() -> None:
    for mean, save, restart in ((3 * 3600, 60, 600), (1800, 60, 300), (36000, 20, 120)):
        best = best_interval(mean, save)
        assert share(best, mean, save, restart) == pytest.approx(simulated(best, mean, save, restart, 40000), rel=0.01)
        assert share(best, mean, save, restart) > max(share(best * x, mean, save, restart) for x in (0.8, 1.25))
        assert best == pytest.approx(math.sqrt(2 * save * mean), rel=0.15)  # Young's


def test_llama_3s_failures_are_three_hours_apart() -> None:
    """419 stops in 54 days on 16,384 devices."""
    found = goodput(419 / (54 * 24 * 16384), 16384, save_s=30, restart_s=600)
    assert found.between_failures_s / 3600 == pytest.approx(3.09, abs=0.01)
    assert 0.85 < found.share < 0.95
    assert share(1e9, 1.0, 1.0, 1.0) == 0.0
    with pytest.raises(PlanError, match="IG277"):
        goodput(0.0, 8, 1, 1)
