"""The HTML page as a person sees it: opened in a browser, wide and narrow, light and dark, with and without scripts."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Finding, Subject
from isograd_verify.tell.html import page
from isograd_verify.tell.report import Report

HOSTILE = "<script>alert(1)</script>"
BREAKOUT = "\"><img src=x onerror=alert(2)> & 'quoted'"
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --hide-scrollbars"
SHARES = (
    ("rank 0, micro-batch 0", 1.0),
    ("rank 1, micro-batch 0", 0.0),
    ("rank 2, micro-batch 0", 1.0),
    ("rank 3, micro-batch 0", 0.25),
    ("rank 3, micro-batch 1", 2.0),
)
GREEN, RED, AMBER = (90, 170), (340, 375), (30, 50)  # hues in degrees; red goes through 360


def names(layers: int) -> list[str]:
    inner = ("norm1.weight", "attention.q.weight", "attention.k.weight", "attention.o.weight", "norm2.weight")
    blocks = [f"blocks.{n}.{part}" for n in range(layers) for part in (*inner, "mlp.up.weight", "mlp.down.weight")]
    return ["embedding.weight", *blocks, "norm.weight", "head.weight"]


def events(rank: int, count: int) -> list[dict[str, Any]]:
    phases = ("forward",) * 4 + ("backward",) * 5 + ("step",)
    return [
        {
            "op": "all_reduce" if n % 3 else "all_gather",
            "group": "0,1" if rank < 2 else "2,3",
            "bytes": 4096 * (n + 1),
            "start": 12.5 + n * 1e-3 + rank * 7e-5,
            "seconds": 4e-4 if n % 4 else 8e-4,
            "phase": phases[n * 10 // count],
            "module": f"blocks.{n // 6}",
            "site": "model.py:120 in forward",
            "dtype": "float32",
            "step": 0,
        }
        for n in range(count)
    ]


def passing(name: str = "tp2", layers: int = 3) -> Subject:
    errors = {name: 1e-16 * (n % 5) for n, name in enumerate(names(layers))}
    by_rank: dict[str, list[float | None]] = {t: [e, e / 2] for t, e in errors.items()}
    facts = {"loss": "equal to 3e-16", "overhead": "12 %"}
    return Subject(name, 2, compared=True, errors=errors, by_rank=by_rank, facts=facts)


def broken() -> Subject:
    """Norms summed over one of two tensor-parallel ranks, a replica that drifted, and names that attack the page."""
    subject = Subject("dp2 tp2 sp", 4, compared=True, facts={"loss": "equal to 2e-16", HOSTILE: BREAKOUT})
    for n, name in enumerate(names(3)):
        error = 0.5 if "norm" in name else 10 ** -(14 - n % 4)
        subject.errors[name] = error
        subject.by_rank[name] = [error, error / 3, 1.5e-16, None if "head" in name else 0.0]
    subject.errors[HOSTILE], subject.by_rank[HOSTILE] = math.nan, [math.nan, math.inf, None, 1e-3]
    subject.timeline = [events(rank, 40) for rank in range(4)]
    subject.timeline[3][5] = {}  # an event that says nothing
    subject.findings = [
        Finding(
            BUG,
            "norm-unreduced",
            "The gradient of 7 norms holds only the part of rank 0 of each tensor-parallel group: relative error 0.5.",
            (*(name for name in names(3) if "norm" in name), "final.norm.weight", "extra.norm.bias"),
            axis="tp",
            coefficients=SHARES,
            cause="Under sequence parallelism each rank sees a part of the tokens, and nobody sums over tp.",
            look="the hook or the bucket that reduces norm1.weight; its process group has one rank",
        ),
        Finding(BUG, "", f"{HOSTILE} is not finite {BREAKOUT}", (HOSTILE,), coefficients=(("only", math.nan),)),
        Finding(
            INCONCLUSIVE, "router-unreduced", "The router picked other experts on rank 2.", ("blocks.1.mlp.up.weight",)
        ),
        Finding(NOTE, "", "The step rescaled the gradient by 0.7 on every rank."),
    ]
    return subject


def unsure() -> Subject:
    why = Finding(INCONCLUSIVE, "", "Dropout differs between the runs, so gradients cannot be compared.")
    return Subject("pp2", 2, findings=[why])


def big() -> Report:
    subject = Subject("dp8", 8, compared=True)
    for n in range(1000):
        name = f"model.decoder.layers.{n}.self_attention.query_key_value.weight"
        subject.by_rank[name] = [10 ** -(16 - 15 * n / 1000)] * 8
        subject.errors[name] = 10 ** -(16 - 15 * n / 1000)
    subject.timeline = [events(rank, 600) for rank in range(8)]
    coefficients = tuple((f"rank {n}", 0.0 if n == 77 else 1.0) for n in range(100))
    subject.findings = [
        Finding(BUG, "nosync-missing", "Rank 77 is missing.", tuple(subject.errors), coefficients=coefficients)
    ]
    return Report("big", [subject])


REPORTS = {
    "pass": Report("tiny-llama, float64", [passing(), passing("dp2", 2)]),
    "bug": Report(f"my model {HOSTILE}", [passing("tp2"), broken(), unsure()]),
    "unsure": Report("tiny-llama", [unsure()]),
    "empty": Report("nothing at all", []),
    "big": big(),
}


def browse(file: Path, *options: str) -> str:
    program = shutil.which("chromium")
    if program is None:
        pytest.fail("chromium is not installed; `make chromium` installs it")
    command = [program, *FLAGS.split(), f"--user-data-dir={file.parent / 'browser'}", *options, file.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


# What a person sees, asked of each frame. A frame of 400 pixels stands for a telephone: the browser's own window is
# never below 500. A frame may be without scripts; the questions come from outside.
ASK = """
const facts = {};
addEventListener('load', () => {
  for (const frame of document.querySelectorAll('iframe')) {
    const page = frame.contentDocument, view = frame.contentWindow, all = css => [...page.querySelectorAll(css)];
    const ask = element => view.getComputedStyle(element), box = element => element.getBoundingClientRect();
    const inside = element => element.closest('.scroll') || element.closest('details:not([open])');
    const word = page.querySelector('#verdict .verdict'), seen = box(word);
    const cell = page.querySelector('svg.cells rect'), closed = page.querySelector('details:not([open])');
    facts[frame.id] = {
      verdict: word.innerText, colour: ask(word).color, page: ask(page.body).backgroundColor, size: seen.height,
      inView: seen.top >= 0 && seen.bottom < 400 && seen.left >= 0 && seen.right <= view.innerWidth,
      text: page.body.innerText, titles: all('title').map(t => t.textContent), width: view.innerWidth,
      whole: page.documentElement.scrollWidth,
      wide: all('body *').filter(e => !inside(e) && box(e).right > view.innerWidth + 1).map(e => e.outerHTML),
      open: all('details.subject').map(e => e.open), scripts: all('script').length, images: all('img').length,
      matrix: all('#matrix tr').map(row => [...row.cells].map(cell => cell.innerText)),
      bars: all('svg.bars').map(svg => [...svg.querySelectorAll('rect')].map(r => box(r).width)),
      off: all('svg.bars').map(svg => [...svg.querySelectorAll('rect')].map(r => r.classList.contains('off'))),
      cells: all('svg.cells').map(svg => [...svg.querySelectorAll('rect')].map(r => ask(r).fill)),
      lanes: all('svg.events').map(svg => svg.querySelectorAll('.lane').length),
      events: all('svg.events').map(svg => [...svg.querySelectorAll('rect:not(.lane)')].map(
        r => [r.getAttribute('class'), box(r).width, ask(r).fill])),
    };
    if (!cell || !closed) continue;
    cell.dispatchEvent(new view.Event('mouseover', { bubbles: true }));
    facts[frame.id].tip = page.querySelector('#tip').innerText;
    closed.id = 'named';
    view.location.hash = '#named';
    view.dispatchEvent(new view.Event('hashchange'));
    facts[frame.id].unfolded = closed.open;
  }
  document.getElementById('facts').textContent = JSON.stringify(facts);
});
"""


def look(folder: Path, *options: str, scripts: bool = True, only: tuple[str, ...] = tuple(REPORTS)) -> dict[str, Any]:
    """What is seen of each report, as 'bug 400' -> facts."""
    sandbox = "" if scripts else ' sandbox="allow-same-origin"'
    frames = ""
    for name in only:
        source = escape(page(REPORTS[name]))
        for width in (400, 1400):
            frames += f'<iframe id="{name} {width}" width="{width}" height="800"{sandbox} style="border:0" '
            frames += f'srcdoc="{source}"></iframe>\n'
    file = folder / "frames.html"
    file.write_text(f'<!DOCTYPE html><meta charset="utf-8"><pre id="facts"></pre><script>{ASK}</script>{frames}')
    found = re.search(
        r'<pre id="facts">(.*?)</pre>', browse(file, "--window-size=1600,1000", "--dump-dom", *options), re.S
    )
    assert found and found[1], "the browser told nothing"
    return json.loads(unescape(found[1]))


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, Any]:
    return look(tmp_path_factory.mktemp("html"))


def hue(colour: str) -> float:
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    turn = math.degrees(math.atan2(math.sqrt(3) * (green - blue), 2 * red - green - blue))
    return turn + 360 if turn < 0 else turn


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


VERDICTS = [("pass", PASS, "✓", GREEN), ("bug", BUG, "✗", RED), ("unsure", INCONCLUSIVE, "?", AMBER)]


def check_verdict(facts: dict[str, Any], verdict: str, mark: str, hues: tuple[int, int]) -> None:
    assert facts["verdict"] == f"{mark} {verdict}"
    assert hues[0] <= hue(facts["colour"]) + (360 if hue(facts["colour"]) < hues[1] - 360 else 0) <= hues[1]
    assert contrast(facts["colour"], facts["page"]) >= 4.5
    assert facts["inView"] and facts["size"] >= 24


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize(("name", "verdict", "mark", "hues"), VERDICTS)
def test_the_verdict_is_read_first_in_its_colour_and_with_a_mark(seen, width, name, verdict, mark, hues) -> None:
    check_verdict(seen[f"{name} {width}"], verdict, mark, hues)


def test_the_page_is_read_in_the_dark_and_without_scripts(tmp_path) -> None:
    shown = ("pass", "bug", "unsure")
    dark = look(tmp_path, "--blink-settings=preferredColorScheme=0", scripts=False, only=shown)
    for name, verdict, mark, hues in VERDICTS:
        check_verdict(dark[f"{name} 400"], verdict, mark, hues)
        assert luminance(dark[f"{name} 400"]["page"]) < 0.05
    assert "nobody sums over tp" in dark["bug 400"]["text"]
    assert len(dark["bug 1400"]["cells"][1]) == 25 * 4


def test_one_line_counts_the_subjects(seen) -> None:
    assert "3 subjects: 1 passed, 1 with a bug, 1 inconclusive" in seen["bug 400"]["text"]
    assert "2 subjects: 2 passed, 0 with a bug, 0 inconclusive" in seen["pass 400"]["text"]


def test_a_report_without_subjects_says_that_nothing_could_be_told(seen) -> None:
    assert seen["empty 400"]["verdict"] == "? INCONCLUSIVE"
    assert "No subject was checked" in seen["empty 400"]["text"]


def test_nothing_reaches_out_of_the_window_but_what_scrolls_by_itself(seen) -> None:
    for name, facts in seen.items():
        assert facts["width"] == int(name.split()[1])
        assert facts["whole"] <= facts["width"], name
        assert facts["wide"] == [], name


def test_the_matrix_sets_kinds_of_parameters_against_layouts(seen) -> None:
    head, *rows = seen["bug 1400"]["matrix"]
    assert [cell.split("\n")[0] for cell in head] == ["parameters", "tp2", "dp2 tp2 sp", "pp2"]
    table = {row[0]: row[1:] for row in rows}
    assert table["blocks.*.norm1.weight"] == ["3.0e-16 ✓", "5.0e-01 ✗", "–"]
    assert table["blocks.*.mlp.up.weight"][1].endswith("?")
    assert table[HOSTILE] == ["–", "NaN ✗", "–"]


def test_bars_are_as_long_as_their_coefficients(seen) -> None:
    for width in (400, 1400):
        bars, off = seen[f"bug {width}"]["bars"][0], seen[f"bug {width}"]["off"][0]
        assert [bar / bars[0] for bar in bars] == pytest.approx([1.0, 0.0, 1.0, 0.25, 2.0], abs=0.01)
        assert bars[0] > 60
        assert off == [False, True, False, True, True]
    assert seen["bug 1400"]["bars"][1] == []  # NaN has no length, but is written
    assert "the dashed line is what is expected, 1" in seen["bug 1400"]["text"]


def test_shares_that_most_parts_have_are_the_expected_ones_where_none_is_whole(tmp_path) -> None:
    coefficients = (("a", 0.25), ("b", 0.25), ("c", -0.5))
    text = page(Report("", [Subject("x", 1, findings=[Finding(BUG, "", "", coefficients=coefficients)])]))
    assert "what most have, 0.25" in text
    assert text.count('<rect class="off"') == 1


def test_the_heat_map_has_a_cell_for_each_parameter_and_rank(seen) -> None:
    facts = seen["bug 1400"]
    assert [len(cells) for cells in facts["cells"]] == [24 * 2, 25 * 4]
    grown, held = facts["cells"][1], names(3)
    norm, head = held.index("norm.weight") * 4, held.index("head.weight") * 4
    assert len({grown[norm], grown[norm + 2], grown[head + 3]}) == 3  # wrong, right and not held look different
    assert "hatch" in grown[head + 3]
    assert "norm.weight\nrank 0: 0.5" in facts["titles"]
    assert "head.weight\nrank 3: not held here" in facts["titles"]


def test_a_larger_error_has_another_colour_in_every_decade() -> None:
    subject = Subject("x", 17, by_rank={"w": [10.0**-n for n in range(17)]})
    classes = re.findall(r'<rect class="(\w+)"[^>]*><title>w', page(Report("", [subject])))
    assert classes == [f"d{n}" for n in range(16, -1, -1)]


def test_a_timeline_has_a_lane_per_rank_and_colours_per_phase(seen) -> None:
    facts = seen["bug 1400"]
    assert facts["lanes"] == [4]
    drawn = facts["events"][0]
    assert len(drawn) == 160
    assert {phase for phase, _, _ in drawn} == {"forward", "backward", "step", "other"}
    assert len({fill for _, _, fill in drawn}) == 4
    assert min(width for _, width, _ in drawn) >= 1
    assert any("over ranks 0,1\n8,192 bytes float32" in t and "site model.py:120" in t for t in facts["titles"])


def test_what_is_too_much_is_cut_and_said_in_words(seen) -> None:
    facts = seen["big 1400"]
    assert "Shown are the 200 worst of 1,000 parameters" in facts["text"]
    assert len(facts["cells"][0]) == 200 * 8
    assert any("layers.999." in title for title in facts["titles"])
    assert not any("layers.799." in title for title in facts["titles"])
    assert "rank 7: first 500 of 600" in facts["text"]
    assert len(facts["events"][0]) == 500 * 8
    assert "Shown are the 32 of 100" in facts["text"]
    assert facts["off"][0].count(True) == 1


def test_hostile_names_are_text(seen) -> None:
    facts = seen["bug 1400"]
    assert (facts["scripts"], facts["images"]) == (1, 0)
    assert facts["text"].count(HOSTILE) >= 4  # title, matrix, fact, finding
    assert BREAKOUT in facts["text"]
    assert f"{HOSTILE}\nrank 0: NaN" in facts["titles"]


def test_layouts_that_passed_are_closed_and_the_others_open(seen) -> None:
    assert seen["bug 1400"]["open"] == [False, True, True]


def test_scripts_only_add_quick_tooltips_and_open_what_a_link_names(seen) -> None:
    assert seen["bug 400"]["tip"].startswith("embedding.weight\nrank 0: ")
    assert seen["bug 400"]["unfolded"]


def test_an_event_that_does_not_say_when_it_was_follows_the_one_before() -> None:
    timeline = [[{}, {"start": 100.0, "seconds": 1.0}, {"op": "late", "seconds": "NaN"}, {"start": "Infinity"}]]
    text = page(Report("", [Subject("x", 1, timeline=timeline)]))
    assert "4 collectives on 1 rank, 1 s drawn" in text
    assert re.findall(r'<rect class="other" x="([\d.]+)"[^>]*><title>', text) == [
        "62.00",
        "62.00",
        "1022.00",
        "1022.00",
    ]


def test_empty_sections_are_left_out(seen) -> None:
    facts = seen["unsure 1400"]
    assert (facts["cells"], facts["events"], facts["matrix"]) == ([], [], [])
    assert "no, only watched" in facts["text"]


def test_the_page_asks_nothing_of_the_network() -> None:
    for report in (REPORTS["pass"], REPORTS["unsure"], REPORTS["big"]):
        assert not re.search(r"https?:|//\w|src=|<link|@import|url\((?!#)", page(report))


def test_a_picture_of_the_page_is_not_empty(tmp_path) -> None:
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(page(REPORTS["bug"]), encoding="utf-8")
    browse(file, "--window-size=1400,1000", f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 30_000


def test_a_pipelines_schedule_is_an_image_with_its_text_for_those_who_cannot_see_it(tmp_path) -> None:
    subject = passing("pp2 zb")
    subject.schedule = {
        "text": "pp0  F0 B0\npp1  .. F0 B0",
        "svg": '<svg xmlns="http://www.w3.org/2000/svg" width="80" height="20"><rect width="8" height="9"/></svg>',
    }
    file = tmp_path / "page.html"
    # A script of the test's own reads what the browser made of the image.
    ask = """<script>onload = () => {
      const image = document.querySelector('img.schedule');
      document.title = [image.naturalWidth > 0, image.alt.includes('pp1'), document.images.length].join(' ');
    }</script></body>"""
    file.write_text(page(Report("pipelines", [subject, passing()])).replace("</body>", ask))
    assert "<title>true true 1</title>" in browse(file, "--dump-dom")
