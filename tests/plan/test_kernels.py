"""Sizes decide what a kernel reaches; what it reaches decides a step, and the picture shows where its time goes."""

from __future__ import annotations

import dataclasses
import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isograd.cli.main import main
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.errors import PlanError
from isograd.models import Transformer, TransformerConfig
from isograd.nn import ExpertOptions
from isograd.plan import machine, picture
from isograd.plan.costs import OPERATORS, ROUTING, Costs
from isograd.plan.kernels import attention_share, product_share
from isograd.plan.machine import Crowded, Link
from isograd.plan.step_time import predict
from isograd.plan.work import BlockKind, FrameworkProfile, Work

H100 = machine.load("h100")
SMALL = TransformerConfig(vocab=32000, hidden=2048, layers=16, heads=16, kv_heads=8, mlp=5632)
RECIPES = Path(__file__).parents[2] / "recipes"


def work(**more: object) -> Work:
    return dataclasses.replace(Work(model=SMALL, length=4096, batch=64, micro_batches=8), **more)


def test_a_product_is_slow_where_its_tiles_fill_the_last_round_badly() -> None:
    full = product_share(256 * 132, 128, 8192, 132)  # 132 tiles on 132 units
    over = product_share(256 * 133, 128, 8192, 132)  # one more takes another round
    assert full > 0.95
    assert over < 0.85 * full
    assert product_share(8192, 8192, 8192, 132) > 0.9
    assert product_share(64, 64, 8192, 132) < 0.05
    assert product_share(4096, 4096, 64, 132) < 0.5 * product_share(4096, 4096, 4096, 132)


def test_sizes_that_are_no_multiple_of_16_bytes_are_slow_and_a_cpu_knows_no_tiles() -> None:
    assert product_share(4096, 4096, 108, 132) < 0.3 * product_share(4096, 4096, 112, 132)
    assert product_share(17, 3, 5, 0) == 1.0
    assert attention_share(128) == 0.5
    assert attention_share(1 << 20) > 0.999


def test_eight_bits_cost_their_casts_and_gradients_their_sums() -> None:
    layout = Layout.parse("dp8 zero1")
    free = dataclasses.replace(H100, memory_gb_s=1e9)
    costs = [Costs(work(products="fp8"), layout, device) for device in (H100, free)]
    assert costs[0].product(8192, 2048, 8192) > 1.05 * costs[1].product(8192, 2048, 8192)
    profiles = [FrameworkProfile(fused_sums=fused) for fused in (False, True)]
    sums = [Costs(work(batch=256, profile=p), layout, H100).of_block(BlockKind())["B"].compute for p in profiles]
    elements = 2048 * (128 * (2 * 16 + 2 * 8) + 3 * 5632) + 2 * 2048
    assert sums[0] - sums[1] == pytest.approx(elements * (2 + 4 + 4) / (3350e9 * 0.8), rel=1e-6)


def test_a_slow_host_a_slow_device_and_messages_beside_compute_make_a_step_longer() -> None:
    layout = Layout.parse("dp64 zero3")
    base = predict(work(), layout, H100).seconds

    def changed(**rates: float) -> float:
        return predict(
            work(), layout, dataclasses.replace(H100, rates=dataclasses.replace(H100.rates, **rates))
        ).seconds

    assert changed(launch_us=3000.0) > 2 * base
    assert changed(launch_us=0.0) == pytest.approx(base)  # these layers are long: their device never waits
    assert changed(jitter=0.0) < base < changed(jitter=0.05)
    assert changed(contention=0.0) < base
    assert H100.slowest_of(1) == 0.0
    assert 0.03 < H100.slowest_of(1024) < 0.04


