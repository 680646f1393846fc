"""Pictures of schedules: every action where it belongs, waits as dots, and the numbers of the title."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from isograd.io import plots
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


@pytest.mark.medium
@pytest.mark.parametrize("sizes", SCHEDULES)
def test_a_file_has_a_row_for_each_rank_and_nothing_from_elsewhere(sizes, tmp_path: Path) -> None:
    schedule = build(*sizes)
    assert picture.draw(schedule, tmp_path / "step.svg")
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    texts = {"".join(node.itertext()).strip() for node in root.iter() if node.tag.endswith("}text")}
    assert {f"pp{rank}" for rank in range(schedule.pp)} <= texts
    if schedule.micro_batches <= 6:  # there is room for names
        forwards = [action for order in schedule.orders for action in order if action.kind == "F"]
        assert {picture.label(schedule, action) for action in forwards} <= texts
    assert any(f"bubble {schedule.bubble():.1%}" in text for text in texts)
    assert picture.draw(schedule, tmp_path / "measured.png", schedule.timed())


def test_boxes_of_a_timeline_lie_at_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "timeline", lambda rows, *_: drawn.append(rows))
    schedule = build("zb", 4, 2, 8)
    picture.draw(schedule, Path("step.svg"))
    for row, timed in zip(drawn[0].values(), schedule.timed(), strict=True):
        assert [(box.start, box.end) for box in row] == [(t.start, t.end) for t in timed]
        assert [box.kind[0] for box in row] == [t.action.kind for t in timed]


def test_explain_draws_the_schedule_of_a_layout_with_a_pipeline(capsys) -> None:
    from isograd.cli.main import main

    assert main(["explain", "pp4 vpp2 zb", "--micro-batches", "4", "--width", "80"]) == 0
    text = capsys.readouterr().out
    assert "zb, pp4 vpp2, 4 micro-batches: bubble" in text
    assert "pp3 ............F0a" in text
    assert main(["explain", "dp2"]) == 0
    assert "bubble" not in capsys.readouterr().out
    assert main(["explain", "pp2", "--micro-batches", "0"]) == 2
    assert "from 1 to 1000" in capsys.readouterr().err
