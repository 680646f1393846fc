"""A layer of experts equals its definition on one device, output, losses and every gradient by name, on any layout.

The definition (nn/naive.py) computes every expert on every token. A parallel gradient is what the contract promises:
this rank's, summed over the data axes and over what the parameter owes, put together from shards.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.comm import raw
from isograd.comm.group import even_sizes
from isograd.core import rng
from isograd.core.contract import assemble
from isograd.core.contract_table import contracts
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.nn import ExpertOptions, MoE, Stream, naive, routing
from isograd.nn.routing import Remembered
from isograd.sequence.attend import token_layout_for

HIDDEN, ROWS, LENGTH = 6, 3, 7
PLAIN = ExpertOptions(number=4, per_token=2, width=5, z_weight=0.1)
OPTIONS: dict[str, ExpertOptions] = {
    "softmax": PLAIN,
    "one expert": replace(PLAIN, per_token=1, renormalise=False),
    "sigmoid": replace(PLAIN, scores="sigmoid", scale=2.5, choice_bias=True),
    "groups": replace(PLAIN, number=8, per_token=3, groups=4, chosen_groups=2, scores="sigmoid", choice_bias=True),
    "shared": replace(PLAIN, shared=4, renormalise=False),
    "shared gate": replace(PLAIN, shared=4, shared_gate=True),
    "capacity": replace(PLAIN, capacity=0.75),
    "lagged": replace(PLAIN, balance="lagged"),
    "batch": replace(PLAIN, balance="batch"),
}


def whole_input(rows: int) -> tuple[Tensor, Tensor]:
    """(the stream [b, s, hidden], the gradient of the output), of all data ranks."""
    generator = torch.Generator().manual_seed(3)
    shape = (rows, LENGTH, HIDDEN)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn(shape, generator=generator, dtype=torch.float64),
    )


def made(options: ExpertOptions, mesh: Mesh) -> MoE:
    layer = MoE(HIDDEN, options, mesh, key=rng.key(1, "moe"), std=0.7, dtype=torch.float64)
    if layer.choice_bias is not None:
        layer.choice_bias += torch.linspace(-0.3, 0.4, options.number)
    if layer.counts_before is not None:
        layer.counts_before += torch.arange(options.number)
    return layer


def my_part(mesh: Mesh, whole: Tensor) -> tuple[Tensor, Stream]:
    """This rank's rows of the stream, and what describes them. The last dp rank has fewer sequences, or none."""
    sizes = even_sizes(len(whole), mesh.size("dp"))
    mine = whole.split(sizes)[mesh.index("dp")]
    places, part = token_layout_for(LENGTH, len(mine), mesh), mesh.index("cp")
    flat = places.shard(mine, part).flatten(0, 1)
    stream = Stream(len(mine), places.local, places.positions(part).repeat(len(mine)), places=places)
    return stream.shard(flat, mesh), stream


def paid(layer: MoE, mesh: Mesh) -> dict[str, Tensor]:
    """Whole gradients, when the contracts' debts are paid."""
    found = {}
    for record in contracts(layer, mesh):
        gradient = record.parameter.grad
        assert gradient is not None, record.name  # zeros, not None, of experts without tokens
        for axes in (record.contract.data, *record.contract.partial_over):
            gradient = raw.all_reduce(gradient, mesh.group(axes))
        found[record.name] = assemble(gradient, record.contract, mesh)
    return found


def run_layer(layout: str, name: str, rows: int, recompute: bool) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """(output, gradient of the input, gradients, sums of losses) of my data rank; gradients are whole."""
    mesh = Mesh(layout)
    layer = made(OPTIONS[name], mesh)
    whole_x, whole_dy = whole_input(rows)
    x, stream = my_part(mesh, whole_x)
    dy, _ = my_part(mesh, whole_dy)
    x = x.clone().requires_grad_()
    if OPTIONS[name].balance == "batch":
        layer.load.step_total = torch.arange(1, OPTIONS[name].number + 1)
    if recompute:
        stream = replace(stream, remembered=Remembered())
        y, sums = torch.utils.checkpoint.checkpoint(layer, x, stream, use_reentrant=False)
    else:
        y, sums = layer(x, stream)
    ((y * dy).sum() + sums[0] + 0.1 * sums[1]).backward()
    together = (lambda t: raw.all_gather(t, mesh.group("tp"), [len(t)] * mesh.size("tp"))) if mesh.layout.sp else None
    y, dx = (t if together is None else together(t) for t in (y.detach(), x.grad))
    parts = []
    for t in (y, dx):
        joined = torch.cat(raw.gather_list(t.view(stream.batch, stream.length, HIDDEN), mesh.group("cp")), 1)
        parts.append(stream.places.unshard(joined))
    total = raw.all_reduce(sums.detach(), mesh.group("dp cp"))
    return parts[0], parts[1], paid(layer, mesh), total


def definition(name: str, rows: int) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    options = OPTIONS[name]
    layer = made(options, Mesh.unbound("1"))
    x, dy = whole_input(rows)
    x.requires_grad_()
    w = dict(layer.named_parameters())
    y, logits, chosen = naive.moe(x, w, options, F.silu, layer.choice_bias)
    if options.balance == "sequence":
        balance = sum(LENGTH * naive.balance(logits[b], chosen[b], options) for b in range(rows))
    else:
        known = torch.arange(1, options.number + 1) if options.balance == "batch" else layer.counts_before
        balance = (logits.softmax(-1) * known * options.number / known.sum()).sum()
    sums = torch.stack((balance, rows * LENGTH * naive.z(logits)))
    ((y * dy).sum() + sums[0] + 0.1 * sums[1]).backward()
    return y.detach(), x.grad, {n: p.grad for n, p in w.items()}, sums.detach()


