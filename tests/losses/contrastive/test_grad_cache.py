"""What GradCache promises beside its gradients: messages, draws, precisions, a second loss, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isograd as ig
from isograd.comm import raw
from isograd.core.mesh import Mesh
from isograd.engine import reducer
from isograd.errors import ContrastiveError, EngineError, IsogradError
from isograd.losses.contrastive import AuxiliaryLoss, FullBatchLoss, GradientCache, InfoNCE, SigLIP, row_ids
from isograd.losses.contrastive.chunks import Budget
from tests.losses.contrastive.toys import DIM, Found, Towers, assert_same, batch, one_device, sgd, truth, whole


def towers(layout: str, loss: Any, **more: Any) -> tuple[Towers, ig.Engine, GradientCache]:
    mesh = Mesh(layout)
    model = Towers(loss(mesh), mesh, **more)
    engine = ig.Engine(model, mesh, sgd, bucket_mb=0.0005)
    return model, engine, GradientCache(engine, model.loss, encode=[model.query, model.document], chunk=3)


# -- messages


def messages(layout: str, chunks: list[int]) -> list[dict[str, Any]]:
    """What crosses the wire in a step, for some losses and chunks."""
    losses = {
        "one way": (lambda mesh: InfoNCE(mesh, learn_scale=True, tile=2), False),
        "both ways": (lambda mesh: InfoNCE(mesh, both=True, tile=1), False),
        "both ways, ids": (lambda mesh: InfoNCE(mesh, both=True), True),
        "ring": (lambda mesh: InfoNCE(mesh, ring=True, tile=1), False),
        "sigmoid": (SigLIP, False),
    }
    found = []
    exchange, reduce_rows = raw.exchange, reducer.reduce_rows
    seen = {"exchanges": 0, "reductions": 0}

    def counting(*args: Any, **more: Any) -> Any:
        seen["exchanges"] += 1
        return exchange(*args, **more)

    def reducing(*args: Any, **more: Any) -> Any:
        seen["reductions"] += 1
        return reduce_rows(*args, **more)

    raw.exchange, reducer.reduce_rows = counting, reducing
    try:
        for chunk in chunks:
            for name, (loss, ids) in losses.items():
                for tied in (True, False):
                    _, engine, cache = towers(layout, loss, tied=tied)
                    cache.chunk = chunk
                    mine = batch(engine.mesh.index("dp"), 0, "uneven")
                    seen |= {"exchanges": 0, "reductions": 0}
                    cache.backward(*mine.towers, ids=mine.ids if ids else None)
                    engine.step()
                    found.append(
                        {"loss": name, "learns": len(engine.plan.slots), "buckets": len(engine.plan.buckets), **seen}
                    )
    finally:
        raw.exchange, reducer.reduce_rows = exchange, reduce_rows
    return found


FORMULA = {  # beside the reductions of buckets: of W ranks
    # Counts; columns there, their gradients back. On two ranks: rows and columns there, then rows' totals and weights.
    "one way": lambda w: 1 + (3 if w == 2 else 2),
    "both ways": lambda w: 1 + 2 * 2,  # rows of one direction are the columns of the other
    "both ways, ids": lambda w: 1 + 2 * 3,  # ids travel beside the columns
    "ring": lambda w: 1 + (w - 1) + (2 * w - 1),
    "sigmoid": lambda w: 1 + (w - 1) + (2 * w - 1),
}


@pytest.mark.medium
def test_messages_follow_the_formula_whatever_the_chunks_tiles_and_towers(worlds) -> None:
    for ranks, layout, chunks in ((2, "dp2 zero1", [1, 4]), (4, "dp4 zero0", [4])):
        for found in worlds(ranks).run(messages, layout, chunks):
            for learns in {f["learns"] for f in found}:
                same = [f for f in found if f["learns"] == learns]
                rest = {f["exchanges"] - f["buckets"] - FORMULA[f["loss"]](ranks) for f in same}
                assert len(rest) == 1, f"{layout}: what engine.step sends does not depend on losses and chunks: {same}"
            assert all(f["reductions"] == f["buckets"] > 1 for f in found)
    for found in worlds(2).run(messages, "dp2 zero3", [4]):
        assert all(f["reductions"] == f["buckets"] > 1 for f in found)


# -- exceptions


def stumbling(layout: str, in_replay: bool | None) -> tuple[list[str], dict[str, Tensor]]:
    """An encoder raises on rank 1, in its first pass or in a replay; both ranks catch, discard, and do it again."""
    model, engine, cache = towers(layout, InfoNCE, tied=False)
    said: list[str] = []

    def encode(*x: Any) -> Tensor:
        if not said and torch.is_grad_enabled() is in_replay and engine.mesh.rank == 1:
            raise KeyError("stumbled")
        return model.query(*x)  # type: ignore[no-any-return]

    cache.encode = [encode, model.document]
    mine = batch(engine.mesh.index("dp"), 0, "uneven").towers[:2]
    if in_replay is not None:
        try:
            cache.backward(*mine)
            engine.step()
        except (KeyError, IsogradError) as error:
            said.append(str(error))
            engine.discard()
    cache.backward(*mine)
    return said, {name: gradient.clone() for name, gradient in engine.grads().items()}


@pytest.mark.parametrize("in_replay", [False, True])
def test_ranks_whose_encoder_fails_in_either_pass_go_on_together(worlds, in_replay: bool) -> None:
    """What the next step gathers is never taken for vectors of the step that failed."""
    right = worlds(2).run(stumbling, "dp2 zero1", None)
    found = worlds(2).run(stumbling, "dp2 zero1", in_replay)
    assert [len(said) for said, _ in found] == [1, 1], [said for said, _ in found]
    assert "stumbled" in found[1][0][0]
    assert "rank 1" in found[0][0][0]
    assert in_replay or "IG974" in found[0][0][0]
    for (_, gradients), (_, true) in zip(found, right, strict=True):
        assert true and all(torch.equal(gradients[name], true[name]) for name in true)


# -- random draws


class Dropping(nn.Module):
    """Draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 16)
        self.noise: nn.Module = nn.Dropout(0.3)
        self.last = nn.Linear(16, DIM)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.noise(torch.tanh(self.first(x))))  # type: ignore[no-any-return]


