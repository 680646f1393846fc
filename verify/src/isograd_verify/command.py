"""isograd-verify: the command line. Nothing of torch is imported before a command needs it.

`isograd verify` is the same, and proves layouts of isograd's engine: isograd gives this module what it needs for that,
by an argument, or by an entry point where `isograd-verify` is called.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from isograd_verify import __version__
from isograd_verify.errors import ConfigError, VerifyError
from isograd_verify.io import terminal
from isograd_verify.io.command_line import Parser, exit_code

if TYPE_CHECKING:
    from isograd_verify.tell.report import Report

ABOUT = "Find and name gradient bugs in any torch.distributed program."
EPILOG = """verbs:
  {prog} run -- COMMAND           watch any program that trains, unmodified
  {prog} compare REF CAND         compare two recordings
  {prog} bisect REF CAND ...      find the first wrong one of several recordings
  {prog} merge WHOLE PART ...     put the recordings of several nodes together
  {prog} bugs                     plant every known bug and show what is said of it

exit codes: 0 all pass, 3 a bug, 4 inconclusive, 2 wrong usage"""
ALONE = """

layouts and configs of isograd's engine (run.yaml, CASE.py:case --layouts ...)
are proven once isograd is installed beside isograd-verify"""
ENTRY_POINTS = "isograd_verify.proof"


class EngineProof(Protocol):
    """What proves layouts of an engine: isograd registers it (isograd/cli/verify.py)."""

    ABOUT: str

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of a proof to a parser."""

    def prove(self, options: argparse.Namespace) -> Report:
        """The report of the proof that the options ask for."""


def main(words: Sequence[str] | None = None) -> int:
    """The command `isograd-verify`; its exit code."""
    return exit_code(lambda: command(list(sys.argv[1:] if words is None else words), "isograd-verify", None))


def registered() -> EngineProof | None:
    """The proof of an engine that is installed beside the verifier."""
    from importlib.metadata import entry_points

    found = next(iter(entry_points(group=ENTRY_POINTS)), None)
    try:
        return None if found is None else found.load()
    except ModuleNotFoundError:  # the engine was removed, or its folder was
        return None


def command(words: list[str], prog: str, proof: EngineProof | None) -> int:
    """One command, as words behind `prog`. `proof`: of the engine that calls this, else one that is registered."""
    verb = words[0] if words and words[0] in VERBS else ""
    rest, proof = (words[1:], None) if verb else (words, proof or registered())
    parser = parser_for(verb, prog, proof)
    if verb == "run":
        return _run(parser.parse_args(rest))
    if not verb and proof is None and rest and not rest[0].startswith("-"):
        raise ConfigError(
            "IG625", f"{rest[0]!r} is no verb of the verifier", expected=", ".join(VERBS),
            fix="runs (YAML) and cases (FILE.py:FUNCTION) are proven by isograd's engine: install isograd beside "
            "isograd-verify, from the same repository",
        )  # fmt: skip
    options, extra = parser.parse_known_args(rest)
    if extra:
        parser.refuse(extra)
    if verb:
        return VERBS[verb][1](options)
    if proof is not None:
        return _tell(proof.prove(options), options)
    parser.print_help()
    return 2


