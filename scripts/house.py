"""The rules of the house, read from the source without importing it: `make lint` runs this and prints the table.

    python scripts/house.py            the table, and each breach of a rule; exit 1 if there is one
    python scripts/house.py --graph    which package imports which, one line each
    python scripts/house.py --all      what each number counts
    python scripts/house.py --tree     docs/tree.md: every file with the first line of its docstring

ARROWS says which packages a package may import, imports in functions and under TYPE_CHECKING included. No file stands
in a circle of imports. LIMITS are today's numbers: a change that raises one edits it here and says why in its commit.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREES = {"isograd": ROOT / "src" / "isograd", "isograd_verify": ROOT / "verify" / "src" / "isograd_verify"}

ANYTHING = {"errors", "io", "__version__"}  # what every package may import
ARROWS = {
    "errors": set(),
    "io": {"errors"},
    "core": {"comm"},
    "comm": {"core"},
    "launcher": {"comm"},
    "sequence": {"comm", "core"},
    "nn": {"sequence", "comm", "core"},
    "pipeline": {"nn", "comm", "core"},
    "engine": {"pipeline", "nn", "comm", "core"},
    "losses": {"core", "comm"},
    "losses.contrastive": {"engine", "losses", "nn", "core", "comm"},
    "models": {"nn", "sequence", "pipeline", "core"},
    "hf": {"checkpoint", "data", "engine", "models", "nn", "sequence", "pipeline", "comm", "core"},
    "data": set(),
    "checkpoint": {"engine", "comm", "core", "data"},
    "elastic": {"launcher", "checkpoint", "engine", "comm", "core"},
    "generate": {"hf", "checkpoint", "data", "comm", "core"},
    "plan": {"launcher", "engine", "models", "nn", "sequence", "pipeline", "comm", "core"},
    "train": {"launcher", "generate", "elastic", "checkpoint", "hf", "models", "losses", "losses.contrastive", "data",
              "engine", "plan", "nn", "sequence", "pipeline", "comm", "core"},
    "prove": {"launcher", "engine", "models", "train", "nn", "pipeline", "comm", "core"},
    "integrations": {"train", "hf", "models", "losses", "losses.contrastive", "checkpoint", "engine", "sequence",
                     "pipeline", "comm", "core"},
}  # fmt: skip
EVERYTHING = {"cli", "__init__", "__main__"}
ON_THE_VERIFIER = {"errors", "io", "prove", "cli"}  # what of isograd may import isograd_verify
# The verifier imports nothing of isograd; its packages import these of each other, and errors, io, tolerances.
VERIFIER = {
    "corpus": set(),
    "record": set(),
    "watch": {"record"},
    "tell": {"record"},
    "judge": {"tell", "record"},
    "compare": {"judge", "tell", "record"},
    "run": {"compare", "judge", "tell", "watch", "record", "corpus"},
    "errors": set(), "io": set(), "tolerances": set(),
}  # fmt: skip

LIMITS = {
    "isograd, lines": 52_000,
    "isograd-verify, lines": 16_969,
    "comm + launcher + engine, lines": 9_657,
    "arrows between packages": 140,
    "arrows in isograd-verify": 53,
    "imports against the order": 0,
    "files in circles": 0,
    "reassigned fields of engine, comm, launcher, losses": 31,
    "public class names defined twice": 0,
    "identifiers that are no names": 0,
}


# Words that are no names by themselves (NAMES.md): participles, adverbs, pronouns and metaphors.
_WORDS = """
told kept held beside theirs mine near apart given lent paid due owes owing debt settle quiet spoiled whole
once outside inside stored everyone everywhere ahead known alone announced came shown heard wanted skipped_damaged
aside crew rescue rooms door doors ledger flight flights dog hollow crowded_out unsaid beginnings wide
"""
NO_NAMES = frozenset(_WORDS.split())

PICKLERS = ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
UNSAFE = (
    "torch.load", "eval", "exec", "__import__", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load",
)  # fmt: skip
# Programs and objects of others, and the files of ours that talk to other ranks.
SPEAKS_DISTRIBUTED = ("comm/world.py", "comm/transport.py", "watch/foreign.py",
                      "watch/watched.py", "run/corpus.py", "run/ranks.py")  # fmt: skip
TEXTS = (".py", ".md", ".toml", ".txt", ".yaml", ".json", "")
CARRIES_RANKS = ("launch.py", "worker.py")


def files() -> dict[str, Path]:
    """'isograd/engine/engine.py' -> its path, of both distributions."""
    found = {}
    for name, tree in TREES.items():
        for path in sorted(tree.rglob("*.py")):
            if "startup" not in path.parts:
                found[f"{name}/{path.relative_to(tree)}"] = path
    return found


def package_of(name: str) -> str:
    """'engine' for 'isograd/engine/engine.py'; 'losses.contrastive'; 'errors' for a file that stands alone."""
    parts = name.split("/")
    if parts[0] != "isograd":
        return "isograd_verify." + parts[1].removesuffix(".py")
    if parts[1:3] == ["losses", "contrastive"]:
        return "losses.contrastive"
    return parts[1].removesuffix(".py")


def module_of(name: str) -> str:
    """'isograd.engine.engine' for its file; a package for its __init__.py."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def nodes(source: str) -> list[ast.AST]:
    """All of a program, itself first. Several rules look at the same files."""
    return list(ast.walk(ast.parse(source)))


