"""Layouts: what is written is what is read, groups are what a brute-force definition says, errors come all at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isograd.core.layout import AXES, FOLDED, Layout
from isograd.core.mesh import Mesh
from isograd.errors import LayoutError

sizes = st.integers(1, 4)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def any_layout(draw: st.DrawFn) -> Layout:
    pp, dp, cp, tp = (draw(sizes) for _ in range(4))
    return Layout(
        pp=pp, dp=dp, cp=cp, tp=tp, vpp=draw(sizes) if pp > 1 else 1,
        cp_method=draw(st.sampled_from(["ulysses", "ring", *(f"ulysses{n}" for n in divisors(cp))]))
        if cp > 1 else "ulysses",
        sp=tp > 1 and draw(st.booleans()), zero=draw(st.integers(0, 3)),
        ep=draw(st.sampled_from([n for n in divisors(dp * cp * tp) if n % tp == 0 or tp % n == 0])),
    )  # fmt: skip


@given(any_layout())
def test_a_layout_is_read_back_as_it_is_written(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(any_layout(), st.data())
def test_groups_are_the_ranks_that_differ_on_their_axes_only(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    here = layout.coordinates(rank)
    assert layout.rank(here) == rank
    for axes in ("pp", "dp", "cp", "tp", "dp cp", "cp dp", "pp tp"):
        others = tuple(
            r for r in range(layout.world_size)
            if all(layout.coordinates(r)[a] == here[a] for a in AXES if a not in axes.split())
        )  # fmt: skip
        assert layout.ranks(axes, rank) == others
    assert layout.ranks("world", rank) == tuple(range(layout.world_size))
    for length in (n for n in range(1, layout.tp + 1) if layout.tp % n == 0):
        block = layout.ranks(f"tp/{length}", rank)
        assert len(block) == length
        assert rank in block
        assert set(block) <= set(layout.ranks("tp", rank))
        assert {layout.coordinates(r)["tp"] // length for r in block} == {here["tp"] // length}
    for axis in AXES:
        for length in divisors(layout.size(axis)):
            block, stride = layout.ranks(f"{axis}/{length}", rank), layout.ranks(f"{axis}%{length}", rank)
            assert set(block) & set(stride) == {rank}
            assert len(block) * len(stride) == layout.size(axis)
            assert stride == tuple(
                r for r in layout.ranks(axis, rank) if layout.coordinates(r)[axis] % length == here[axis] % length
            )


@given(any_layout(), st.data())
def test_the_ranks_of_a_stage_are_folded_into_ep_and_edp(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    stage = {r for r in range(layout.world_size) if layout.coordinates(r)["pp"] == layout.coordinates(rank)["pp"]}
    ep, edp = (layout.ranks(axis, rank) for axis in FOLDED)
    assert (len(ep), len(edp)) == (layout.size("ep"), layout.size("edp")) == (layout.ep, layout.edp)
    assert set(ep) & set(edp) == {rank}
    assert {r for member in ep for r in layout.ranks("edp", member)} == stage
    assert ep == tuple(range(ep[0], ep[0] + layout.ep))  # neighbours, so that few nodes share an expert's tokens
    for member in ep:
        assert layout.ranks("ep", member) == ep
        assert layout.ranks("edp", member).index(member) == edp.index(rank)
        tp = set(layout.ranks("tp", member))
        assert tp <= set(ep) or set(ep) <= tp


@given(any_layout())
def test_a_cp_method_says_how_many_exchange_heads_and_how_many_pass_keys_around(layout: Layout) -> None:
    assert layout.ulysses * layout.ring == layout.cp
    assert layout.cp == 1 or (layout.cp_method == "ulysses") == (layout.ring == 1)
    assert layout.cp == 1 or (layout.cp_method == "ring") == (layout.ulysses == 1)


@pytest.mark.parametrize(
    ("text", "written", "ulysses"),
    [
        ("cp4 ulysses2", "cp4 ulysses2", 2),
        ("ulysses3 dp2 cp6 zero1", "dp2 cp6 ulysses3 zero1", 3),
        ("cp4 ulysses4", "cp4 ulysses", 4),
        ("cp4 ulysses1", "cp4 ring", 1),
        ("cp4 ulysses02", "cp4 ulysses2", 2),
        ("cp4", "cp4 ulysses", 4),
        ("dp2", "dp2", 1),
    ],
)
def test_both_cp_methods_together_have_one_name(text: str, written: str, ulysses: int) -> None:
    layout = Layout.parse(text)
    assert str(layout) == written
    assert layout.ulysses == ulysses
    assert Layout(cp=layout.cp, cp_method=layout.cp_method, dp=layout.dp, zero=layout.zero) == layout


def test_tp_neighbours_have_neighbouring_ranks_and_pp_is_outermost() -> None:
    layout = Layout.parse("dp2 cp2 ulysses tp2 sp pp2 vpp2 ep2 zero1")
    assert layout.world_size == 16
    assert layout.ranks("tp", 0) == (0, 1)
    assert layout.ranks("cp", 0) == (0, 2)
    assert layout.ranks("dp", 0) == (0, 4)
    assert layout.ranks("pp", 0) == (0, 8)
    assert layout.ranks("dp cp", 9) == (9, 11, 13, 15)


@pytest.mark.parametrize("text", ["", "1", "dp1 tp1", "zero0"])
def test_a_world_of_one_has_many_names(text: str) -> None:
    assert Layout.parse(text) == Layout()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dp2 tq2", ["'tq2'", "did you mean 'tp'"]),
        ("dp2 ulyses cp2", ["did you mean 'ulysses'"]),
        ("dp2 sp", ["sp without tp"]),
        ("dp0 zero4 vpp2", ["dp must be at least 1", "stage from 0 to 3", "vpp2 without pp"]),
        ("dp3 ep2", ["ep2 does not divide dp x cp x tp = 3", "nearest that fits is ep1"]),
        ("dp3 tp2 ep4", ["ep4 does not divide dp x cp x tp = 6", "nearest that fits is ep2"]),
        ("dp3 tp2 ep3", ["ep3 with tp2: neither divides the other", "nearest that fits is ep2"]),
        ("dp3 cp2 tp4 ep6", ["ep6 with tp4: neither divides the other", "nearest that fits is ep4"]),
        ("dp2 tp2 ep8", ["nearest that fits is ep4"]),
        ("dp0 ep2", ["dp must be at least 1"]),
        ("dp999999999 ep600000000", ["nearest that fits is ep1"]),
        ("dp2 dp4", ["given twice"]),
        ("tp", ["'tp' needs a number"]),
        ("DP2 tp-2", ["'DP2' (did you mean 'dp'?)", "'tp-2' (did you mean 'tp'?)"]),
        ("cp2 ulysses ring", ["the cp method is given twice"]),
        ("dp0 sp vpp3 zro1 ring", ["dp must be", "sp without tp", "vpp3 without pp", "mean 'zero'", "'ring' w"]),
        ("dp" + "9" * 5000, ["unknown token"]),
        ("dp2 sp2", ["'sp2' is 'cp2 ulysses' here", "on the tp ranks"]),
        ("fsdp8 tp_size=2", ["'fsdp8' is 'dp8 zero3' here", "'tp_size=2' is 'tp2' here"]),
        ("sequence_parallel_size:4 dp-1", ["is 'cp4 ulysses' here", "'dp-1' has no number"]),
        ("ring", ["'ring' without cp"]),
        ("ulysses2", ["'ulysses2' without cp"]),
        ("cp4 ulysses3", ["ulysses3 does not divide cp4"]),
        ("cp4 ulysses0 sp", ["ulysses0 does not divide cp4", "sp without tp"]),
        ("cp4 ulysses2 ring", ["the cp method is given twice"]),
        ("cp4 ulises2", ["did you mean 'ulysses'"]),
    ],
)
def test_every_mistake_in_a_layout_is_named_at_once(text: str, parts: list[str]) -> None:
    with pytest.raises(LayoutError) as error:
        Layout.parse(text)
    assert error.value.code == "IG101"
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_sizes_of_another_type_are_refused_all_at_once() -> None:
    with pytest.raises(LayoutError, match="IG101") as error:
        Layout(dp=2.0, tp="2", pp=True, sp=1, cp_method=None)  # type: ignore[arg-type]
    for part in ("dp must be a whole number, not 2.0", "tp must be", "pp must be", "sp is True", "cp_method is"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "spot",
    [
        {"pp": 0, "dp": 2, "cp": 0, "tp": 0},
        {"pp": 0, "dp": -1, "cp": 0, "tp": 0},
        {"dp": 1, "tp": 0},
        {"pp": 0, "dp": 0, "cp": 0, "tp": 0, "ep": 0},
    ],
)
def test_coordinates_of_no_rank_are_refused_rather_than_numbered(spot: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="IG103"):
        Layout.parse("dp2 tp4").rank(spot)


def test_unknown_axes_ranks_and_blocks_are_refused() -> None:
    layout = Layout.parse("dp2 tp4")
    for call, code in (
        (lambda: layout.ranks("tb", 0), "IG102"),
        (lambda: layout.ranks("", 0), "IG102"),
        (lambda: layout.coordinates(8), "IG103"),
        (lambda: layout.ranks("world", 8), "IG103"),
        (lambda: layout.ranks("tp/0", 0), "IG104"),
        (lambda: layout.ranks("tp/3", 0), "IG104"),
        (lambda: layout.ranks("tp%3", 0), "IG104"),
        (lambda: layout.ranks("tp%0", 0), "IG104"),
        (lambda: layout.ranks("tp%%2", 0), "IG102"),
        (lambda: layout.ranks("ep dp", 0), "IG102"),
        (lambda: layout.ranks("edp", 8), "IG103"),
        (lambda: layout.ranks("ep", 8), "IG103"),
    ):
        with pytest.raises(LayoutError, match=code):
            call()


def test_a_layout_offered_for_another_world_has_the_nearest_ep() -> None:
    assert [str(fit) for fit in Layout.parse("dp4 tp2 ep8").fits(4)] == ["dp2 tp2 ep4", "dp4 ep4"]
    assert str(Layout.parse("dp4 ep4").fits(6)[0]) == "dp6 ep3"


@given(any_layout(), st.integers(1, 64))
def test_layouts_offered_for_another_world_size_fit_it(layout: Layout, world: int) -> None:
    offered = layout.fits(world)
    assert offered
    assert all(other.world_size == world for other in offered)
    assert layout.fits(0) == []


def meshes_that_do_not_fit() -> str:
    with pytest.raises(LayoutError) as error:
        Mesh("dp2 tp4 sp")
    return str(error.value)


def test_a_world_size_that_does_not_fit_says_what_would(worlds) -> None:
    text = worlds(2).run(meshes_that_do_not_fit)[0]
    assert "needs 8 ranks, this world has 2" in text
    assert "tp2 sp" in text


def test_a_picture_shows_every_rank_once() -> None:
    layout = Layout.parse("dp2 cp2 tp2 pp2")
    grid = layout.picture().split("groups of")[0]
    rows = [line for line in grid.splitlines() if line.startswith("     dp")]
    numbers = [int(word) for line in rows for word in line.split() if word.isdigit()]
    assert sorted(numbers) == list(range(16))


def test_a_picture_shows_both_foldings() -> None:
    grid = Layout.parse("dp4 tp2 ep4").picture().split("\n\n")
    assert [line.split() for line in grid[1].splitlines()[1:]] == [
        ["tp0", "tp1"],
        *([f"dp{i}", str(2 * i), str(2 * i + 1)] for i in range(4)),
    ]
    assert [line.split() for line in grid[2].splitlines()] == [
        ["experts", "ep0", "ep1", "ep2", "ep3"],
        ["edp0", "0", "1", "2", "3"],
        ["edp1", "4", "5", "6", "7"],
    ]
    assert "edp           [0, 4]" in grid[3]


@pytest.mark.parametrize("text", ["dp2 cp2 tp2", "pp2 dp2 cp2 tp2", "dp2 tp2 ep4", "dp3"])
@pytest.mark.parametrize("axes", ["tp", "pp", "cp tp", "dp cp", "ep", "edp"])
def test_groups_are_those_of_all_ranks_each_once(text: str, axes: str) -> None:
    layout = Layout.parse(text)
    assert list(layout.groups(axes)) == list(dict.fromkeys(layout.ranks(axes, r) for r in range(layout.world_size)))
