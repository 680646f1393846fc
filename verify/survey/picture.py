"""The README's picture: the verifier on transformers' Qwen 3 under tensor parallelism, with two micro-batches.

    python -m verify.survey.picture

Writes docs/verify.svg. The program, survey/programs/transformers_tp.py, knows nothing of the verifier. What watching
costs is left out: it is of the machine, not of the program.
"""

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from isograd_verify.run import beside
from isograd_verify.run.attach import run
from isograd_verify.tell.report import picture
from verify.survey.run import PROGRAMS, ROOT

COMMAND = ["torchrun", "--nproc-per-node", "2", "transformers_tp.py", "--qwen3", "--accumulate", "2"]


def main():
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.chdir(PROGRAMS)
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "recording"
        report, _ = run(COMMAND, home, stall=300.0, parameters=True, calls=True)
        subject = beside.judged(home, COMMAND, report.subjects[0], 300.0)
    subject.facts.pop("overhead", None)
    subject.name = f"transformers {version('transformers')}, tp2, 2 micro-batches"
    report.subjects, report.title = [subject], f"isograd-verify run --beside-one -- {' '.join(COMMAND)}"
    (ROOT / "docs" / "verify.svg").write_text(picture(report, width=110))


if __name__ == "__main__":
    main()
