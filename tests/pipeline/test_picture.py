"""Pictures of schedules: every action where it belongs, waits as dots, and the numbers of the title."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from isograd.pipeline import picture
from isograd.pipeline.schedule import Timed, build

SCHEDULES = [("gpipe", 2, 1, 4), ("1f1b", 3, 1, 5), ("1f1b", 2, 2, 5), ("zb", 4, 1, 6), ("zb", 2, 3, 12)]


def lines(text: str) -> list[str]:
    return [line[4:] for line in text.splitlines() if re.match(r"pp\d ", line)]


def test_a_small_schedule_is_drawn_in_unit_columns() -> None:
    assert lines(picture.ascii(build("1f1b", 2, 1, 3))) == [
        "F0 F1 ......B0--- F2 B1--- ...B2--- ",
        "...F0 B0--- F1 B1--- F2 B2--- ......",
    ]


@pytest.mark.parametrize("sizes", SCHEDULES)
def test_each_rank_s_line_holds_its_actions_in_order_and_dots_where_it_waits(sizes) -> None:
    schedule = build(*sizes)
    drawn = lines(picture.ascii(schedule))
    width = max(len(picture.label(schedule, action)) for order in schedule.orders for action in order) + 1
    for line, order, row in zip(drawn, schedule.orders, schedule.timed(), strict=True):
        assert re.findall(r"[FBIW]\d+[a-z]?", line) == [picture.label(schedule, action) for action in order]
        assert len(line) == width * max(row[-1].end for row in schedule.timed())
        idle = len(line) / width - sum(timed.end - timed.start for timed in row)
        assert line.count(".") == width * idle


def test_long_lines_go_on_below_and_lose_nothing() -> None:
    schedule = build("zb", 4, 2, 8)
    whole, cut = lines(picture.ascii(schedule)), lines(picture.ascii(schedule, width=60))
    assert max(map(len, cut)) + 4 <= 60
    assert ["".join(cut[rank::4]) for rank in range(4)] == whole


def stretched(factor: float, wait: float) -> list[list[Timed]]:
    """What a 1f1b was measured to take: each action `factor` times as long, and a wait before the last of each rank."""
    rows = build("1f1b", 2, 1, 3).timed()
    moved = [[t._replace(start=5 + t.start * factor, end=5 + t.end * factor) for t in row] for row in rows]
    return [[*row[:-1], row[-1]._replace(start=row[-1].start + wait, end=row[-1].end + wait)] for row in moved]


def test_a_measured_timeline_is_drawn_to_scale_with_both_bubbles() -> None:
    schedule = build("1f1b", 2, 1, 3)
    text = picture.ascii(schedule, stretched(0.01, 0.04))
    assert lines(text) == [
        "F0 F1 ......B0--- F2 B1--- ...............B2--- ",
        "...F0 B0--- F1 B1--- F2 ............B2--- ......",
    ]
    assert "bubble measured 43.8%, 25.0% if messages took no time" in text


@pytest.mark.parametrize("sizes", SCHEDULES)
def test_the_svg_has_a_box_for_each_action_and_nothing_from_elsewhere(sizes) -> None:
    schedule = build(*sizes)
    text = picture.svg(schedule)
    root = ElementTree.fromstring(text)
    tips = [node.text for node in root.iter() if node.tag.endswith("title")]
    assert len(tips) == sum(map(len, schedule.orders))
    assert all(f"of stage {a.stage}, micro-batch {a.micro}" in "\n".join(tips) for a in schedule.orders[0])
    assert text.count("http") == 1, "only the name of the format"
    assert f"bubble {schedule.bubble():.1%}" in text


def test_boxes_lie_within_the_drawing_and_do_not_overlap() -> None:
    schedule = build("zb", 4, 2, 8)
    root = ElementTree.fromstring(picture.svg(schedule))
    faces = [node for node in root.iter() if node.tag.endswith("rect") and node.get("stroke")]
    by_row: dict[str, list[tuple[float, float]]] = {}
    for face in faces:
        by_row.setdefault(face.get("y"), []).append((float(face.get("x")), float(face.get("width"))))
    assert len(by_row) == 4
    for boxes in by_row.values():
        ends = [x + wide for x, wide in boxes]
        assert all(end <= x + 0.02 for end, (x, _) in zip(ends, boxes[1:], strict=False))
        assert boxes[0][0] >= picture.LEFT
        assert ends[-1] <= picture.LEFT + picture.WIDE + 0.02


def test_explain_draws_the_schedule_of_a_layout_with_a_pipeline(capsys) -> None:
    from isograd.cli import main

    assert main(["explain", "pp4 vpp2 zb", "--micro-batches", "4", "--width", "80"]) == 0
    text = capsys.readouterr().out
    assert "zb, pp4 vpp2, 4 micro-batches: bubble" in text
    assert "pp3 ............F0a" in text
    assert main(["explain", "dp2"]) == 0
    assert "bubble" not in capsys.readouterr().out
    assert main(["explain", "pp2", "--micro-batches", "0"]) == 2
    assert "from 1 to 1000" in capsys.readouterr().err
