"""What the verifier says of a command, alone and beside one device: `isograd-verify run --beside-one`, with the verdict
of the watched run by itself kept, too."""

import json
import shutil
import tempfile
from pathlib import Path

from isograd_verify.run import beside
from isograd_verify.run.attach import run
from isograd_verify.tell.findings import NOTE


def told(subject):
    return {
        "verdict": subject.verdict,
        "findings": [
            {"verdict": f.verdict, "bug": f.bug, "sentence": f.sentence, "coefficients": f.coefficients[:8]}
            for f in subject.findings
            if f.verdict != NOTE
        ],
    }


def judge(command, both, out, kept=None):
    """Writes {"alone": ..., "beside": ...} to `out`. `kept`: the folder in which the recording stays."""
    with tempfile.TemporaryDirectory() as place:
        home = Path(kept or place) / "recording"
        shutil.rmtree(home, ignore_errors=True)
        report, own = run(command, home, stall=200.0, parameters=both, calls=both)
        (subject,) = report.subjects
        said = {"alone": told(subject)}
        if own:
            said["failed"] = f"exit code {own}"
        if both and not own and (home / "rank-0000").is_dir():
            said["beside"] = told(beside.judged(home, command, subject, 200.0))
    Path(out).write_text(json.dumps(said))
