"""The documentation says what the code does: pages run, names exist, links lead somewhere, the site builds.

The pages in docs/how-to, docs/prove-your-own.md and verify/docs/verify.md run as a reader would run them. Two comments,
which a rendered page does not show, mark their blocks:

    <!-- file: NAME -->     the block below is written to the file NAME
    <!-- run -->            lines that begin with "$ " are commands; the lines after a command are what it prints
    <!-- run: exit N -->    the same, and the last command ends with exit code N

In what a page shows, "..." stands for any text. Numbers with a decimal point may differ by 1 %, since processors round
differently, and two numbers below 1e-9 count as equal: both are rounding. Spaces and line breaks may differ, since
terminals have different widths. Everything else must agree to the letter.
"""

from __future__ import annotations

import ast
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "isograd"
VERIFIER = ROOT / "verify" / "src" / "isograd_verify"
SOURCES = (SOURCE.parent, VERIFIER.parent)
PAGES = sorted(p for p in (DOCS / "how-to").glob("*.md") if p.stem != "index")
PAGES += [ROOT / "verify" / "docs" / "verify.md", DOCS / "prove-your-own.md"]
# Pages that start worlds of their own or programs: each command is a process. The others run in this one.
SLOW = {"export", "install", "pretrain", "prove-your-own", "resume", "verify"}

BLOCK = re.compile(r"<!-- (file|run)(?:: (.+?))? -->\n```\w*\n(.*?)\n```", re.DOTALL)
NUMBER = r"(?:\d*\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+)"
ROUNDING = 1e-9


def commands(block: str) -> Iterator[tuple[str, str]]:
    """(command, what the page shows of its output) for each line of a block that begins with "$ "."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown.strip("\n")


def agrees(shown: str, printed: str) -> bool:
    """Whether `printed` is what the page shows; see this file's first lines for what may differ."""
    pieces = re.split(rf"( ?\.\.\. ?|{NUMBER})", tidy(shown))
    numbers = [float(piece) for piece in pieces if re.fullmatch(NUMBER, piece)]
    pattern = "".join(
        "(?s:.*?)" if piece.strip() == "..." else f"({NUMBER})" if re.fullmatch(NUMBER, piece) else re.escape(piece)
        for piece in pieces
    )
    found = re.fullmatch(pattern, tidy(printed))
    return found is not None and all(map(close, numbers, map(float, found.groups())))


def tidy(text: str) -> str:
    """With one space for each run of spaces and line breaks."""
    return " ".join(text.split())


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 0.01 * abs(a) or max(abs(a), abs(b)) < ROUNDING


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        ("loss 1.234", "loss 1.235\n", True),
        ("loss 1.234", "loss 1.334", False),
        ("step 3", "step 4", False),
        ("error 2.0e-15 PASS", "error 7.1e-16 PASS", True),
        ("error 2.0e-15 PASS", "error 2.0e-08 PASS", False),
        ("a ...\nb", "a long\nstory\nb", True),
        ("a ...\nb", "a long\nstory", False),
        ("(0.5)", "(0.5)  ", True),
        ("one two\n three", "one two three", True),
        ("one two", "one three", False),
        ("one\n...\ntwo", "one\ntwo", True),
    ],
)
def test_a_page_agrees_only_with_what_it_shows(shown: str, printed: str, equal: bool) -> None:
    assert agrees(shown, printed) is equal


@pytest.mark.medium
@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else []) for p in PAGES]
)
def test_a_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path, monkeypatch, worlds) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    if page.stem == "verify":  # its first program is in the repository
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    run = as_a_process if page.stem in SLOW else Here(worlds, monkeypatch)
    blocks = BLOCK.findall(page.read_text())
    assert any(kind == "run" for kind, *_ in blocks)
    for kind, option, block in blocks:
        if kind == "file":
            (tmp_path / option).write_text(block + "\n")
            continue
        asked = list(commands(block))
        expected = int(option.removeprefix("exit ") or 0)
        for number, (command, shown) in enumerate(asked, 1):
            code, printed = run(command)
            assert code == (expected if number == len(asked) else 0), f"{command}\n{printed}"
            assert not shown or agrees(shown, printed), f"{command}\nprinted:\n{printed}\nthe page shows:\n{shown}"


