"""Runs the survey: public libraries, watched by isograd-verify, beside the truth computed in plain torch.

    python -m verify.survey.run --home FOLDER [NAME ...] [--again] [--page]

programs.toml says what a program is. For each one named (else each not in results.json yet): its virtual environment
in FOLDER (torch and whatever else the calling environment has is shared with it), truth.py, and the
program under the verifier, alone and beside one device. What came out is kept in results.json after each program: a
survey that was cut off continues where it was. docs/survey.md is written from it.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import tomllib

from verify.survey.judge import judge
from verify.survey.launch import ask, serve
from verify.survey.page import text

HERE = Path(__file__).parent
ROOT = HERE.parent
PROGRAMS = HERE / "programs"
RESULTS = HERE / "results.json"
CLOSE = 1e-3  # relative error of a right gradient: programs compute in fp32 and are below 1e-4
SECONDS, MEMORY = 420, 24 << 30  # one program, one way; address space of one process


def programs():
    """Name -> what programs.toml says of it."""
    return {n: about for n, about in declared().items() if n != "environments"}


def declared():
    return tomllib.loads((HERE / "programs.toml").read_text())


def state(path=RESULTS):
    """Name -> what came out of it."""
    return json.loads(path.read_text()) if path.exists() else {}


def environment(home, name):
    """The Python of an environment of programs.toml, made if it is not there; the calling one without a name."""
    if name is None:
        return sys.executable
    place, packages = home / name, declared()["environments"][name]
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
        own = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, text=True, stdout=subprocess.PIPE,
        ).stdout.strip()  # fmt: skip
        Path(own, "zz_shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--no-compile", "--no-build-isolation", *packages],
            check=True,
            timeout=900,
        )
        (place / "ready").touch()
    return str(python)


def versions(python, libraries):
    names = ["torch", *libraries]
    told = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    return json.loads(subprocess.run([python, "-c", told], check=True, text=True, stdout=subprocess.PIPE).stdout)


def enclosed(log):
    """In a child: a session, time, memory and output of its own, nothing from outside."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    inside = log.parent / "work"
    inside.mkdir(exist_ok=True)
    os.chdir(inside)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT.parent)]), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "WANDB_MODE": "offline", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "1",
    }  # fmt: skip


class Server:
    """A program whose imports are made (launch.py)."""

    def __init__(self, python, script, log):
        self.home = tempfile.TemporaryDirectory()
        self.address = str(Path(self.home.name, "socket"))

        def inside():
            enclosed(log)
            if python == sys.executable:  # torch is imported here already
                serve(self.address, script)
            else:
                os.execv(python, [python, "-m", "verify.survey.launch", self.address, script])

        self.process = multiprocessing.get_context("fork").Process(target=inside)
        self.process.start()
        until = time.monotonic() + SECONDS
        while not Path(self.address).exists() and self.process.is_alive() and time.monotonic() < until:
            time.sleep(0.5)

    def end(self):
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.home.cleanup()


class Servers:
    """One server at a time: the programs of one script follow each other."""

    def __init__(self):
        self.key, self.server = None, None

    def of(self, python, script, log):
        if self.key != (python, script) or not self.server.process.is_alive():
            self.end()
            self.key, self.server = (python, script), Server(python, script, log)
        return self.server

    def end(self):
        if self.server is not None:
            self.server.end()
        self.key, self.server = None, None


def bounded(function, log, *args):
    """Calls a function in a process of its own, within time and memory: its exit code, or None when it was ended."""

    def inside():
        enclosed(log)
        function(*args)

    process = multiprocessing.get_context("fork").Process(target=inside)
    process.start()
    process.join(SECONDS)
    if not process.is_alive():
        return process.exitcode
    process.terminate()
    process.join(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return None


def one(name, about, home, truths, servers, coming):
    """What came out of one program; `truths` are of its kind: those that share its script and environment."""
    log = home / f"{name}.log"
    script = str(PROGRAMS / about["script"])
    try:
        python = environment(home, about.get("environment"))
    except (subprocess.SubprocessError, OSError) as error:
        return {"failed": f"does not install: {str(error)[:200]}"}
    log.write_text("")
    began, said = (
        time.time(),
        {"versions": versions(python, about.get("libraries", [])), "judged": time.strftime("%Y-%m-%d %H:%M")},
    )
    server = servers.of(python, script, log)
    if not server.process.is_alive():
        return said | {"failed": ended(1, log)}
    with tempfile.TemporaryDirectory(dir=home) as place:
        if name not in truths and about.get("truth", True):
            out = Path(place, "truth.json")
            asked = {n: [a.get("ranks", 2), a.get("close", CLOSE), words(a)] for n, a in like(about, coming).items()}
            if bounded(ask, log, server.address, {"truths": asked, "out": str(out), "log": str(log)}) is None:
                servers.end()
            truths |= json.loads(out.read_text()) if out.exists() else {}
        if about.get("truth", True):
            said["truth"] = truths.get(name, {"failed": ended(1, log)})
        server, out = servers.of(python, script, log), Path(place, "verdict.json")
        command = [sys.executable, "-S", "-m", "verify.survey.ask", server.address]
        command += ["--nproc-per-node", str(about.get("ranks", 2)), script, *words(about)]
        kept = home / "recordings" / name
        kept.mkdir(parents=True, exist_ok=True)
        code = bounded(judge, log, command, about.get("beside", True), out, kept)
        if code is None:
            servers.end()
        said |= json.loads(out.read_text()) if out.exists() else {"failed": ended(code, log)}
    return said | {"seconds": round(time.time() - began)}


def words(about):
    return about.get("arguments", "").split()


def like(about, coming):
    """Those of the programs to come that have the same script and environment: their truths cost one start together."""
    kind = [about["script"], about.get("environment")]
    return {n: a for n, a in coming.items() if [a["script"], a.get("environment")] == kind and a.get("truth", True)}


def ended(code, log):
    lines = [line for line in log.read_text().splitlines() if "Error" in line]
    return "took too long" if code is None else f"exit code {code}: {lines[-1][:300] if lines else ''}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--home", type=Path, help="the folder of virtual environments and logs")
    parser.add_argument("--again", action="store_true", help="also those whose result is known")
    parser.add_argument("--page", action="store_true", help="only write docs/survey.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    options = parser.parse_args()
    known = programs()
    if not options.page:
        if options.home is None:
            parser.error("--home FOLDER is needed")
        unknown = set(options.names) - set(known)
        if unknown:
            parser.error(f"no such program: {', '.join(sorted(unknown))}")
        survey(options.names or list(known), known, options)
    if options.results == RESULTS:
        (ROOT / "docs" / "survey.md").write_text(text(known, state()))


def survey(names, known, options):
    home, truths, servers = options.home.resolve(), {}, Servers()
    home.mkdir(parents=True, exist_ok=True)
    coming = [n for n in names if options.again or n not in state(options.results)]
    coming = [n for n in coming if "left_out" not in known[n]]
    for i, name in enumerate(coming):
        found = one(name, known[name], home, truths, servers, {n: known[n] for n in coming[i:]})
        everything = state(options.results) | {name: found}
        part = options.results.with_suffix(".part")
        part.write_text(json.dumps({n: everything[n] for n in known if n in everything}, indent=1) + "\n")
        part.replace(options.results)
        print(name, json.dumps(found), flush=True)
    servers.end()


if __name__ == "__main__":
    main()
