"""What passes between stages is described once, and read as it was written; a change of shape is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isograd.core.mesh import Mesh
from isograd.errors import PipelineError
from isograd.pipeline.mail import DTYPES, HEADER, Form, Known, Mail, P2PGroups
from isograd.pipeline.schedule import Action, build

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
FORMS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES), st.booleans()), max_size=6).map(lambda t: Form(tuple(t)))
MICRO = ("shapes of a micro-batch",)


@given(FORMS)
def test_a_form_is_read_as_it_was_written(form: Form) -> None:
    numbers = form.numbers()
    assert Form.read(numbers + [0] * (HEADER - len(numbers))) == form
    assert Form.read(torch.tensor(numbers + [0] * HEADER).tolist()) == form


def test_a_form_tells_shape_dtype_and_gradient_and_makes_room() -> None:
    tensors = [torch.zeros(2, 3, requires_grad=True), torch.zeros((), dtype=torch.int64)]
    form = Form.of(tensors)
    assert form.tensors == (((2, 3), torch.float32, True), ((), torch.int64, False))
    assert form.gradients().tensors == (((2, 3), torch.float32, False),)
    assert Form.of(form.empty(torch.device("cpu"))).gradients() == Form(())
    assert [(t.shape, t.dtype) for t in form.empty(torch.device("cpu"))] == [(t.shape, t.dtype) for t in tensors]


def mail(known: Known, micro_batches: int = 1, shapes: list[object] | None = None) -> Mail:
    mesh = Mesh("pp2")
    schedule = build("gpipe", 2, 1, micro_batches)
    return Mail(schedule, P2PGroups.of_mesh(mesh), mesh.device, known, shapes or [MICRO] * micro_batches)


def shapes_of_every_kind() -> list[list[object]]:
    """Three micro-batches of two shapes, scalars and empty tensors among them; then gradients back; on rank 1."""
    known: Known = {}
    shapes = [(3,), (0,), (3,)]
    post = mail(known, 3, shapes)
    sent = [
        [torch.full(shape, float(i)).requires_grad_(), torch.full((), i), torch.zeros(shape, dtype=torch.bool)]
        for i, shape in enumerate(shapes)
    ]
    if post.group.index == 0:
        for micro, tensors in enumerate(sent):
            post.send(Action("F", 0, micro), tensors)
        back = [post.receive(Action("B", 1, micro)) for micro in range(3)]
        post.finish()
        return [[float(t.sum()) for t in tensors] for tensors in back] + [len(known)]
    got = [post.receive(Action("F", 0, micro)) for micro in range(3)]
    for micro, tensors in enumerate(got):
        post.send(Action("B", 1, micro), [tensors[0].detach() * 2])
    post.finish()
    kinds = [[(tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors] for tensors in got]
    values = [[float(t.detach().sum()) for t in tensors] for tensors in got]
    return [kinds, values, len(known)]


def test_activations_go_forward_and_gradients_come_back_in_order(worlds) -> None:
    first, second = worlds(2).run(shapes_of_every_kind, timeout=15)
    assert first == [[0.0], [0.0], [12.0], 2]
    kinds, values, forms = second
    assert [k[0] for k in kinds] == [((n,), "torch.float32", True) for n in (3, 0, 3)]
    assert [k[1:] for k in kinds] == [[((), "torch.int64", False), ((n,), "torch.bool", False)] for n in (3, 0, 3)]
    assert values == [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [6.0, 2.0, 0.0]]
    assert forms == 2  # one header for each kind of micro-batch


def refused(tensors: list[torch.Tensor], known: Known) -> str:
    mesh = Mesh.unbound("pp2")
    post = Mail(build("gpipe", 2, 1, 1), P2PGroups.of_mesh(mesh), mesh.device, known, [MICRO])
    with pytest.raises(PipelineError) as error:
        post.send(Action("F", 0, 0), tensors)
    return f"{error.value}"


def test_a_changed_shape_dtype_or_gradient_is_refused_with_both() -> None:
    known = {(0, MICRO): Form.of([torch.zeros(2, 3)])}
    for other in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, requires_grad=True)):
        text = refused([other], known)
        assert text.startswith("IG803: stage 0 returned other shapes than before")
        assert str(Form.of([other]).tensors) in text
        assert "((2, 3), torch.float32, False)" in text
        assert "pp0" in text


@pytest.mark.parametrize(
    "tensors", [[torch.zeros(2, dtype=torch.complex64)], [torch.zeros(1, 1, 1)] * 12], ids=["complex", "many"]
)
def test_what_a_header_cannot_describe_is_refused(tensors: list[torch.Tensor]) -> None:
    assert refused(tensors, {}).startswith("IG802: the output of stage 0 cannot be described")