def parser_for(verb: str, prog: str, proof: EngineProof | None) -> Parser:
    """The parser of 'isograd-verify VERB'; verb '' is the proof of a case, where something can prove one."""
    options = VERBS[verb][0] if verb else None
    about = proof.ABOUT if proof is not None else ABOUT
    epilog = None if verb else EPILOG.format(prog=prog) + ("" if proof is not None else ALONE)
    parser = Parser(
        prog=f"{prog} {verb}".strip(), description=options.__doc__ if options else about, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=epilog,
    )  # fmt: skip
    if options is None:
        parser.add_argument("--version", action="version", version=f"isograd-verify {__version__}")
    more = options if proof is None else proof.options
    if more is not None:
        more(parser)
        if verb != "bugs":
            _report_options(parser)
    return parser


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON ('-' for the terminal)")
    parser.add_argument("--svg", metavar="FILE", help="write what the terminal shows as a picture")
    parser.add_argument("--html", metavar="FILE", help="write the report as one self-contained page")
    parser.add_argument("--junit", metavar="FILE", help="write the report as JUnit XML, for test reports in CI")
    parser.add_argument("--sarif", metavar="FILE", help="write the report as SARIF, for code scanning in CI")
    parser.add_argument("--github", action="store_true", help="print annotations for GitHub Actions, and a job summary")
    parser.add_argument("--baseline", metavar="FILE", help="an earlier --json report: only new findings count")
    parser.add_argument(
        "--fail-on", choices=("bug", "inconclusive"), default="inconclusive",
        help="'bug': what could not be told ends with exit code 0 (default: with 4)",
    )  # fmt: skip


def _run_options(parser: argparse.ArgumentParser) -> None:
    """Watch a program that trains, without editing it, and check what needs no reference."""
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
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...")


def _compare_options(parser: argparse.ArgumentParser) -> None:
    """Compare two recordings of 'verify run --record' (or of ig.verify(keep=...)) and diagnose."""
    parser.add_argument("reference", help="a recording: one device, or another layout")
    parser.add_argument("candidate", help="the recording to judge")
    parser.add_argument("--rename", metavar="FILE", help="JSON object: the candidate's name to the reference's")
    parser.add_argument("--ignore-data", action="store_true", help="compare although the data differ")


def _bisect_options(parser: argparse.ArgumentParser) -> None:
    """Find the first wrong one of several recordings, of revisions in their order."""
    parser.add_argument("reference", help="a recording that is right: one device, or another layout")
    parser.add_argument("candidates", nargs="+", help="recordings of revisions, the oldest first")
    parser.add_argument("--ignore-data", action="store_true", help="compare although the data differ")


def _merge_options(parser: argparse.ArgumentParser) -> None:
    """Put the recordings of several nodes together, and check what needs no reference."""
    parser.add_argument("whole", help="a new directory for the recording of all ranks")
    parser.add_argument("parts", nargs="+", help="what 'verify run --record DIR' left on each node")


