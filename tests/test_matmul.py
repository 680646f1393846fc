"""Linear maps by oneDNN are torch's: values, gradients, hooks and refusals, where it is faster and where it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from isograd import matmul

_FASTER, _TWICE = matmul._faster, matmul._twice
ROWS, INPUTS, OUTPUTS = 256, 192, 224  # above matmul.LEAST


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """As on a processor where oneDNN is faster: the shapes of the products that it made."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this build of torch has no oneDNN")
    made: list[tuple[int, ...]] = []
    own = matmul._times_transposed

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made.append((*x.shape, len(weight)))
        return own(x, weight, bias)

    monkeypatch.setattr(matmul, "_faster", lambda: True)
    monkeypatch.setattr(matmul, "_twice", lambda: False)
    monkeypatch.setattr(matmul, "_times_transposed", noted)
    yield made


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaves(*shape: int, bias: bool, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    x, weight = numbers(*shape, INPUTS, dtype=dtype), numbers(OUTPUTS, INPUTS, seed=1, dtype=dtype)
    shift = numbers(OUTPUTS, seed=2, dtype=dtype) if bias else None
    return [t if t is None else t.requires_grad_() for t in (x, weight, shift)]


def differentiated(function: Callable[..., Tensor], given: list[Tensor | None]) -> list[Tensor]:
    y = function(*given)
    y.backward(numbers(*y.shape, seed=3, dtype=y.dtype))
    return [y.detach(), *(t.grad for t in given if t is not None and t.grad is not None)]


def bound(exact: Tensor) -> float:
    """Of a sum of up to 256 products in fp32, however it is ordered."""
    return 256 * torch.finfo(torch.float32).eps * float(exact.abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(ROWS,), (2, ROWS // 2), (2, 4, ROWS // 8)])
def test_values_and_gradients_are_those_of_fp64(calls: list[Any], shape: tuple[int, ...], bias: bool) -> None:
    found = differentiated(matmul.linear, leaves(*shape, bias=bias))
    exact = differentiated(F.linear, leaves(*shape, bias=bias, dtype=torch.float64))
    assert len(calls) == 2  # forward, and the gradient of x
    for one, truth in zip(found, exact, strict=True):
        assert one.shape == truth.shape
        assert float((one.double() - truth).abs().max()) <= bound(truth)


def test_layouts_of_memory_make_no_difference(calls: list[Any]) -> None:
    x, weight = numbers(ROWS, INPUTS), numbers(OUTPUTS, INPUTS, seed=1)
    truth = x.double() @ weight.double().t()
    wide = numbers(ROWS, 2 * INPUTS)
    wide[:, ::2] = x
    given = [x, x.t().contiguous().t(), wide[:, ::2]]
    for one in given:
        for other in (weight, weight.t().contiguous().t()):
            assert float((matmul.multiply(one, other.t()).double() - truth).abs().max()) <= bound(truth)
    assert len(calls) == 6
    spread = numbers(1, INPUTS).expand(OUTPUTS, INPUTS)  # rows in the same memory: torch's own
    torch.testing.assert_close(matmul.multiply(x, spread.t()), x @ spread.t(), rtol=0, atol=0)
    assert len(calls) == 6


@pytest.mark.parametrize("kind", ["strided", "expanded", "one", "negated"])
def test_a_bias_that_lies_otherwise_is_torchs(calls: list[Any], kind: str) -> None:
    x, weight = numbers(ROWS, INPUTS), numbers(OUTPUTS, INPUTS, seed=1)
    bias = {
        "strided": numbers(OUTPUTS, 3, seed=2)[:, 1],
        "expanded": numbers(1, seed=2).expand(OUTPUTS),
        "one": numbers(1, seed=2),
        "negated": torch.complex(numbers(OUTPUTS), numbers(OUTPUTS, seed=2)).conj().imag,
    }[kind]
    found = matmul.linear(x, weight, bias)
    truth = x.double() @ weight.double().t() + bias.double()
    assert float((found.double() - truth).abs().max()) <= bound(truth)
    assert not calls
    matmul.linear(x, weight, numbers(2 * OUTPUTS, seed=2)[7 : OUTPUTS + 7])
    assert len(calls) == 1


@pytest.mark.parametrize("shape", [(ROWS,), (2, ROWS // 2)])
def test_what_it_returns_can_be_changed_in_place(calls: list[Any], shape: tuple[int, ...]) -> None:
    def changed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *of: function(*of).relu_()

    found = differentiated(changed(matmul.linear), leaves(*shape, bias=True))
    exact = differentiated(changed(F.linear), leaves(*shape, bias=True, dtype=torch.float64))
    assert len(calls) == 2
    for one, truth in zip(found, exact, strict=True):
        assert one.shape == truth.shape and float((one.double() - truth).abs().max()) <= bound(truth)


def test_nan_and_infinity_go_through(calls: list[Any]) -> None:
    x, weight = numbers(ROWS, INPUTS), numbers(OUTPUTS, INPUTS, seed=1)
    x[3, 5], x[7, 2] = torch.nan, torch.inf
    y = matmul.linear(x, weight)
    assert calls and y[3].isnan().all() and y[7].isinf().all()
    assert y[[r for r in range(ROWS) if r not in (3, 7)]].isfinite().all()


def test_what_needs_no_gradient_gets_none(calls: list[Any]) -> None:
    x, weight, bias = (t.detach() for t in leaves(ROWS, bias=True) if t is not None)
    for wanted in range(3):
        given = [x.clone(), weight.clone(), bias.clone()]
        given[wanted].requires_grad_()
        matmul.linear(*given).sum().backward()
        assert [t.grad is not None for t in given] == [i == wanted for i in range(3)]
    assert not matmul.linear(x, weight).requires_grad
    with torch.no_grad():
        assert not matmul.linear(*leaves(ROWS, bias=True)).requires_grad  # type: ignore[arg-type]


def test_multiply_leaves_what_is_differentiated_to_autograd(calls: list[Any]) -> None:
    x, weight, _ = leaves(ROWS, bias=False)
    assert x is not None and weight is not None
    assert matmul.multiply(x, weight.t()).requires_grad
    assert not calls


def test_a_gradient_can_be_differentiated_again(calls: list[Any]) -> None:
    ends = []
    for function, dtype in ((matmul.linear, torch.float32), (F.linear, torch.float64)):
        x, weight, _ = leaves(ROWS, bias=False, dtype=dtype)
        assert x is not None and weight is not None
        first = torch.autograd.grad(function(x, weight).square().sum(), [x, weight], create_graph=True)
        ends.append(torch.autograd.grad(sum(g.square().sum() for g in first), [x, weight]))  # type: ignore[arg-type]
    assert calls
    for one, truth in zip(*ends, strict=True):
        assert float((one.double() - truth).norm() / truth.norm()) < 1e-5


def test_a_weight_that_was_changed_in_place_is_refused_in_backward(calls: list[Any]) -> None:
    x, weight, _ = leaves(ROWS, bias=False)
    assert x is not None and weight is not None
    y = matmul.linear(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_derivatives_along_with_values_are_torchs(calls: list[Any]) -> None:
    x, weight, along = numbers(ROWS, INPUTS), numbers(OUTPUTS, INPUTS, seed=1), numbers(ROWS, INPUTS, seed=2)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(matmul.linear(forward_ad.make_dual(x, along), weight)).tangent
    assert found is not None and not calls
    torch.testing.assert_close(found, F.linear(along, weight))


def test_the_last_thread_puts_torchs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_twice", lambda: True)
    theirs, entered, leave = F.linear, Event(), Event()

    def other() -> None:
        with matmul.everywhere():
            entered.set()
            leave.wait(60)

    with matmul.everywhere():
        thread = Thread(target=other)
        thread.start()
        assert entered.wait(60)
    assert F.linear is not theirs  # the other thread is still in its step
    leave.set()
    thread.join()
    assert F.linear is theirs


class Mine(Tensor):
    pass


@pytest.mark.parametrize(
    "case", ["small", "fp64", "bf16", "meta", "one row", "subclass", "autocast", "counted", "functorch", "replaced"]
)
def test_everything_else_is_torchs(calls: list[Any], monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    x, weight = numbers(ROWS, INPUTS), numbers(OUTPUTS, INPUTS, seed=1)
    if case == "small":
        x, weight = x[:8], weight[:8]
    elif case in ("fp64", "bf16"):
        dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}[case]
        x, weight = x[:64].to(dtype), weight.to(dtype)
    elif case == "meta":
        x, weight = x.to("meta"), weight.to("meta")
    elif case == "one row":
        x = numbers(1 << 16)
        weight = numbers(130, 1 << 16)
    elif case == "subclass":
        weight = weight.as_subclass(Mine)
    if case == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert matmul.linear(x, weight).dtype == torch.bfloat16
    elif case == "counted":
        with FlopCounterMode(display=False) as counter:
            matmul.linear(x, weight)
        assert counter.get_total_flops() == 2 * ROWS * INPUTS * OUTPUTS
    elif case == "functorch":
        torch.testing.assert_close(torch.vmap(lambda row: matmul.linear(row, weight))(x[None])[0], F.linear(x, weight))
    elif case == "replaced":
        monkeypatch.setattr(F, "linear", lambda *_: "theirs")
        assert matmul.linear(x, weight) == "theirs"  # type: ignore[comparison-overlap]
    else:
        found, plain = matmul.linear(x, weight), F.linear(x, weight)
        assert type(found) is type(plain) and found.dtype == plain.dtype
        if case != "meta":
            assert torch.equal(found, plain)
    assert not calls


def test_no_token_at_all(calls: list[Any]) -> None:
    x, weight, bias = leaves(0, bias=True)
    found = differentiated(matmul.linear, [x, weight, bias])
    assert found[0].shape == (0, OUTPUTS) and not calls
    assert all(g.count_nonzero() == 0 for g in found[1:])


@pytest.mark.parametrize("own", [False, True])
def test_compiled_blocks_keep_torchs_products_and_break_no_graph(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    from torch._dynamo.utils import counters

    if own:  # the processor's answer, which is read from a file
        monkeypatch.setattr(matmul, "_faster", _FASTER)
        monkeypatch.setattr(matmul, "_twice", _TWICE)
    torch._dynamo.reset()
    module = nn.Module()
    module.weight = nn.Parameter(numbers(OUTPUTS, INPUTS, seed=1))
    module.forward = lambda x: matmul.linear(x, module.weight)  # type: ignore[method-assign]
    counters.clear()
    compiled = torch.compile(module.forward, backend="aot_eager", fullgraph=True)
    x = numbers(ROWS, INPUTS)
    torch.testing.assert_close(compiled(x), F.linear(x, module.weight))
    assert not calls and not counters["graph_break"]


def test_weights_gradients_are_made_by_it_where_it_is_twice_as_fast(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_twice", lambda: True)
    found = differentiated(matmul.linear, leaves(ROWS, bias=True))
    exact = differentiated(F.linear, leaves(ROWS, bias=True, dtype=torch.float64))
    assert len(calls) == 3
    for one, truth in zip(found, exact, strict=True):
        assert float((one.double() - truth).abs().max()) <= bound(truth)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("at_once", [1 << 22, 10 * INPUTS, 1])
def test_products_add_to_a_sum(calls: list[Any], monkeypatch: pytest.MonkeyPatch, twice: bool, at_once: int) -> None:
    monkeypatch.setattr(matmul, "_twice", lambda: twice)
    monkeypatch.setattr(matmul, "ADDED_AT_ONCE", at_once)
    dy, x, total = numbers(ROWS, OUTPUTS), numbers(ROWS, INPUTS, seed=1), numbers(OUTPUTS, INPUTS, seed=2)
    truth = total.double() + dy.double().t() @ x.double()
    at = total.data_ptr()
    assert matmul.add(total, dy.t(), x) is total and total.data_ptr() == at
    assert float((total.double() - truth).abs().max()) <= bound(truth)
    assert len(calls) == (-(-OUTPUTS // max(1, at_once // INPUTS)) if twice else 0)


def test_products_go_where_they_belong(calls: list[Any]) -> None:
    x, weight = numbers(ROWS, INPUTS), numbers(OUTPUTS, INPUTS, seed=1)
    out = torch.full((2 * ROWS, OUTPUTS), 7.0)
    matmul.into(out[:ROWS], x, weight.t())
    assert len(calls) == 1 and bool((out[ROWS:] == 7).all())
    truth = x.double() @ weight.double().t()
    assert float((out[:ROWS].double() - truth).abs().max()) <= bound(truth)
    matmul.into(out[ROWS:], x, weight.t().double().float().contiguous())
    matmul.into(out[:8], x[:8], weight.t())  # small: torch's own
    assert len(calls) == 2 and torch.equal(out[:8], x[:8] @ weight.t())


def test_models_of_others_are_made_by_it_inside_and_torchs_outside(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.checkpoint import checkpoint

    theirs, large = F.linear, matmul.LEAST_ONCE // (INPUTS * OUTPUTS) + 1
    monkeypatch.setattr(matmul, "_twice", lambda: True)
    model = nn.Linear(INPUTS, OUTPUTS)
    with matmul.everywhere():
        model(numbers(ROWS, INPUTS))  # worth it only where the shape comes again
        assert not calls
        with matmul.everywhere():
            y = checkpoint(model, numbers(large, INPUTS).requires_grad_(), use_reentrant=False)
        y.sum().backward()  # the forward made again is the first one
        assert [shape[0] for shape in calls] == [large, large, large, OUTPUTS]
    assert F.linear is theirs
    with pytest.raises(ValueError, match="theirs"), matmul.everywhere():
        raise ValueError("theirs")
    assert F.linear is theirs
    model(numbers(large, INPUTS))
    assert len(calls) == 4

    class Seeing(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += function is theirs
            return function(*args, **kwargs or {})

    with matmul.everywhere(), Seeing() as within:
        model(numbers(large, INPUTS))
    with Seeing() as without, matmul.everywhere():
        model(numbers(large, INPUTS))
        assert F.linear is theirs
    with matmul.everywhere(), torch.backends.mkldnn.flags(enabled=False):
        model(numbers(large, INPUTS))
    assert len(calls) == 4 and within.seen == without.seen == 1
    monkeypatch.setattr(F, "linear", replaced := (lambda *_: "theirs"))
    with matmul.everywhere():
        assert F.linear is replaced


def test_the_choice_is_one_for_the_life_of_the_process() -> None:
    assert matmul._faster() is matmul._faster()
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        assert not matmul._faster()
