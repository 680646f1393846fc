"""isograd's own training on imagined cards: the gradients of one device, and no fault, on any stream.

The model, the data, the truth and the comparison are those of the parity grid (tests/parity/cases.py), in fp64.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.parity import cases

from . import Result, right, run

ACCUMULATION = 2
LAYOUTS = (
    "dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp", "cp2", "dp2 tp2 zero1", "pp2", "pp4",
)  # fmt: skip


SLOW = ("cp2 ring", "pp2 gpipe", "pp2 zb", "pp2 vpp2", "tp2 cp2", "dp2 pp2 zero1", "dp2 tp2 zero3")


def train(layout: str, stream: str, offload: bool = False, recompute: bool | str = False) -> cases.Trained:
    """As the parity grid does, on this rank's card. On a stream of the user's: everything, the model included."""
    from isograd import Engine, Mesh
    from isograd.core.contract import assemble
    from isograd.core.contract_table import contracts
    from isograd.models import Transformer

    with torch.cuda.stream(torch.cuda.Stream()) if stream == "own" else nullcontext():
        mesh, config, done = Mesh(layout), cases.CONFIGS["deep" if "pp" in layout else "llama"], cases.Trained()
        assert mesh.device.type == "cuda"
        model = Transformer(config, mesh, dtype=torch.float64).to(mesh.device)
        model.recompute = recompute
        engine, table = (
            Engine(model, mesh, cases.sgd, clip=cases.CLIP, bucket_mb=0.01, offload=offload),
            (contracts(model, mesh)),
        )
        micro_batches = ACCUMULATION * mesh.size("dp")
        for step in range(cases.STEPS):
            first = mesh.index("dp") * ACCUMULATION
            texts = [cases.micro_batch(config, step, first + j, micro_batches) for j in range(ACCUMULATION)]
            micros = [{"tokens": t.to(mesh.device), "labels": labels.to(mesh.device)} for t, labels, _ in texts]
            if mesh.size("pp") > 1:
                engine.accumulate(micros)
            else:
                for micro in micros:
                    loss, count = model(**micro)
                    engine.backward(loss, weight=count)
            done.gradients.append({name: g.cpu() for name, g in engine.grads().items()})
            stats = engine.step()
            done.losses.append(stats.loss)
            done.norms.append(stats.grad_norm)
        stepped = {p.device.type for group in engine.optimizer.param_groups for p in group["params"]}
        assert stepped == {"cpu" if offload else "cuda"}
        with torch.no_grad(), engine.full_parameters():
            done.parameters = {r.name: assemble(r.parameter, r.contract, mesh).cpu() for r in table}
        return done


def results_of(layout: str, *options: object) -> list[Result]:
    """isograd joins the world by itself, as under torchrun."""
    from isograd import Layout

    return run(train, Layout.parse(layout).world_size, layout, *options, join=False, seconds=20, limit=45)


@pytest.mark.parametrize("stream", ["default", "own"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_one_devices_and_nothing_races(layout: str, stream: str) -> None:
    of_one_device(layout, results_of(layout, stream))


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW)
def test_the_rest_of_the_covering_set_does_not_race_on_a_stream_of_the_users(layout: str) -> None:
    of_one_device(layout, results_of(layout, "own"))


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("dp2 zero3", True),
        pytest.param("tp2 sp", "selective", marks=pytest.mark.slow),
        pytest.param("pp2", True, marks=pytest.mark.slow),
    ],
)
def test_recomputed_blocks_give_the_gradients_of_one_device(layout: str, how: bool | str) -> None:
    of_one_device(layout, results_of(layout, "default" if "zero" in layout else "own", False, how))


@pytest.mark.parametrize(("layout", "stream"), [("dp2", "default"), ("dp2 zero3", "own")])
def test_inputs_of_blocks_that_are_kept_on_the_host_give_the_gradients_of_one_device(layout: str, stream: str) -> None:
    of_one_device(layout, results_of(layout, stream, False, "offload"))


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3"])
def test_masters_that_are_offloaded_lie_and_step_in_the_hosts_memory(layout: str) -> None:
    of_one_device(layout, results_of(layout, "default", True))


def of_one_device(layout: str, results: list[Result]) -> None:
    """Nothing failed or raced, and gradients, losses, norms and parameters are those of one device."""
    trained = right(results)
    truth = cases.one_device("deep" if "pp" in layout else "llama", ACCUMULATION * (2 if "dp2" in layout else 1))
    trained[0].parameters = {name: value for one in trained for name, value in one.parameters.items()}
    assert not cases.differences(trained[0], truth)