class Rogue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


def rows(n: int, seed: int = 0, features: int = 4) -> Tensor:
    return torch.randn(n, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alone(model: nn.Module, loss: nn.Module | None = None, **more: Any) -> tuple[ig.Engine, GradientCache]:
    """In a world of one."""
    mesh = Mesh("dp1")
    engine = ig.Engine(model, mesh, sgd)
    return engine, GradientCache(engine, loss or InfoNCE(mesh), encode=model, **{"chunk": 2, **more})


def test_dropout_of_the_replay_is_that_of_the_first_pass_and_the_next_draws_go_on_from_there() -> None:
    x, y = rows(7), rows(7, 1)
    model = Dropping()
    engine, cache = alone(model)
    torch.manual_seed(11)
    cache.backward(x, y)
    after = torch.rand(3)
    found = {n: g.clone() for n, g in engine.grads().items()}
    plain = Dropping()
    torch.manual_seed(11)
    vectors = [F.normalize(torch.cat([plain(part) for part in t.split(2)]), dim=1) for t in (x, y)]
    F.cross_entropy(20.0 * vectors[0] @ vectors[1].T, torch.arange(7)).backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, rtol=1e-12, atol=1e-14), name
    torch.manual_seed(11)
    for t in (x, y):
        for part in t.split(2):
            Dropping.forward(plain, part)
    assert torch.equal(after, torch.rand(3)), "the replay leaves no trace in the generator"


