"""The parity grid of pipelines: every schedule, with all that stands beside it, trains as one device does.

Not every combination runs: each pair of values of two settings meets in some case (a test counts them). Of eight ranks
`make test` has two cases.
"""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from isograd.core.layout import SCHEDULES, Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.models import Transformer
from tests.sizes import few, one_of_each

from . import cases
from .test_grid import noise_ratios

# layout, model, micro-batches per data rank, recompute
GRID = [
    ("pp2 vpp2 gpipe zero1", "deep-tied", 1, True),
    ("pp2 tp2 sp zero2", "deep", 2, False),
    ("pp4 zb cp2 ulysses", "deep", 5, True),
    ("pp4 vpp2 dp2 zero1", "deeper-tied", 5, False),
    ("pp2 zb cp2 ring", "deep-tied", 1, False),
    ("pp4 vpp2 gpipe cp2 ulysses zero2", "deeper-tied", 2, False),
    ("pp4 vpp2 gpipe tp2 sp", "deeper", 1, True),
    ("pp2 vpp2 zb dp2 zero1", "deep", 2, True),
    ("pp4", "deep", 2, True),
    ("pp4 gpipe cp2 ring zero2", "deep", 5, True),
    ("pp2 zb zero2", "deep", 5, False),
    ("pp2 cp2 ulysses zero1", "deep-tied", 1, True),
    ("pp2 gpipe dp2 zero2", "deep", 1, False),
    ("pp2 vpp2 zb tp2 sp zero1", "deep-tied", 5, True),
    ("pp4 vpp2 cp2 ring zero1", "deeper-tied", 2, True),
    ("pp2 gpipe dp2", "deep", 2, False),
    ("pp2 vpp2 dp2 tp2 sp zero1", "deep-tied", 2, False),
    ("pp3 dp2 zb zero2", "deep-tied", 3, False),
    ("dp2 pp2 zb zero1", "deep-tied", 3, False),
    ("pp2 zero3", "deep-tied", 5, True),
    ("pp2 vpp2 zb dp2 zero3", "deep", 2, False),
    ("pp2 gpipe tp2 sp zero3", "deep", 1, True),
    ("pp4 vpp2 cp2 ulysses zero3", "deeper-tied", 2, False),
    ("pp2 cp2 ring zero3", "deep", 5, False),
    ("pp2", "deep", 2, "selective"),
    ("pp2 vpp2 zb tp2 sp zero1", "deep-tied", 2, "selective"),
    ("pp2 dp2 zero3", "deep-tied", 2, "selective"),
]
LARGE = [case for case in GRID if Layout.parse(case[0]).world_size == 8 and "tp2 sp" not in case[0]]
FULL = LARGE + GRID[-2:]  # in `make full` only
VALUES = {
    "pp": (2, 4),
    "vpp": (1, 2),
    "schedule": SCHEDULES,
    "beside": ("", "dp2", "tp2 sp", "cp2 ulysses", "cp2 ring"),
    "zero": (0, 1, 2, 3),
    "model": ("deep", "deep-tied"),
    "micro-batches": (1, 2, 5),
    "recompute": (False, True),
}


def settings(layout: str, model: str, micro_batches: int, recompute: bool | str) -> dict[str, object]:
    parsed = Layout.parse(layout)
    beside = f"dp{parsed.dp}" if parsed.dp > 1 else "tp2 sp" if parsed.tp > 1 else ""
    return {
        "pp": parsed.pp,
        "vpp": parsed.vpp,
        "schedule": parsed.schedule,
        "beside": f"cp2 {parsed.cp_method}" if parsed.cp > 1 else beside,
        "zero": parsed.zero,
        "model": model.replace("deeper", "deep"),
        "micro-batches": micro_batches,
        "recompute": recompute,
    }


def test_every_pair_of_values_meets_in_the_grid() -> None:
    met = [settings(*case) for case in GRID]
    lost = [
        {one: a, other: b}
        for one, other in combinations(VALUES, 2)
        for a, b in product(VALUES[one], VALUES[other])
        if not any(case[one] == a and case[other] == b for case in met)
    ]
    assert not lost