def imports(source: str, known: dict[str, str]) -> set[str]:
    """The files that a file imports, wherever in it."""
    found = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named = [
                f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in known else node.module for a in node.names
            ]
        else:
            continue
        found |= {known[name] for name in named if name in known}
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of files that import one another, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in index:
            visit(name)
    return found


def fields_set(node: ast.AST) -> list[tuple[ast.AST, str]]:
    """(object, field) of each field that a target or a call sets; an item of a field is the field."""
    called = spelled(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    if isinstance(node, ast.Call) and called in ("setattr", "delattr", "__setattr__"):
        return [(node.args[0], ast.unparse(node.args[1]))]
    if isinstance(node, ast.Call) and called == "set_attributes":  # of core/attributes.py
        names = [word.arg or ast.unparse(word.value) for word in node.keywords]
        return [(holder, name) for holder in node.args for name in names]
    stores, target = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del), node
    while isinstance(target, ast.Subscript):
        target = target.value
    return [(target.value, target.attr)] if stores and isinstance(target, ast.Attribute) else []


def reassigned(tree: ast.AST) -> set[str]:
    """Fields set after construction: of `self` outside __init__, items of a field, and attributes of other objects."""
    found = set()
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef | ast.Module):
            continue
        kind = owner.name if isinstance(owner, ast.ClassDef) else ""
        for function in ast.iter_child_nodes(owner):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for holder, name in (pair for node in ast.walk(function) for pair in fields_set(node)):
                base = holder.id if isinstance(holder, ast.Name) else "?"
                if base == "self" and function.name not in ("__init__", "__new__", "__post_init__"):
                    found.add(f"{kind}.{name}")
                elif base not in ("self", "ctx", "cls"):
                    found.add(f"?.{name}")
    return found