def test_graphs_are_kept_up_to_a_budget_and_change_no_bit() -> None:
    x, y, seen = rows(7), rows(7, 1), []
    for keep_mb in (0.0, 0.003, 9.0):
        model, calls = Dropping(), []
        model.register_forward_hook(lambda *_, calls=calls: calls.append(torch.is_grad_enabled()))
        engine, cache = alone(model, keep_mb=keep_mb)
        torch.manual_seed(11)
        for _ in range(2):
            cache.backward(x, y)
        seen.append((dict(engine.grads().items()), torch.rand(3), calls))
    for gradients, draws, _ in seen[1:]:
        assert all(torch.equal(gradients[name], g) for name, g in seen[0][0].items())
        assert torch.equal(draws, seen[0][1])
    none, some, all_of_them = (calls for *_, calls in seen)
    assert none == ([False] * 7 + [True] + [True] * 7) * 2, "the very last chunk goes backward at once"
    assert len(all_of_them) == 16
    assert all(all_of_them)
    assert 16 < len(some) < 30
    kept = some.index(False) - 1  # the one before was too large
    assert kept > 0
    assert len(some) == 2 * (16 - kept - 1)


class Weighted(nn.Module):
    """exp(x @ weight + the column sums of table @ weight): a graph holds the rows, the table and the exponential."""

    def __init__(self, table: Callable[[], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows(4))
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight + (self.table() @ self.weight).sum(0)).exp()  # type: ignore[no-any-return]


def diagonal(layout: str) -> Tensor:
    ones = torch.ones(4, dtype=torch.float64)
    if layout == "csr":
        return torch.sparse_csr_tensor(torch.arange(5), torch.arange(4), ones)
    return torch.diag(ones).to_sparse() if layout == "coo" else torch.diag(ones)


@pytest.mark.parametrize(("layout", "numbers"), [("dense", 16), ("coo", 2 * 4 + 4), ("csr", 5 + 4 + 4)])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_only_memory_that_a_graph_alone_holds_is_counted_and_once(layout: str, numbers: int) -> None:
    """Buffers and inputs are there anyway; what an earlier chunk's graph holds is counted with that chunk."""
    x, shared = rows(8), diagonal(layout)
    size, result = 8 * numbers, 8 * 2 * 4  # bytes of the table and of a chunk's exponential

    def spent(table: Callable[[], Tensor], buffer: Tensor | None = None) -> list[float]:
        """By each of three chunks."""
        model = Weighted(table)
        model.register_buffer("buffer", buffer)
        budget, graphs, found = Budget.of(1.0, model, [{"x": x}]), [], []
        for chunk in x[:6].split(2):
            before = budget.left
            vectors, fits, budget = budget.encode_kept(model, chunk)
            assert fits
            graphs.append(vectors)
            found.append(before - budget.left)
        return found

    assert spent(lambda: shared, shared) == [result] * 3
    assert spent(lambda: shared) == [result + size, result, result]
    assert spent(lambda: diagonal(layout)) == [result + size] * 3


def test_sparse_activations_may_be_kept_and_change_no_bit() -> None:
    x, seen = rows(5), []
    for keep_mb in (0.0, 9.0):
        model = Weighted(lambda: diagonal("coo"))
        engine, cache = alone(model, keep_mb=keep_mb)
        cache.backward(x, x.flip(0))
        seen.append(dict(engine.grads().items())["weight"])
    assert torch.equal(*seen)


def test_inputs_that_an_encoder_changes_are_named_as_a_cause() -> None:
    class Doubling(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2.0))

    engine, cache = alone(Doubling(), keep_mb=9.0)
    with pytest.raises(ContrastiveError, match="or its inputs, in place") as error:
        cache.backward(rows(5), rows(5, 1))
    assert error.value.code == "IG972"
    engine.discard()