def close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, what
    error = float((found - expected).norm())
    assert error <= 1e-11 * max(float(expected.norm()), 1.0), f"{what}: error {error:.1e}"


LAYOUTS = [
    "1", "dp2", "tp2", "tp2 sp", "cp2 ulysses", "cp2 ring", "dp2 ep2", "tp2 ep2", "tp2 sp ep2", "cp2 ring ep2",
    "dp2 tp2 ep2", "dp2 tp2 sp ep4", "dp2 cp2 ulysses ep4", "cp2 ring tp2 sp ep2", "dp4 ep2",
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_of_experts_equals_its_definition(worlds, layout: str) -> None:
    """All options; 3 sequences, and one, so that a dp rank has no token."""
    parsed = Layout.parse(layout)
    for number, name in enumerate(OPTIONS):
        rows = (ROWS, 1)[number % 2]
        y, dx, gradients, sums = definition(name, rows)
        results = worlds(parsed.world_size).run(run_layer, layout, name, rows, number % 3 == 1)
        for rank, (my_y, my_dx, mine, my_sums) in enumerate(results):
            share = even_sizes(rows, parsed.dp)
            of_rank = parsed.coordinates(rank)["dp"]
            what = f"{name} on rank {rank}"
            close(my_y, y.split(share)[of_rank], f"output, {what}")
            close(my_dx, dx.split(share)[of_rank], f"gradient of the input, {what}")
            assert mine.keys() == gradients.keys()
            for n, expected in gradients.items():
                close(mine[n], expected, f"gradient of {n}, {what}")
            close(my_sums, sums, f"sums of the losses, {what}")


def test_of_equal_scores_the_expert_of_the_lower_number_is_chosen() -> None:
    scores = torch.tensor([[0.1, 0.3, 0.3, 0.3], [0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]])
    assert routing.choose(scores, PLAIN).tolist() == [[1, 2], [0, 1], [3, 2]]
    groups = replace(PLAIN, groups=2)
    assert routing.choose(torch.tensor([[0.4, 0.0, 0.3, 0.3]]), groups).tolist() == [[2, 3]]


def test_an_expert_that_nobody_chooses_has_a_gradient_of_zeros() -> None:
    mesh = Mesh.unbound("1")
    layer = made(PLAIN, mesh)
    with torch.no_grad():
        layer.router.weight[2] = 0
    x, stream = my_part(mesh, torch.rand(2, LENGTH, HIDDEN, dtype=torch.float64))
    with torch.no_grad():
        layer.router.weight[[0, 1, 3]] = layer.router.weight[[0, 1, 3]].abs()
    layer(x, stream)[0].sum().backward()
    assert layer.load.local is not None
    assert int(layer.load.local[2]) == 0
    for weight in (layer.experts.up, layer.experts.gate, layer.experts.down):
        assert weight.grad is not None
        assert not weight.grad[2].any()
        assert weight.grad[0].any()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"per_token": 5}, "IG450", "5 of 4 experts"),
        ({"scores": "softmaxx"}, "IG450", "did you mean 'softmax'"),
        ({"groups": 3}, "IG450", "3 groups do not divide 4"),
        ({"per_token": 3, "groups": 2}, "IG450", "cannot be in 1 of 2 groups"),
        ({"shared_gate": True}, "IG450", "without a shared expert"),
        ({"scale": float("nan"), "z_weight": -1.0}, "IG450", "scale must be finite.*z_weight must be finite"),
        ({"capacity": float("inf")}, "IG450", "capacity must be positive and finite"),
        ({"per_token": 1}, "IG451", "the router learns nothing"),
        ({"number": 1, "per_token": 1, "renormalise": False}, "IG451", "softmax of a single expert"),
        ({"scale": 0.0}, "IG450", "scale must not be 0"),
        ({"number": "4", "renormalise": "no", "per_token": True}, "IG450", "number is of type int.*per_token.*renorm"),
        ({"capacity": 1.0, "capacity_scope": "rank"}, "IG452", "would change with the layout"),
    ],
)
def test_options_that_cannot_be_right_are_refused_by_name(changes: dict, code: str, words: str) -> None:
    with pytest.raises(ModelError, match=f"{code}(.|\n)*{words}"):
        replace(PLAIN, **changes)


@pytest.mark.parametrize(("layout", "near"), [("dp3 ep3", "ep1"), ("dp8 ep8", "ep4")])
def test_experts_that_ep_cannot_cut_are_refused(layout: str, near: str) -> None:
    with pytest.raises(ModelError, match=f"IG453(.|\n)*nearest that does is {near}"):
        made(PLAIN, Mesh.unbound(layout, rank=1))


def test_the_bias_of_the_choice_stays_in_fp32() -> None:
    layer = MoE(HIDDEN, replace(PLAIN, choice_bias=True), Mesh.unbound("1"), key=rng.key(1, "moe"))
    assert layer.choice_bias is not None
    layer.choice_bias += 0.501
    before = layer.choice_bias.clone()
    assert layer.to(torch.bfloat16).router.weight.dtype == torch.bfloat16
    assert torch.equal(layer.choice_bias, before)
    assert layer.choice_bias is dict(layer.named_buffers())["choice_bias"]
    assert layer.double().choice_bias.dtype == torch.float64
