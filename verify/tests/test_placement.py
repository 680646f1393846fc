"""Which part of the whole a rank holds is told by its box or by its values, or it is said that it cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isograd_verify.compare.values import Place, place
from isograd_verify.record.events import Parameter

from .recordings import Held, numbers, told

WHOLE = numbers(12, 7)


def info(local: Tensor, whole: Tensor, box: list[list[int]] | None = None) -> Parameter:
    return told(Held(local, None, box=box, whole=tuple(whole.shape)), local)


def placed(local: Tensor, whole: Tensor = WHOLE, index: int = 0, holders: int = 2) -> Place | None:
    return place(local, whole, info(local, whole), index, holders)


CUTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "first rows": (0, (0, 1, 2, 3, 4, 5)),
    "last rows": (0, (6, 7, 8, 9, 10, 11)),
    "one row": (0, (3,)),
    "an uneven tail": (0, (10, 11)),
    "every other row": (0, (1, 3, 5, 7, 9, 11)),
    "fused qkv of two heads": (0, (2, 3, 6, 7, 10, 11)),
    "columns": (1, (3, 4, 5, 6)),
    "strided columns": (1, (0, 2, 4, 6)),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_cut_is_found_by_its_values(name: str, dtype: torch.dtype) -> None:
    dim, indices = CUTS[name]
    local = WHOLE.index_select(dim, torch.tensor(indices)).to(dtype)
    found = placed(local, index=1)
    assert found == Place(((dim, indices),))
    assert torch.equal(found.of(WHOLE).to(dtype), local)


def test_a_place_cuts_the_gradient_as_it_cut_the_weight() -> None:
    place_ = Place(((0, (8, 1)), (1, (6, 0, 2))))
    gradient = numbers(12, 7, seed=5)
    assert torch.equal(place_.of(gradient), gradient[[8, 1]][:, [6, 0, 2]])


@pytest.mark.parametrize("shape", [(12, 7), (12,), (), (5, 1, 3)])
def test_a_tensor_of_the_same_shape_is_the_whole(shape: tuple[int, ...]) -> None:
    whole = numbers(*shape)
    assert placed(whole.clone(), whole) == Place()


@pytest.mark.parametrize("index", range(4))
def test_neighbours_that_hold_copies_are_placed_alike(index: int) -> None:
    local = WHOLE[6 * (index // 2) :][:6]
    rows = tuple(range(6 * (index // 2), 6 * (index // 2) + 6))
    assert placed(local, index=index, holders=4) == Place(((0, rows),))
    constant = torch.zeros(6, 7)
    assert placed(constant, torch.zeros(12, 7), index, 4) == Place(((0, rows),))


def test_a_box_is_believed_whatever_the_values() -> None:
    local, box = torch.zeros(3, 7), [[9, 12], [0, 7]]
    assert place(local, WHOLE, info(local, WHOLE, box), 0, 4) == Place(((0, (9, 10, 11)),))
    corner = torch.zeros(3, 2)
    found = place(corner, WHOLE, info(corner, WHOLE, [[9, 12], [5, 7]]), 0, 4)
    assert found == Place(((0, (9, 10, 11)), (1, (5, 6))))
    everything = [[0, 12], [0, 7]]
    assert place(WHOLE, WHOLE, info(WHOLE, WHOLE, everything), 0, 4) == Place()
    nothing = torch.zeros(0, 7)
    empty = place(nothing, WHOLE, info(nothing, WHOLE, [[0, 0], [0, 7]]), 3, 4)
    assert empty is not None
    assert empty.of(WHOLE).shape == (0, 7)


def test_a_box_of_another_whole_is_not_believed() -> None:
    local = WHOLE[6:]
    other = replace(info(local, WHOLE, [[0, 6], [0, 7]]), whole=(24, 7))
    assert place(local, WHOLE, other, 0, 2) == Place(((0, (6, 7, 8, 9, 10, 11)),))


def test_a_constant_follows_its_shape_alone() -> None:
    ones = torch.ones(12)
    assert placed(torch.ones(4), ones, index=1, holders=3) == Place(((0, (4, 5, 6, 7)),))
    assert placed(torch.ones(5), ones, index=1, holders=3) is None  # 12 is no multiple of 5


def test_values_that_are_not_there_follow_the_shape() -> None:
    foreign = numbers(6, 7, seed=9)
    assert placed(foreign, index=1) == Place(((0, (6, 7, 8, 9, 10, 11)),))
    assert placed(numbers(5, 7, seed=9), index=1) is None


@pytest.mark.parametrize("shape", [(6, 5), (84,), (6, 7, 1), (24, 7)])
def test_a_shape_that_is_no_cut_of_the_whole_has_no_place(shape: tuple[int, ...]) -> None:
    assert placed(numbers(*shape, seed=9)) is None


def test_no_rows_at_all_have_no_place_without_a_box() -> None:
    assert placed(WHOLE[:0]) is None


REPEATED = torch.cat([WHOLE[:3], WHOLE[:1], WHOLE[3:5]])  # rows 0 and 3 are equal


@pytest.mark.parametrize(("start", "index"), [(0, 0), (3, 1)])
def test_rows_that_occur_twice_are_taken_where_the_shape_puts_them(start: int, index: int) -> None:
    found = placed(REPEATED[start : start + 3], REPEATED, index)
    assert found == Place(((0, tuple(range(start, start + 3))),))


def test_rows_that_occur_twice_beside_a_cut_that_is_not_even_have_no_sure_place() -> None:
    local = REPEATED[[3, 2]]  # or [0, 2]: their gradients may differ
    assert placed(local, REPEATED, index=0, holders=3) is None


def test_zero_rows_of_an_embedding_are_placed_by_the_others() -> None:
    whole = WHOLE.clone()
    whole[[1, 8]] = 0  # a padding row in each half
    assert placed(whole[6:], whole, index=1) == Place(((0, (6, 7, 8, 9, 10, 11)),))
