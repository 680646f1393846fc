"""Another library's own test file, unmodified, with its Trainer or its Accelerator taken from our integrations.

    python tests/integrations/public.py test_trainer.py -k "accumulation or resume" [--layout zero3] [pytest's options]
    torchrun --nproc-per-node 2 tests/integrations/public.py --script test_sync.py [--stock] [--call EXPRESSION]

A file of tests runs twice, with the library's own class and with the integration's; a test applies where the former
passes. `--script` runs the main() of a file that asserts in it, on the ranks of torchrun: with the integration, or
with the library's own class (`--stock`). `--call` evaluates an expression in the file instead, for functions that its
main() leaves out on CPUs.
docs/integrations.md has where the files are, what ran, and what does not apply.

`--toys`: the models and rows that TRL's tests download are small random ones (tests/integrations/stand_ins.py).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest


class Outcomes:
    """Notes of each test whether it passed, and the last line of its error."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.found[name] = str(report.longrepr).strip().rpartition("\n")[0].strip().splitlines()[-1][:300]
        elif report.skipped:
            self.found.setdefault(name, "skipped")
        elif report.when == "call":
            self.found.setdefault(name, "passed")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.found[report.nodeid] = str(report.longrepr).strip().splitlines()[-1]


def open_doors(layout: str | None) -> None:
    """Each class that has an integration is the integration's, under the names from which a test imports it."""
    import accelerate
    import transformers

    import isograd as ig

    integrations: list[tuple[Any, str, Any]] = [
        (transformers, "Trainer", ig.integrations.trainer(transformers.Trainer, layout))
    ]
    try:
        import trl

        kinds = ("SFTTrainer", "DPOTrainer", "GRPOTrainer")
        integrations += [(trl, kind, ig.integrations.trainer(getattr(trl, kind), layout)) for kind in kinds]
    except ImportError:
        pass
    for module in (accelerate, importlib.import_module("accelerate.accelerator")):
        integrations.append((module, "Accelerator", ig.integrations.Accelerator))
    for module, name, kind in integrations:
        setattr(module, name, kind)


def names_of_older_versions(file: Path) -> list[str]:
    """A test file of another version, or a file that it imports, imports names that are gone: each is None then, and
    the tests that use it fail; `is_..._available` says no."""
    given = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 1 and (beside := file.with_name(f"{node.module}.py")).exists():
            given += names_of_older_versions(beside)
        elif not node.level and (node.module or "").partition(".")[0] in LIBRARIES:
            module = importlib.import_module(str(node.module))
            gone = [name.name for name in node.names if not hasattr(module, name.name)]
            for name in gone:
                setattr(module, name, (lambda: False) if name.endswith("_available") else None)
            given += gone
    return given


LIBRARIES = ("transformers", "accelerate", "trl")


def outcomes(file: Path, options: argparse.Namespace, rest: list[str], *, ours: bool) -> dict[str, str]:
    """Of each test of a file, in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as told:
        words = [sys.executable, __file__, str(file), "--tell", told.name, *rest]
        words += ["--ours"] * ours + ["--toys"] * options.toys
        words += ["--layout", options.layout] if options.layout else []
        subprocess.run(words, check=False, stdout=None if options.verbose else subprocess.DEVNULL)
        return dict(json.loads(Path(told.name).read_text() or "{}"))


def run_script(file: Path, call: str, rest: list[str]) -> None:
    """Call the main() of a file, or what it is asked to."""
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, file
    sys.modules[file.stem] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = [str(file), *rest]
    eval(call, vars(module))


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("file", type=Path)
    parser.add_argument("--script", action="store_true")
    parser.add_argument("--stock", action="store_true", help="a script with the library's own class")
    parser.add_argument("--call", default="main()", metavar="EXPRESSION")
    parser.add_argument("--layout")
    parser.add_argument("--toys", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--tell", type=Path, help=argparse.SUPPRESS)  # of the processes that `outcomes` starts
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.script:
        if not options.stock:
            open_doors(options.layout)
        run_script(options.file, options.call, rest)
        return 0
    if options.tell:
        names_of_older_versions(options.file)
        file, tell = options.file.resolve(), options.tell.resolve()
        if options.ours:
            open_doors(options.layout)
        with tempfile.TemporaryDirectory() as scratch:
            if options.toys:
                import stand_ins

                stand_ins.write(Path(scratch))
                os.chdir(scratch)
            notes = Outcomes()
            pytest.main([str(file), "-q", "-p", "no:cacheprovider", "-p", "no:warnings", *rest], plugins=[notes])
            os.chdir(file.parent)
        tell.write_text(json.dumps(notes.found))
        return 0
    stock = outcomes(options.file, options, rest, ours=False)
    integration = outcomes(options.file, options, rest, ours=True)
    passed = [name for name, outcome in stock.items() if outcome == "passed"]
    failed = [name for name in passed if integration.get(name) != "passed"]
    for name, outcome in stock.items():
        if outcome not in ("passed", "skipped"):
            print(f"fails without an integration, too: {name}: {outcome}")
    for name in failed:
        print(f"FAILS WITH THE INTEGRATION: {name}: {integration.get(name, 'did not run')}")
    skipped, through = list(stock.values()).count("skipped"), len(passed) - len(failed)
    print(f"of {len(stock)} tests {skipped} skip themselves, {len(passed)} pass with the library's own class;")
    print(f"{through} of these pass with the integration")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