def as_a_process(command: str) -> tuple[int, str]:
    """As in a shell of somebody who has installed both distributions."""
    command = f'isograd-verify() {{ {sys.executable} -m isograd_verify "$@"; }}\n{command}'
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sources = os.pathsep.join(map(str, SOURCES))
    environment = {**os.environ, "PATH": tools, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", command], check=False, env=environment, text=True, timeout=240,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


class Here:
    """Runs `isograd ...` and `python FILE` in this process; isograd.launch borrows the suite's worlds of ranks."""

    def __init__(self, worlds: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.worlds, self.program = worlds, ""
        monkeypatch.setitem(vars(importlib.import_module("isograd")), "launch", self.launch)

    def __call__(self, command: str) -> tuple[int, str]:
        words = shlex.split(command, comments=True)
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            if words[0] == "isograd":
                from isograd.cli.main import main

                return main(words[1:]), out.getvalue()
            assert words[0] == "python"
            self.program = str(Path(words[1]).resolve())
            runpy.run_path(self.program, run_name="__main__")
        return 0, out.getvalue()

    def launch(self, fn: Callable[..., Any], nproc: int, *args: Any) -> list[Any]:
        return self.worlds(nproc).run(call_in_program, self.program, fn.__name__, args)  # type: ignore[no-any-return]


def call_in_program(program: str, name: str, args: tuple[Any, ...]) -> Any:
    return runpy.run_path(program, run_name="program")[name](*args)


# -- names and links


def exported(room: str) -> list[str]:
    """The public names of a room: its __all__, or else what its __init__ imports as itself."""
    tree = ast.parse((SOURCE / room / "__init__.py").read_text())
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if target is not None and ast.unparse(target) == "__all__":
            return list(ast.literal_eval(node.value))
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    return [alias.name for alias in aliases if alias.asname == alias.name]


ROOMS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def public_definitions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """(name, node) of the functions, classes and methods of a file whose names have no leading underscore.

    A setter is documented with its property, an overload with the function.
    """
    todo: list[tuple[str, ast.AST]] = [("", ast.parse(path.read_text()))]
    while todo:
        outer, node = todo.pop()
        for inner in getattr(node, "body", []):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef) and not inner.name.startswith("_"):
                if any(ast.unparse(one).rpartition(".")[2] in ("overload", "setter") for one in inner.decorator_list):
                    continue
                yield outer + inner.name, inner
                if isinstance(inner, ast.ClassDef):
                    todo.append((f"{outer}{inner.name}.", inner))


# How many public definitions of a room may lack a docstring. A number here may only go down; a room that is not listed
# may lack none. FAILURES D: 556 of 1,265 public definitions had no docstring.
UNDOCUMENTED = {"corpus": 77}


def test_a_page_that_uses_a_recipe_says_how_a_wheel_gives_it() -> None:
    """`isograd train quickstart.yaml` needs `isograd new quickstart` on the page, and no folder of a clone."""
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = page.read_text()
        assert not re.findall(r"isograd [a-z]+ recipes/", text), page
        named = set(re.findall(r"isograd (?:train|plan|compare|verify|rehearse) ([\w-]+)\.yaml", text)) & recipes
        assert {name for name in named if f"isograd new {name}" not in text} == set(), page


@pytest.mark.medium
def test_the_page_of_expectations_names_tests_that_exist(tmp_path: Path) -> None:
    expected = runpy.run_path(str(ROOT / "scripts" / "expected.py"))
    rows = expected["rows"]((ROOT / "scripts" / "expected.txt").read_text())
    assert expected["mistakes"](rows) == [] and len(rows) == 52
    assert expected["page"](rows) == (DOCS / "expected.md").read_text()
    (tmp_path / "test_a.py").write_text("def test_one(): pass\ndef helper(): pass\n")
    (tmp_path / "b.py").write_text("def test_one(): pass\n")
    found = {"test_a.py": True, "test_a.py::test_one": True, "test_a.py::test_one[3]": True,
             "test_a.py::test_two": False, "test_c.py": False, "b.py::test_one": False, "": False}  # fmt: skip
    assert {test: expected["exists"](test, tmp_path) for test in found} == found
    wrong = [("1", "a", "yes", "test_a.py::test_two"), ("2", "b", "maybe", "c"), ("4", "d", "no", "")]
    said = expected["mistakes"](wrong, tmp_path)
    assert [line.split(":")[0] for line in said] == ["numbers ['1', '2', '4']", "2", "1", "4"]


def test_the_table_of_loops_and_axes_is_that_of_tests_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    loops = runpy.run_path(str(ROOT / "scripts" / "loops.py"))
    found, text = loops["cells"]((ROOT / "scripts" / "loops.txt").read_text()), (DOCS / "integrations.md").read_text()
    assert loops["mistakes"](found) == [] and loops["page"](text, found) == text
    wrong = {"a loop": {"dp": "tests/test_docs.py::test_nothing", "cp": "- ", "tp": "- a reason"}}
    said = loops["mistakes"](wrong)
    assert [line.split(":")[0] for line in said] == ["a loop", "a loop, dp", "a loop, cp"]


def test_public_definitions_have_docstrings() -> None:
    lacking = Counter(
        path.relative_to(home).parts[0].removesuffix(".py")
        for home in (SOURCE, VERIFIER)
        for path in home.rglob("*.py")
        for _, node in public_definitions(path)
        if not ast.get_docstring(node)
    )
    more = {room: (n, UNDOCUMENTED.get(room, 0)) for room, n in lacking.items() if n > UNDOCUMENTED.get(room, 0)}
    assert not more, f"(definitions without a docstring, allowed): {more}"


def test_every_name_that_isograd_exports_has_a_docstring() -> None:
    import isograd

    lacking = [name for name in isograd.__all__ if not (getattr(isograd, name).__doc__ or "").strip()]
    assert not lacking


REFERENCE = re.compile(r"`((?:[a-z_]+/)*[a-z_]+)\.py`|`(?:isograd\.)?(?!torch\.)([a-z_]+(?:\.\w+)+)`")


@pytest.mark.parametrize("page", ["theory.md", "glossary.md"])
def test_a_name_in_backticks_exists(page: str) -> None:
    """`engine/reduce.py` is a file of isograd; `engine.reduce.Reducer` is an object, or an attribute of one."""
    found = REFERENCE.findall((DOCS / page).read_text())
    assert found
    assert not [file for file, _ in found if file and not (SOURCE / f"{file}.py").exists()]
    assert not [name for _, name in found if name and not resolves(name)]


def test_the_glossary_has_at_most_40_words() -> None:
    rows = re.findall(r"^\| ([a-z][^|]*?) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    words = [word for row in rows if row != "word" for word in row.replace("types R, I, V, P", "types").split(", ")]
    assert 30 < len(set(words)) == len(words) <= 40


def resolves(name: str) -> bool:
    """Whether isograd.NAME, or a name of isograd_verify, is a module, or something that a module has."""
    words = [*([] if name.startswith("isograd_verify.") else ["isograd"]), *name.split(".")]
    for depth in range(len(words), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:depth]))
        except ModuleNotFoundError:
            continue
        for word in words[depth:]:
            fields = getattr(found, "__dataclass_fields__", {})
            if not hasattr(found, word) and word not in fields:
                return False
            found = getattr(found, word, None)
        return True
    return False


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_a_link_leads_to_a_file(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)[^)]*\)", (ROOT / page).read_text())
    assert not [link for link in links if not (ROOT / link).exists()]