def spelled(node: ast.AST) -> str:
    """'torch.distributed.all_reduce' for a chain of attributes, '' for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{spelled(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def forbidden(source: str, name: str) -> set[str]:  # noqa: PLR0912
    """The rules that a file breaks. Imports are followed through `as` and `from`."""
    found = set()
    speaks = name.endswith(SPEAKS_DISTRIBUTED) or "/corpus/" in name
    called: dict[str, str] = {}  # a name in this file -> what it stands for
    for node in nodes(source):
        if isinstance(node, ast.Import):
            called |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names if alias.asname}
            reached = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            called |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            reached = [f"{node.module}.{alias.name}" for alias in node.names]
            if node.level:
                found.add("a relative import")
        else:
            continue
        if any(f"{r}.".startswith("torch.distributed.") for r in reached) and not speaks:
            found.add("torch.distributed")
        if any(r.split(".")[0] in PICKLERS for r in reached) and not name.endswith(CARRIES_RANKS):
            found.add("pickle")
        by_name = any(r in ("importlib", "importlib.import_module") for r in reached)
        if by_name and not name.endswith(("__init__.py", "run/corpus.py")):
            found.add("an import by name")
    for node in nodes(source):
        first, dot, rest = spelled(node).partition(".")
        full = called.get(first, first) + dot + rest
        if f"{full}.".startswith("torch.distributed.") and not speaks:
            found.add("torch.distributed")
        if full in UNSAFE or (isinstance(node, ast.keyword) and node.arg == "allow_pickle"):
            found.add("unsafe reading")
        if full.endswith(".AVG") or "PREMUL" in full:
            found.add("an average")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and "world_size" in spelled(node.right):
            found.add("an average")
    return found


def allowed(here: str, there: str) -> bool:
    """Whether one package may import another."""
    if here.startswith("isograd_verify."):
        own, other = (name.removeprefix("isograd_verify.") for name in (here, there))
        known = own not in VERIFIER or other in {"errors", "io", "tolerances"} | VERIFIER[own]
        return there.startswith("isograd_verify.") and known
    if there.startswith("isograd_verify."):
        return here in ON_THE_VERIFIER
    if here in EVERYTHING:
        return True
    return there in ANYTHING or there in ARROWS.get(here, set())


class House:
    """What the source says of itself: imports, sizes, names, and the rules that it breaks."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()  # by package
        self.arrows: Counter[tuple[str, str]] = Counter()
        self.broken: list[str] = []
        self.against: list[str] = []
        self.mutable: list[str] = []
        self.no_names: list[str] = []
        self._graph: dict[str, set[str]] = {}
        self._classes: defaultdict[str, list[str]] = defaultdict(list)
        paths = files()
        self._known = {module_of(name): name for name in paths}
        for name, path in paths.items():
            self._read(name, path.read_text())

    def _read(self, name: str, text: str) -> None:
        tree, here = nodes(text)[0], package_of(name)
        assert isinstance(tree, ast.Module)
        self.lines[here] += text.count("\n")
        self._imports(name, here, imports(text, self._known) - {name, "isograd/__init__.py"})
        if text.count("\n") > 500:
            self.broken.append(f"{name} has more than 500 lines")
        if not ast.get_docstring(tree):
            self.broken.append(f"{name} does not open with why it exists")
        self.broken += [f"{name}: {rule}" for rule in sorted(forbidden(text, name))]
        if "/corpus/" in name:  # programs as their users write them
            return
        for node in nodes(text):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                self._classes[node.name].append(name)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name.lower().strip("_") in NO_NAMES:
                self.no_names.append(f"{name}: {node.name}")
        if here in ("engine", "comm", "launcher", "losses", "losses.contrastive"):
            self.mutable += sorted(f"{name}: {field}" for field in reassigned(tree))

    def _imports(self, name: str, here: str, found: set[str]) -> None:
        if name.endswith("__init__.py"):  # the names that a package gives; its own files under TYPE_CHECKING
            found = {other for other in found if package_of(other) != here and here != "__init__"}
        self._graph[name] = found
        for other in found:
            there = package_of(other)
            if there != here:
                self.arrows[here, there] += 1
                if not allowed(here, there):
                    self.against.append(f"{name} imports {other}")

    def counted(self) -> dict[str, tuple[int, list[str]]]:
        """Each row of the table: its number, and what it counts."""
        verifier = sum(count for package, count in self.lines.items() if package.startswith("isograd_verify."))
        own = {arrow for arrow in self.arrows if arrow[0].startswith("isograd_verify.")}
        arrows = {(here, "verify" if "verify" in there else there) for here, there in self.arrows.keys() - own}
        turning = circles(self._graph)
        doubled = [f"{kind}: {', '.join(where)}" for kind, where in self._classes.items() if len(where) > 1]
        return {
            "isograd, lines": (self.lines.total() - verifier, []),
            "isograd-verify, lines": (verifier, []),
            "comm + launcher + engine, lines": (self.lines["comm"] + self.lines["engine"] + self.lines["launcher"], []),
            "arrows between packages": (len(arrows), []),
            "arrows in isograd-verify": (len(own), []),
            "imports against the order": (len(self.against), self.against),
            "files in circles": (sum(map(len, turning)), [" <-> ".join(group) for group in turning]),
            "reassigned fields of engine, comm, launcher, losses": (len(self.mutable), self.mutable),
            "public class names defined twice": (len(doubled), doubled),
            "identifiers that are no names": (len(self.no_names), self.no_names),
        }

    def breaches(self) -> list[str]:
        """What breaks a rule, a line each; what a number counts where it is over its limit."""
        found = [*self.broken, *registries(), *programs()]
        for row, (count, what) in self.counted().items():
            if count > LIMITS[row]:
                found += [f"{row}: {count}, at most {LIMITS[row]}", *(f"    {line}" for line in what)]
        return found