def test_a_kept_activation_that_is_changed_is_not_used() -> None:
    kept: list[Tensor] = []

    class Careless(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            for other in kept:
                other.mul_(2.0)
            kept[:] = [hidden.detach()]
            return self.last(hidden)  # type: ignore[no-any-return]

    engine, cache = alone(Careless(), keep_mb=9.0)
    with pytest.raises(ContrastiveError, match="IG972"):
        cache.backward(rows(5), rows(5, 1))
    with pytest.raises(EngineError, match="IG550"):
        engine.step()
    engine.discard()


def test_a_module_that_draws_differently_is_refused_also_where_it_begins_to_later() -> None:
    model = Dropping()
    engine, cache = alone(model)
    cache.backward(rows(5), rows(5, 1))
    engine.step()
    model.noise = Rogue()
    with pytest.raises(ContrastiveError, match="chunk") as error:
        cache.backward(rows(5), rows(5, 1))
    assert error.value.code == "IG965"


def test_an_encoder_of_torch_takes_one_path_with_and_without_a_graph() -> None:
    """nn.TransformerEncoderLayer has a fast path for evaluation, of other roundings."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean(1)  # type: ignore[no-any-return]

    _, cache = alone(Pooled())
    x = torch.randn(5, 3, 8)
    cache.backward(x, x + 0.1)
    assert torch.backends.mha.get_fastpath_enabled()


# -- precision


def half(kind: str) -> tuple[dict[str, Tensor], list[bool]]:
    """Gradients of an uneven batch in half precision, and which of two steps were skipped."""
    mesh = Mesh("dp2 zero1")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, DIM))
    model = model.half() if kind == "fp16" else model
    scale = ig.LossScale(2.0**60 if kind == "overflow" else 2.0**10) if kind != "bf16" else None
    engine = ig.Engine(model, mesh, sgd, loss_scale=scale)
    cache = GradientCache(engine, InfoNCE(mesh, 5.0), encode=model, chunk=2)
    n = (5, 2)[mesh.index("dp")]
    x, y = (rows(n, seed + 10 * mesh.index("dp")).to(model[0].weight.dtype) for seed in (0, 1))
    skipped = []
    for step in range(2):
        low = {"bf16": torch.bfloat16, "overflow": torch.float16}.get(kind)
        with torch.autocast("cpu", low, enabled=low is not None):
            cache.backward(x, y)
        if step == 0:
            found = {n: g.double() for n, g in engine.grads().items()}
        skipped.append(engine.step().skipped)
    return found, skipped


def test_half_precision_is_near_and_an_overflow_skips_the_step_on_all_ranks(worlds) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, DIM)).double()
    x, y = (torch.cat([rows(5, seed), rows(2, seed + 10)]) for seed in (0, 1))
    near = F.normalize(model(x), dim=1) @ F.normalize(model(y), dim=1).T
    F.cross_entropy(5.0 * near, torch.arange(7)).backward()
    for kind in ("bf16", "fp16"):
        for found, skipped in worlds(2).run(half, kind):
            assert skipped == [False, False]
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                assert float((found[name] - parameter.grad).norm()) < 0.03 * float(parameter.grad.norm()), (kind, name)
    assert [skipped for _, skipped in worlds(2).run(half, "overflow")] == [[True, True]] * 2


# -- other losses beside it


class Reader(nn.Module):
    """An encoder with a head that predicts tokens, too."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.towers = Towers(InfoNCE(mesh, 7.0, learn_scale=True), mesh)
        self.head = nn.Linear(DIM, 29).double()

    def masked(self, tokens: Tensor, samples: Tensor) -> Tensor:
        logits = self.head(self.towers.query(tokens, samples))
        return F.cross_entropy(logits, tokens[:, 0]) if len(tokens) else logits.sum()


def beside(layout: str) -> Found:
    """Two micro-batches of a second loss, of uneven lengths; none on the rank that has no rows."""
    mesh = Mesh(layout)
    model = Reader(mesh)
    engine = ig.Engine(model, mesh, sgd)
    cache = GradientCache(engine, model.towers.loss, encode=model.towers.query, chunk=3)
    mine = batch(mesh.index("dp"), 0, "empty")
    parts = [(tokens, samples) for tokens, samples in zip(*(t.tensor_split(2) for t in mine.towers[0]), strict=True)]
    second = AuxiliaryLoss([(lambda p=p: model.masked(*p), len(p[0])) for p in parts], share=0.3)
    cache.backward(*mine.towers, second=second)
    found = Found({n: g.clone() for n, g in engine.grads().items()})
    found.loss = engine.step().loss
    return found


@pytest.mark.medium
def test_a_second_loss_counts_by_its_own_weight_and_both_are_reduced_once(worlds) -> None:
    mesh = Mesh.unbound("dp1")
    for ranks, layout in ((2, "dp2 zero1"), (4, "dp4"), (4, "dp4 zero3")):
        model, one = Reader(mesh), whole([batch(r, 0, "empty") for r in range(ranks)])
        vectors = [model.towers.query(*inputs) for inputs in one.towers]
        loss = truth(model.towers.loss, vectors, one) + 0.3 * model.masked(*one.towers[0])
        loss.backward()
        true = Found({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, float(loss.detach()))
        for found in worlds(ranks).run(beside, layout):
            assert_same(found, true, layout)


def by_hand(layout: str) -> Found:
    """A loss without GradCache: one graph on each rank, under the engine."""
    model, engine, _ = towers(layout, lambda mesh: InfoNCE(mesh, 7.0, learn_scale=True, both=True))
    mine = batch(engine.mesh.index("dp"), 0, "uneven")
    vectors = [encode(*inputs) for encode, inputs in zip((model.query, model.document), mine.towers, strict=True)]
    engine.backward(model.loss(vectors), weight=len(vectors[0]))
    found = Found({n: g.clone() for n, g in engine.grads().items()})
    found.loss = engine.step().loss
    return found


def test_losses_work_without_a_cache(worlds) -> None:
    true = one_device(lambda mesh: InfoNCE(mesh, 7.0, learn_scale=True, both=True), 2, rows="uneven")
    for found in worlds(2).run(by_hand, "dp2 zero3"):
        assert_same(found, true, "by hand")


def test_two_cached_batches_in_a_step_are_two_batches_and_a_frozen_tower_gets_nothing() -> None:
    mesh = Mesh("dp1")
    model = Towers(InfoNCE(mesh, 7.0, learn_scale=True), mesh, tied=False)
    model.document.requires_grad_(False)
    engine = ig.Engine(model, mesh, sgd)
    cache = GradientCache(engine, model.loss, encode=[model.query, model.document], chunk=2)
    plain = Towers(InfoNCE(mesh, 7.0, learn_scale=True), mesh, tied=False)
    total = torch.zeros((), dtype=torch.float64)
    for rank in (0, 2):
        part = batch(rank, 0, "empty")
        with engine.no_sync():
            cache.backward(*part.towers)
        vectors = [encode(*inputs) for encode, inputs in zip((plain.query, plain.document), part.towers, strict=True)]
        total = total + truth(plain.loss, vectors, part) * len(vectors[0])
    (total / 12).backward()
    found = dict(engine.grads().items())
    assert not any(name.startswith("document") for name in found)
    for name, gradient in found.items():
        expected = plain.get_parameter(name).grad
        assert expected is not None
        assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-15), name


def test_equal_rows_have_equal_ids_whatever_their_pads() -> None:
    tokens, mask = torch.tensor([[5, 6, 0], [5, 6, 9], [5, 6, 9]]), torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]])
    ids = row_ids(tokens, mask)
    assert ids[0] == ids[1] != ids[2]
    assert row_ids(tokens[:, :2])[0] == ids[0]


