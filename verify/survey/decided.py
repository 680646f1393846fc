"""How many programs are decided beside one device: those of the survey, from results.json, and those of the corpus.

    python -m verify.survey.decided             the survey's rows, as they were judged
    python -m verify.survey.decided --corpus    each bug of the corpus and its twin, run beside one device now (minutes)

Right: BUG of what is wrong, PASS of what is right. Open: INCONCLUSIVE. Any other verdict is wrong, and takes ten from
the decided. Of the survey, rows whose truth is known count; of the corpus, programs whose packages are installed. What
is as wrong on one device (a loss that is not divided by its micro-batches) shows no difference there, and is left out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import torch.distributed as dist

from isograd_verify.compare.compare import compare
from isograd_verify.record.recording import VERSION, write_json
from isograd_verify.run import beside, corpus
from isograd_verify.run.attach import inspect
from isograd_verify.run.ranks import LocalRanks
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, PASS
from isograd_verify.watch.calls import Calls
from isograd_verify.watch.capture import Capture
from isograd_verify.watch.feed import Feed
from verify.survey.run import state

ON_ONE = "wrong on one device, too"
TEN = 10  # decided programs that a wrong verdict is worth


class _DoneError(Exception):
    """Where the process of a program would end."""


def _train(name, argument, seed, directory, feed=""):
    """One rank of a program, as `run --beside-one` watches it; `feed`: of the world of one, what it is given."""

    def done(capture):
        raise _DoneError

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = set(dist.distributed_c10d._world.pg_map)
    with Capture(directory, steps=2, lenient=True) as capture:
        Feed(capture, Path(feed), done) if feed else Calls(capture)
        try:
            corpus.module(name).train(argument, seed)
        except _DoneError:
            pass
        except Exception as error:  # in a world of one, where it would end the process
            if not feed:
                raise
            capture.out.about["died"] = f"{type(error).__name__}: {error}"
    if not feed:
        dist.barrier()
    for group in set(dist.distributed_c10d._world.pg_map) - before:
        dist.destroy_process_group(group)


def verdict_of(what, wrong, worlds, home):
    """The verdict beside one device, and what was said first."""
    name, module = what.name.partition("/")[0], what.module
    argument = (what.bug if wrong else "") if "/" in what.name else wrong
    worlds.setdefault(module.WORLD, LocalRanks(module.WORLD)).run(partial(_train, name, argument, 0, str(home)))
    write_json(home / "recording.json", {"version": VERSION, "layout": module.LAYOUT})

    def begin(command, place, stall, more, about):
        one = worlds.setdefault(1, LocalRanks(1))
        one.run(partial(_train, name, argument, 0, str(place), more["ISOGRAD_VERIFY_FEED"]))
        write_json(place / "recording.json", {})
        return None, 0

    beside.begin = begin
    said = beside.judged(home, ["torchrun", "train.py"], inspect(home), 60.0)
    return said.verdict, next((f.sentence for f in said.findings if f.verdict == said.verdict), "")


def on_one_device(what, bench):
    """Whether the bug is there without ranks, too."""
    return compare(bench.watch(what, 1, False, 0), bench.watch(what, 1, True, 0)).verdict == BUG


def of_corpus(names):
    """(name, is it wrong, verdict, sentence) of each program and its twin."""
    twins = set()
    with corpus.Bench() as bench:
        for what in corpus.every_name(names):
            for wrong in (True, False):
                program = what.name.partition("/")[0]
                if not wrong and program in twins:
                    continue
                twins |= set() if wrong else {program}
                with tempfile.TemporaryDirectory() as place:
                    home = Path(place, "recording")
                    home.mkdir()
                    try:
                        told = verdict_of(what, wrong, bench.worlds, home)
                        if wrong and told[0] == PASS and on_one_device(what, bench):
                            told = ON_ONE, ""
                    except Exception as error:
                        told = INCONCLUSIVE, f"{type(error).__name__}: {str(error)[:200]}"
                yield what.name if wrong else f"{program}, right", wrong, *told


def of_survey():
    """The same of the survey's rows."""
    for name, said in state().items():
        right = said.get("truth", {}).get("right")
        if right is not None and "beside" in said and "failed" not in said:
            told = said["beside"]
            yield name, not right, told["verdict"], next((f["sentence"] for f in told["findings"]), "")


def summary(rows, say):
    """Prints what is not right, and the share of decided programs."""
    counts = Counter()
    for name, wrong, verdict, sentence in rows:
        right = BUG if wrong else PASS
        kind = {INCONCLUSIVE: "open", ON_ONE: "left out", right: "right"}.get(verdict, "WRONG")
        counts[kind] += 1
        if kind != "right":
            say(f"{kind}: {name}: {verdict}: {sentence[:160]}")
    every, decided = sum(counts.values()) - counts["left out"], counts["right"] - TEN * counts["WRONG"]
    say(f"decided {counts['right']} of {every} ({counts['open']} open, {counts['WRONG']} wrong): {decided / every:.0%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", action="store_true")
    parser.add_argument("names", nargs="*", help="bugs of the corpus; all without")
    args = parser.parse_args()
    say = partial(print, flush=True)
    summary(of_corpus(args.names) if args.corpus else of_survey(), say)


if __name__ == "__main__":
    main()