def tree_page() -> str:
    """docs/tree.md, from the first sentence of each file."""
    heads: dict[str, str] = {}
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in files().items():
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].replace("|", "\\|")
        folder, file = "/".join(name.split("/")[:2]) if name.count("/") > 1 else name.split("/")[0], path.name
        if file == "__init__.py":
            heads.setdefault(name.removesuffix("/__init__.py"), first)
        elif "/corpus/" not in name and file != "__main__.py":
            rows[folder].append(f"| `{name.removeprefix(folder + '/')}` | {first} |")
    out = [
        "# Where to find what\n",
        "`python scripts/house.py --tree` writes this page from the first line of each file.\n",
    ]
    for folder in sorted(rows):
        out += [
            f"## {folder}\n",
            f"{heads.get(folder, '')}\n",
            "| file | what it is for |",
            "|---|---|",
            *rows[folder],
            "",
        ]
    return "\n".join(out)


OWN = {**TREES, **{name: ROOT / name for name in ("benchmarks", "examples", "tests")}}


@cache
def names_in(module: str) -> frozenset[str]:
    """Everything that a module of ours binds, at whatever depth; a package's files, too."""
    head, *rest = module.split(".")
    place = OWN[head].joinpath(*rest)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    found = {entry.stem for entry in place.iterdir()} if place.is_dir() else set()
    for node in nodes(file.read_text()) if file.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return frozenset(found)


def imports_of_nothing(source: str) -> list[str]:
    """What this program, and the programs in its texts, import from files of ours that have no such name."""
    found: list[str] = []
    try:
        of_program = nodes(textwrap.dedent(source))
    except SyntaxError:  # a text that is no program
        return found
    for node in of_program:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module.split(".")[0] in OWN:
            lost = [alias.name for alias in node.names if alias.name not in names_in(node.module)]
            found += [f"imports {name} from {node.module}, which has none" for name in lost]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "from isograd" in node.value:
            found += imports_of_nothing(node.value)
    return found


def programs() -> list[str]:
    """Files and pages whose programs do not begin: slow tests and examples may not run for days."""
    found = []
    for folder in ("benchmarks", "docs", "examples", "scripts", "src", "tests", "verify"):
        for path in sorted([*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]):
            if path.name == "test_architecture.py":  # plants such imports
                continue
            text = path.read_text()
            parts = re.findall(r"```python\n(.*?)```", text, re.DOTALL) if path.suffix == ".md" else [text]
            found += [f"{path.relative_to(ROOT)} {lost}" for part in parts for lost in imports_of_nothing(part)]
    return found


def registries() -> list[str]:
    """Tracked files that name a path of a machine, or a package registry."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=False, capture_output=True, text=True).stdout.split()
    found = []
    for name in listed:
        path = ROOT / name
        text = path.read_text(errors="ignore") if path.suffix in TEXTS and path.is_file() else ""
        if re.search(r"/(work|root|home)/[a-z]+/|py" + r"pi\.org|python" + "hosted", text):
            found.append(f"{name} names a path of a machine or a registry")
    return found


def main() -> int:
    """Print the table; 1 if a rule is broken."""
    if "--tree" in sys.argv:
        print(tree_page(), end="")
        return 0
    gc.disable()  # programs as trees are many objects, all of which are kept: half of the time
    house = House()
    for row, (count, what) in house.counted().items():
        print(f"{row:45}{count:8,}   at most {LIMITS[row]:,}")
        if "--all" in sys.argv:
            print("".join(f"    {line}\n" for line in what), end="")
    if "--graph" in sys.argv:
        for (here, there), count in sorted(house.arrows.items()):
            print(f"{here} -> {there}: {count}")
    breaches = house.breaches()
    print("\n".join(breaches))
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