# -- refusals


def test_what_could_not_be_exact_is_refused_by_name() -> None:
    mesh = Mesh("dp1")

    def code(run: Any) -> str:
        with pytest.raises(ContrastiveError) as error:
            run()
        return error.value.code

    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    assert code(lambda: alone(normed)) == "IG968"
    normed.eval()
    _, cache = alone(normed)
    cache.backward(rows(5), rows(5, 1))
    normed.train()
    assert code(lambda: cache.backward(rows(5), rows(5, 1))) == "IG968"
    assert code(lambda: alone(Dropping(), InfoNCE(mesh, learn_scale=True))) == "IG966"
    assert code(lambda: alone(Dropping(), chunk=0)) == "IG967"
    assert code(lambda: alone(Dropping(), keep_mb=-1.0)) == "IG973"
    for wrong in (math.nan, "5", None):
        assert code(lambda wrong=wrong: alone(Dropping(), keep_mb=wrong)) == "IG973"
    cut = ig.Engine(Dropping(), Mesh("dp1 zero3"), sgd)
    assert code(lambda: GradientCache(cut, InfoNCE(mesh), keep_mb=1.0)) == "IG973"
    _, cache = alone(Dropping())
    assert code(lambda: cache.backward(rows(5), rows(4))) == "IG960"
    assert code(lambda: cache.backward(rows(5))) == "IG960"
    assert code(lambda: cache.backward((rows(5), rows(4)), rows(5))) == "IG961"
    assert code(cache.backward) == "IG963"
    cache.encode = [torch.sum, torch.sum]
    assert code(lambda: cache.backward(rows(5), rows(5))) == "IG962"
    cache.encode = [lambda x: x[:, : 1 + len(x)], lambda x: x]  # the last chunk has one row
    assert code(lambda: cache.backward(rows(5), rows(5))) == "IG962"


