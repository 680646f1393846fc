"""isograd verify: the command line. Nothing of torch is imported before a command needs it.

isograd verify                                            the built-in models over the standard layouts
isograd verify CASE.py:case --layouts "tp2 sp; dp2 zero2"  your case
isograd verify run.yaml                                   the layout of a run
isograd verify run -- torchrun --nproc-per-node 2 train.py any program, unmodified
isograd verify compare REFERENCE CANDIDATE                 two recordings
isograd verify bisect REFERENCE CANDIDATE ...              which of several recordings is the first wrong one
isograd verify bugs                                        the corpus: every bug, and what is said of it
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from isograd import screen
from isograd.errors import ConfigError, VerifyError

if TYPE_CHECKING:
    from isograd.verify.tell.report import Report

VERBS = ("run", "compare", "bisect", "bugs")
PROVE_EXAMPLES = """verbs:
  isograd verify run -- COMMAND           watch any program that trains, unmodified
  isograd verify compare REF CAND         compare two recordings
  isograd verify bisect REF CAND ...      find the first wrong one of several recordings
  isograd verify bugs                     plant every known bug and show what is said of it

exit codes: 0 all pass, 3 a bug, 4 inconclusive, 2 wrong usage"""

Parser = type[argparse.ArgumentParser]
Builtin = Callable[["argparse.Namespace"], "Report"]


def parser_for(verb: str, kind: Parser) -> argparse.ArgumentParser:
    """The parser of 'isograd verify VERB'; verb '' is the proof of a case."""
    shown = f"isograd verify {verb}".strip()
    about = {
        "": "Prove that layouts give the gradients of one device, in fp64, parameter by parameter.",
        "run": "Watch a program that trains, without editing it, and check what needs no reference.",
        "compare": "Compare two recordings of 'verify run --record' (or of ig.verify(keep=...)) and diagnose.",
        "bisect": "Find the first wrong one of several recordings, of revisions in their order.",
        "bugs": "Plant every bug of the corpus, and run its clean twin; print what is said of each.",
    }[verb]
    parser = kind(
        prog=shown, description=about, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=PROVE_EXAMPLES if not verb else None,
    )  # fmt: skip
    {
        "": _prove_options,
        "run": _run_options,
        "compare": _compare_options,
        "bisect": _bisect_options,
        "bugs": _bugs_options,
    }[verb](parser)
    return parser


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON ('-' for the terminal)")
    parser.add_argument("--svg", metavar="FILE", help="write what the terminal shows as a picture")
    parser.add_argument("--html", metavar="FILE", help="write the report as one self-contained page")
    parser.add_argument("--junit", metavar="FILE", help="write the report as JUnit XML, for test reports in CI")
    parser.add_argument("--sarif", metavar="FILE", help="write the report as SARIF, for code scanning in CI")


def _prove_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "case", nargs="?", help="FILE.py:FUNCTION, a function of a mesh that returns a Case; or a run's YAML"
    )
    parser.add_argument("--layouts", help="for example 'tp2 sp; dp2 zero2' (default: a standard grid)")
    parser.add_argument("--dtype", default="float64", choices=("float64", "float32", "bfloat16", "float16"))
    parser.add_argument("--taylor", action="store_true", help="test the gradient against the loss itself, no reference")
    parser.add_argument("--keep", metavar="DIR", help="leave the recordings here")
    parser.add_argument(
        "--replay-routing", action="store_true", help="where rounding decides, tokens go to one device's experts"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for one layout (default 600)"
    )
    _report_options(parser)


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", metavar="DIR", help="keep the recording in this new directory")
    parser.add_argument(
        "--steps", default="3", metavar="WHICH", help="optimizer steps to watch: 3 (the default), 'first,every 1000'"
    )
    parser.add_argument("--stall", type=float, default=300.0, metavar="S", help="seconds of silence that are a hang")
    parser.add_argument("--layout", default="", help="names the axes in what is said, for example 'dp2 tp2'")
    parser.add_argument(
        "--beside-one", action="store_true", help="run it once more in a world of one, on the same data, and compare"
    )
    parser.add_argument(
        "--replay-routing", nargs="?", const="", metavar="DIR",
        help="where rounding decides, tokens go to the experts of this recording (with --beside-one: of each other)",
    )  # fmt: skip
    parser.add_argument(
        "--sketch", action="store_true", help="with --record: sketches of large tensors in place of them, for 'compare'"
    )
    parser.add_argument("--activations", action="store_true", help="record step 1's activations for compare")
    _report_options(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...")


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reference", help="a recording: one device, or another layout")
    parser.add_argument("candidate", help="the recording to judge")
    parser.add_argument("--rename", metavar="FILE", help="JSON object: the candidate's name to the reference's")
    parser.add_argument("--ignore-data", action="store_true", help="compare although the data differ")
    _report_options(parser)


def _bisect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reference", help="a recording that is right: one device, or another layout")
    parser.add_argument("candidates", nargs="+", help="recordings of revisions, the oldest first")
    parser.add_argument("--ignore-data", action="store_true", help="compare although the data differ")
    _report_options(parser)


def _bugs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", help="ids (default: all)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="weights and data to try (default 1)")
    parser.add_argument("--list", action="store_true", help="print the ids")


def main(words: list[str], kind: Parser, builtin: Builtin) -> int:
    """`builtin` proves isograd's own models, and those of runs' configs: this room does not know them."""
    verb = words[0] if words and words[0] in VERBS else ""
    rest = words[1:] if verb else words
    parser = parser_for(verb, kind)
    if verb == "run":
        return _run(parser.parse_args(rest))
    options, extra = parser.parse_known_args(rest)
    if extra:
        parser.refuse(extra)  # type: ignore[attr-defined]
    return {"": lambda o: _prove(o, builtin), "compare": _compare, "bisect": _bisect, "bugs": _bugs}[verb](options)


def _tell(report: Report, options: argparse.Namespace) -> int:
    from isograd.verify.tell.report import render

    if options.json != "-":
        print(render(report, colour=sys.stdout.isatty(), width=screen.width(120)), end="")
    if options.json:
        text = json.dumps(report.data(), indent=1)
        print(text) if options.json == "-" else Path(options.json).write_text(text)
    if options.svg:
        from isograd.verify.tell.report import picture

        Path(options.svg).write_text(picture(report))
    if options.html:
        from isograd.verify.tell.html import page

        Path(options.html).write_text(page(report))
    if options.junit:
        from isograd.verify.tell.outputs import junit

        Path(options.junit).write_text(junit(report))
    if options.sarif:
        from isograd.verify.tell.outputs import sarif

        programs = [word for word in getattr(options, "command", []) if word.endswith(".py")]
        Path(options.sarif).write_text(sarif(report, programs[0] if programs else ""))
    return report.exit_code


def _say(text: str) -> None:
    print(f"verify: {text}", file=sys.stderr, flush=True)


def _prove(options: argparse.Namespace, builtin: Builtin) -> int:
    if options.case is None or options.case.endswith((".yaml", ".yml")):
        return _tell(builtin(options), options)
    if ":" not in options.case or not Path(options.case.rpartition(":")[0]).is_file():
        raise ConfigError(
            "IG620", f"no case at {options.case!r}", expected="FILE.py:FUNCTION, for example my_case.py:case",
            fix="docs/verify.md shows a case; 'isograd verify' without one proves the built-in models",
        )  # fmt: skip
    if not options.layouts:
        raise ConfigError("IG621", "which layouts?", fix="--layouts 'dp2; tp2 sp'")
    import torch

    if options.taylor:
        from isograd.verify.slopes import taylor_test

        return _tell(taylor_test(options.case, options.layouts, options.timeout), options)
    from isograd.verify.prove import verify

    dtype, keep = getattr(torch, options.dtype), options.keep
    return _tell(
        verify(
            options.case, options.layouts, dtype=dtype, timeout=options.timeout, progress=_say, keep=keep,
            replay_routing=options.replay_routing,
        ),
        options,
    )  # fmt: skip


def _run(options: argparse.Namespace) -> int:
    import tempfile

    from isograd import scratch
    from isograd.verify.run import beside
    from isograd.verify.run.attach import run
    from isograd.verify.watch.steps import Steps

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    Steps.of(options.steps)  # refused before anything runs
    one, replay = options.beside_one, options.replay_routing
    if options.sketch and not options.record:
        raise ConfigError("IG624", "--sketch is about a recording, and none is kept", fix="--record DIR")
    if replay is not None and bool(replay) == one:
        raise ConfigError(
            "IG623", "--replay-routing names a recording, or stands beside --beside-one", seen=replay or "no recording",
            expected="--replay-routing DIR, a recording of the reference; or --beside-one --replay-routing",
        )  # fmt: skip
    if one:
        beside.alone(command)  # refused before anything runs
    with tempfile.TemporaryDirectory(prefix="record-", dir=scratch.home()) as place:
        home = Path(options.record) if options.record else Path(place) / "recording"
        report, own = run(
            command, home, options.steps, options.stall, options.layout, options.activations,
            parameters=one or bool(options.record), calls=one, replay=Path(replay) if replay else None,
            sketch=options.sketch,
        )  # fmt: skip
        if one and not own and (home / "rank-0000").is_dir():
            _say("once more, in a world of one")
            again = partial(beside.judged, home, command, stall=options.stall, replay=replay is not None)
            report.subjects = [again(subject=subject) for subject in report.subjects]
        verdict = _tell(report, options)
        if options.record:
            _say(f"recorded in {options.record}")
    if own:
        _say(f"the program itself ended with exit code {own}, which is passed on")
    return own if own else verdict


def _compare(options: argparse.Namespace) -> int:
    from isograd.outside import CONFIG, FileError, read_typed
    from isograd.verify.compare.compare import compare
    from isograd.verify.record.recording import Recording, consistent
    from isograd.verify.tell.report import Report

    rename = {}
    if options.rename:
        try:
            rename = read_typed(dict[str, str], options.rename, CONFIG, follow=True)
        except FileError as error:
            raise VerifyError(
                "IG725", f"the rename table {options.rename!r} cannot be read", seen=error.brief,
                expected='{"candidate name": "reference name"}',
            ) from error  # fmt: skip
    reference, candidate = Recording(options.reference), Recording(options.candidate)
    with consistent(reference, candidate):
        subject = compare(reference, candidate, rename, options.ignore_data)
    return _tell(Report(f"{options.candidate} against {options.reference}", [subject]), options)


def _bisect(options: argparse.Namespace) -> int:
    from isograd.verify.compare.bisect import bisect
    from isograd.verify.compare.compare import compare
    from isograd.verify.record.recording import Recording, consistent
    from isograd.verify.tell.findings import Subject
    from isograd.verify.tell.report import Report

    reference = Recording(options.reference)

    def judge(path: Path) -> Subject:
        _say(f"compares {path}")
        candidate = Recording(path)
        with consistent(reference, candidate):
            return compare(reference, candidate, ignore_data=options.ignore_data)

    subject = bisect([Path(c) for c in options.candidates], judge)
    title = f"{len(options.candidates)} recordings against {options.reference}"
    return _tell(Report(title, [subject]), options)


def _bugs(options: argparse.Namespace) -> int:
    from isograd.corpus import FRAMEWORKS, PROGRAMS
    from isograd.verify.run.corpus import every_name, table

    if options.list:
        print("\n".join([*PROGRAMS, *FRAMEWORKS]))
        return 0
    return table(every_name(options.names), max(1, options.seeds), _say)