@pytest.mark.parametrize(
    ("layout", "model", "micro_batches", "recompute"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case in FULL)) for case in GRID],
    ids=[f"{layout}-{model}-{m}{f'-recompute {r}' if r else ''}" for layout, model, m, r in GRID],
)
def test_a_pipeline_trains_as_one_device_does(
    threads, layout: str, model: str, micro_batches: int, recompute: bool | str
) -> None:
    case = cases.Case(layout, model, micro_batches, recompute=recompute)
    assert not case.wrong(threads(Layout.parse(layout).world_size).run(case.run))


@pytest.mark.parametrize("layout", ["dp2 pp2", "pp2 vpp2 zb tp2 sp"])
def test_zero_stages_give_the_same_bits_under_pp(threads, layout: str) -> None:
    world = threads(Layout.parse(layout).world_size)
    runs = [cases.on_layout(world, f"{layout} zero{stage}", "deep-tied", 2) for stage in (0, 1, 2)]
    for rank in range(len(runs[0])):
        assert len({run[rank].settled for run in runs}) == 1


def most_blocks_at_once(layout: str) -> int:
    """How many blocks of this rank are whole at a time, at the most, in a step of several micro-batches."""
    mesh, config = Mesh(layout), cases.CONFIGS["deep"]
    engine = Engine(Transformer(config, mesh), mesh, cases.sgd)
    zero3 = engine._zero3
    assert zero3 is not None
    most, unshard = 0, zero3.unshard

    def watched(unit: object) -> None:
        nonlocal most
        unshard(unit)  # type: ignore[arg-type]
        most = max(most, sum(any(p.users for p in group.params) for group in zero3.groups if group is not zero3.root))

    zero3.unshard = watched  # type: ignore[assignment]
    tokens, labels, _ = cases.micro_batch(config, 0, 0, 1)
    engine.train_step([{"tokens": tokens, "labels": labels}] * 4)
    assert not any(param.users for param in zero3.params.values())
    return most


@pytest.mark.medium
def test_at_stage_3_a_stage_of_a_pipeline_has_few_of_its_blocks_whole_at_a_time(threads) -> None:
    assert set(threads(4).run(most_blocks_at_once, "dp2 pp2 zero3")) == {2}  # the one that computes and the next


@pytest.mark.parametrize("layout", few(["dp2 pp2 zero1", "pp2 zb tp2 sp", "pp4 zero2"], slow=["dp2 pp2 zero1"]))
def test_copies_of_a_tied_weight_are_byte_equal_after_three_steps(threads, layout: str) -> None:
    results = threads(4).run(cases.train, layout, "deep-tied", 2, torch.float64, False, False, cases.Text(), False, 3)
    holders = [result for result in results if any("embed.weight" in place for place in result.replicas)]
    assert len({tuple(r.losses) for r in results}) == 1
    assert len(results[0].losses) == 3
    assert len(holders) == (2 if layout.startswith("pp4") else 4)
    assert not cases.replicas_apart(results)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    one_of_each(["dp2 pp2 zb zero1", "pp2 tp2 sp"], [torch.float32, torch.bfloat16]),
    ids=[f"{layout}-{dtype}" for layout in ("dp2 pp2 zb zero1", "pp2 tp2 sp") for dtype in ("fp32", "bf16")],
)
def test_working_precision_stays_within_one_devices_noise_under_pp(threads, layout: str, dtype: torch.dtype) -> None:
    """Below 2 is right, above 8 is a bug (GRADIENTS.md 4)."""
    parsed = Layout.parse(layout)
    found = cases.on_layout(threads(4), layout, "deep-tied", 3, dtype=dtype)[0]
    ratios = noise_ratios(found, dtype, "deep-tied", 3 * parsed.dp)
    assert ratios["all"] < 2, ratios
    assert max(ratios.values()) < 3, ratios