def _bugs_options(parser: argparse.ArgumentParser) -> None:
    """Plant every bug of the corpus, and run its clean twin; print what is said of each."""
    parser.add_argument("names", nargs="*", help="ids (default: all)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="weights and data to try (default 1)")
    parser.add_argument("--log", metavar="FILE", help="keep each outcome here; those it has are not run again")
    parser.add_argument("--list", action="store_true", help="print the ids")


def _tell(report: Report, options: argparse.Namespace) -> int:
    from isograd_verify.tell.accepted import accept
    from isograd_verify.tell.findings import INCONCLUSIVE
    from isograd_verify.tell.html import page
    from isograd_verify.tell.outputs import github, junit, sarif, summary
    from isograd_verify.tell.report import picture, render

    programs = [word for word in getattr(options, "command", []) if word.endswith(".py")]
    accept(report, Path.cwd(), programs, Path(options.baseline) if options.baseline else None)

    if options.json != "-":
        print(render(report, colour=sys.stdout.isatty(), width=terminal.width(120)), end="")
    if options.json:
        text = json.dumps(report.data(), indent=1)
        print(text) if options.json == "-" else Path(options.json).write_text(text)
    program = programs[0] if programs else ""
    placed = partial(sarif, source=program)
    files = (options.svg, picture), (options.html, page), (options.junit, junit), (options.sarif, placed)
    for path, text_of in files:
        if path:
            Path(path).write_text(text_of(report))
    if options.github:
        print(github(report, program), end="")
        if os.environ.get("GITHUB_STEP_SUMMARY"):
            with open(os.environ["GITHUB_STEP_SUMMARY"], "a") as file:
                file.write(summary(report))
    return 0 if options.fail_on == "bug" and report.verdict == INCONCLUSIVE else report.exit_code


def _say(text: str) -> None:
    print(f"verify: {text}", file=sys.stderr, flush=True)


def _run(options: argparse.Namespace) -> int:
    import tempfile

    from isograd_verify.io import tempdir
    from isograd_verify.run import beside
    from isograd_verify.run.attach import run
    from isograd_verify.tell.findings import NOTE, Finding
    from isograd_verify.watch.life import Steps

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
    with tempfile.TemporaryDirectory(prefix="record-", dir=tempdir.home()) as place:
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
        elif one and own:
            left = "not compared with one device: the first run is not whole"
            report.subjects[0].findings.append(Finding(NOTE, "", left))
        verdict = _tell(report, options)
        if not (one or own or verdict):
            _say("a factor that all gradients share is not seen without --beside-one")
        if options.record:
            _say(f"recorded in {options.record}")
    if own:
        _say(f"the program itself ended with exit code {own}, which is passed on")
    return own if own else verdict


def _compare(options: argparse.Namespace) -> int:
    from isograd_verify.compare.compare import compare
    from isograd_verify.io.untrusted import CONFIG, FileError, read_json
    from isograd_verify.record.recording import Recording, consistent
    from isograd_verify.tell.report import Report

    rename = {}
    if options.rename:
        try:
            rename = read_json(options.rename, CONFIG, follow=True)
            if not isinstance(rename, dict) or not all(isinstance(name, str) for name in rename.values()):
                raise TypeError("something else than an object of strings")
        except (FileError, TypeError) as error:
            raise VerifyError(
                "IG725", f"the rename table {options.rename!r} cannot be read", seen=getattr(error, "brief", error),
                expected='{"candidate name": "reference name"}',
            ) from error  # fmt: skip
    reference, candidate = Recording(options.reference), Recording(options.candidate)
    with consistent(reference, candidate):
        subject = compare(reference, candidate, rename, options.ignore_data)
    return _tell(Report(f"{options.candidate} against {options.reference}", [subject]), options)


def _bisect(options: argparse.Namespace) -> int:
    from isograd_verify.compare.bisect import bisect
    from isograd_verify.compare.compare import compare
    from isograd_verify.record.recording import Recording, consistent
    from isograd_verify.tell.findings import Subject
    from isograd_verify.tell.report import Report

    reference = Recording(options.reference)

    def judge(path: Path) -> Subject:
        _say(f"compares {path}")
        candidate = Recording(path)
        with consistent(reference, candidate):
            return compare(reference, candidate, ignore_data=options.ignore_data)

    subject = bisect([Path(c) for c in options.candidates], judge)
    title = f"{len(options.candidates)} recordings against {options.reference}"
    return _tell(Report(title, [subject]), options)


def _merge(options: argparse.Namespace) -> int:
    from isograd_verify.record.recording import merge
    from isograd_verify.run.attach import inspect
    from isograd_verify.tell.report import Report

    whole = Path(options.whole)
    merge(whole, [Path(part) for part in options.parts])
    return _tell(Report(f"isograd-verify merge {options.whole}", [inspect(whole)]), options)


def _bugs(options: argparse.Namespace) -> int:
    from isograd_verify.corpus import FRAMEWORKS, PROGRAMS
    from isograd_verify.run.corpus import every_name, table

    if options.list:
        print("\n".join([*PROGRAMS, *FRAMEWORKS]))
        return 0
    log = Path(options.log) if options.log else None
    return table(every_name(options.names), max(1, options.seeds), _say, log)


VERBS = {
    "run": (_run_options, _run),
    "compare": (_compare_options, _compare),
    "bisect": (_bisect_options, _bisect),
    "merge": (_merge_options, _merge),
    "bugs": (_bugs_options, _bugs),
}