def test_two_ranks_on_a_device_get_what_was_measured_for_two() -> None:
    here = dataclasses.replace(H100, between=None, devices=2)
    assert here.shared(4) == here  # nobody measured two ranks on a device of this
    measured = dataclasses.replace(here, crowded=Crowded(slower=1.25, link=Link(gb_s=1.0, latency_us=500)))
    assert measured.shared(4).devices == 4
    assert measured.shared(4).peak("bf16") == H100.peak("bf16") / 2.5
    assert measured.shared(4).inside == Link(gb_s=1.0, latency_us=500)
    assert measured.shared(8).inside == Link(gb_s=0.5, latency_us=1000)
    assert measured.shared(2) == measured
    layout, described = Layout.parse("pp4"), work(batch=8, micro_batches=4)
    quick = dataclasses.replace(here, crowded=Crowded(slower=1.0, link=H100.inside)).shared(4)
    alone, together = (predict(described, layout, device) for device in (H100, quick))
    assert alone.parts["bubble"] > 0.5 * alone.parts["compute"]
    assert together.parts["bubble"] < 0.1 * together.seconds  # two devices are busy while any two ranks have work
    assert sum(together.parts.values()) == pytest.approx(together.seconds)
    assert H100.shared(64) == H100  # it has other nodes
    assert machine.from_dict(machine.yaml_reader.parse(machine.text(measured)), "itself") == measured
    with pytest.raises(PlanError, match=r"crowded\.link\.gb_s is missing"):
        machine.from_dict(machine.yaml_reader.parse(machine.text(measured).replace("    gb_s: 1.0\n", "")), "a file")


VIEWS = ("view", "t", "transpose", "detach", "_unsafe_view", "slice", "select", "unsqueeze", "split", "unbind", "empty")


class Counter(TorchDispatchMode):
    """Counts operators that start something on a device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += not name.startswith((*VIEWS, "new_empty", "expand", "item", "_local_scalar"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("experts", [None, ExpertOptions(number=16, per_token=4, width=16)])
def test_operators_of_a_block_are_those_that_its_forward_starts(experts: ExpertOptions | None) -> None:
    found = []
    for layers in (1, 2):
        config = TransformerConfig(vocab=64, hidden=32, layers=layers, heads=4, kv_heads=2, mlp=48, experts=experts)
        model, window = Transformer(config, Mesh(Layout())), torch.randint(64, (2, 9))
        with Counter() as counter:
            model(window[:, :-1], window[:, 1:])
        found.append(counter.count)
    assumed = OPERATORS if experts is None else ROUTING + 3 * experts.number
    assert found[1] - found[0] == pytest.approx(assumed, rel=0.1)


# -- the picture


@pytest.mark.parametrize("words", ["dp8 zero3", "dp2 tp4 sp pp4 zero1", "dp2 tp2 sp pp4 vpp2 zero1", "tp2 pp2 zb"])
def test_the_pictures_step_is_the_predicted_one_and_its_shares_add_up(words: str) -> None:
    layout = Layout.parse(words)
    described = work(micro_batches=4, profile=FrameworkProfile(waits_for_sends=layout.pp > 1))
    rows = picture.spans(described, layout, H100)
    end = max(row[-1].end for row in rows)
    assert len(rows) == layout.pp
    assert end == pytest.approx(predict(described, layout, H100).seconds, rel=1e-3)
    for row in rows:
        assert all(before.end <= after.start + 1e-9 for before, after in itertools.pairwise(row))
        found = picture.shares(row, end)
        assert sum(found.values()) == pytest.approx(1)
        assert min(found.values()) > -1e-9
    assert (picture.shares(rows[0], end)["pp"] > 0) == (layout.pp > 1)


def test_a_picture_is_drawn_beside_the_plan_and_never_over_a_file(tmp_path: Path, capsys) -> None:
    file = tmp_path / "step.svg"
    words = ["plan", str(RECIPES / "llama-1b.yaml"), "--layout", "dp2 tp2 sp pp2 zero1"]
    assert main([*words, "--picture", str(file)]) == 0
    assert "step.svg written" in capsys.readouterr().out
    drawn = ET.parse(file).getroot()
    texts = [text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    texts += ["".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"forward", "backward", "tp", "optimizer"} <= set(texts)
    assert all(
        any(text.startswith(f"{rank}  compute ") and "bubble" in text for text in texts) for rank in ("pp0", "pp1")
    )
    assert any("dp2 tp2 sp pp2 zero1 on 8 x h100" in text for text in texts)
    assert main([*words, "--picture", str(file)]) == 2
    assert "IG274" in capsys.readouterr().err