class HalfLoss(InfoNCE):
    """Its value has three digits."""

    def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
        return super().forward(*args, **keywords).bfloat16()


def test_a_loss_in_half_precision_is_refused_whose_replays_would_be_scaled_otherwise() -> None:
    _, cache = alone(Dropping(), HalfLoss(Mesh("dp1")))
    with pytest.raises(EngineError) as error:
        cache.backward(rows(5), rows(5, 1))
    assert error.value.code == "IG567"
    cache.engine.discard()


def mistakes_of_one_rank() -> tuple[list[str], Found]:
    """One rank gives wrong inputs, both refuse them, and the step that goes on is right."""
    _, engine, cache = towers("dp2", lambda mesh: InfoNCE(mesh, 7.0))
    mine = batch(engine.mesh.index("dp"), 0, "uneven")
    cache.backward(*mine.towers)
    wrong = mine.towers[0] if engine.mesh.rank else tuple(t[:-1] for t in mine.towers[0])
    torn = mine.towers[0] if engine.mesh.rank else (mine.towers[0][0], mine.towers[0][1][:-1])
    codes = []
    for first in (wrong, torn):
        with pytest.raises(ContrastiveError) as error:
            cache.backward(first, *mine.towers[1:])
        assert "rank 0" in str(error.value)
        codes.append(error.value.code)
    found = Found({n: g.clone() for n, g in engine.grads().items()})
    found.loss = engine.step().loss
    return codes, found


def test_wrong_inputs_of_one_rank_are_refused_on_all_and_leave_the_step_as_it_was(worlds) -> None:
    """FAILURES A1, C: an exception inside a backward makes the step unusable, so inputs are checked before it."""
    true = one_device(lambda mesh: InfoNCE(mesh, 7.0), 2, rows="uneven")
    for codes, found in worlds(2).run(mistakes_of_one_rank):
        assert codes == ["IG960", "IG961"]
        assert_same(found, true, "after refusals")


def uneven_copies() -> str:
    _, engine, cache = towers("cp2 ulysses", lambda mesh: FullBatchLoss(mesh, lambda q, d: (q * d).sum()))
    try:
        cache.backward(*batch(engine.mesh.rank, 0, "uneven").towers)
    except ContrastiveError as error:
        return error.code
    return "not refused"


def test_other_rows_on_a_rank_of_the_same_cp_group_are_refused(worlds) -> None:
    assert worlds(2).run(uneven_copies) == ["IG964", "IG964"]