# -- the site


class Loaded(HTMLParser):
    """What a browser loads with a page, and the anchors that the page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        self.loads += [values[name] for name in ("src", "srcset", "data") if name in values]
        if tag == "link":
            self.loads.append(values.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs", reason="pip install 'isograd[docs]'")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    # A proxy that nobody answers at: nothing may be fetched.
    offline = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "all")}
    environment = {**os.environ, **offline, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.medium
def test_the_site_loads_nothing_from_a_network(site: Path) -> None:
    """FAILURES D: documentation as a site, readable without a network: no fonts, styles or scripts of other hosts."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    loads = {load for page in pages for load in Loaded(page.read_text()).loads}
    for sheet in site.rglob("*.css"):
        loads |= set(re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]+)", sheet.read_text()))
    assert any(load.endswith(".js") for load in loads)
    assert not {load for load in loads if load.strip().startswith(("http:", "https:", "//"))}


@pytest.mark.medium
def test_the_site_has_every_public_name(site: Path) -> None:
    """FAILURES D: there was no reference of the API."""
    import isograd

    anchors = {anchor for page in (site / "api").glob("*.html") for anchor in Loaded(page.read_text()).anchors}
    wanted = {f"isograd.{room}.{name}" for room in ROOMS for name in exported(room)}
    own = {f"isograd.{home}.{name}" for home, names in isograd._HOMES.items() for name in names.split()}
    wanted |= own - {"isograd.errors.IsogradError"}
    wanted.add("isograd_verify.errors.IsogradError")
    assert wanted <= anchors, wanted - anchors


# -- the README's program


def readme_program(text: str) -> list[float]:
    """The README's loop as it stands, on a tiny model and data of this test."""
    import torch

    import isograd as ig

    config = ig.models.preset("tiny-llama")
    rows = torch.randint(config.vocab, (8, 13), generator=torch.Generator().manual_seed(0))

    class Micro:
        def __init__(self, part: torch.Tensor) -> None:
            self.tokens, self.labels = part[:, :-1], part[:, 1:]

    class Loader:
        def __iter__(self) -> Iterator[list[Micro]]:
            mesh = names["mesh"]
            mine = rows.chunk(mesh.size("dp"))[mesh.index("dp")]
            yield from [[Micro(part) for part in mine.split(1 + step)] for step in range(2)]

    names: dict[str, Any] = {"torch": torch, "config": config, "loader": Loader()}
    exec(compile(text, "README.md", "exec"), names)
    return [names["stats"].loss, names["stats"].grad_norm, names["stats"].weight]


@pytest.mark.medium
def test_the_readme_s_program_runs(worlds) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    everywhere = worlds(4).run(readme_program, program)
    assert everywhere == [everywhere[0]] * 4
    alone = worlds(1).run(readme_program, program.replace("dp2 tp2 sp zero1", "dp1"))[0]
    assert everywhere[0] == pytest.approx(alone, rel=1e-4)
    assert alone[2] == 8 * 12
