"""Starts ranks of a program, as torchrun does, from a process that has made the program's imports already.

On a small machine imports cost more than all the rest of a program of the survey, and it starts many times. So a server
per program imports it once and forks ranks when asked. Under the verifier the asking is a command like any launcher's
(survey/ask.py), and the watching is prepared in the forked process as it is in every Python of `isograd-verify run`.

    python -m verify.survey.launch SOCKET program.py
"""

import json
import os
import socket
import sys
from importlib import util
from pathlib import Path


def load(path):
    """The program as a module: its imports are made, and nothing else."""
    sys.path.insert(0, str(Path(path).parent))
    spec = util.spec_from_file_location("program", path)
    program = sys.modules["program"] = util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def rank_environment(index, ranks, port):
    """What torchrun tells a rank."""
    told = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {k: str(v) for k, v in told.items()} | {"MASTER_ADDR": "127.0.0.1", "GROUP_RANK": "0"}


def start(function, ranks, *args):
    """Calls `function(index, *args)` in `ranks` forked processes; raises if one fails."""
    from torch.multiprocessing import start_processes

    start_processes(function, args, nprocs=ranks, start_method="fork")


def rank(index, program, ranks, port, words):
    rank_environment(index, ranks, port)
    sys.argv = words
    program.main()


def watched(program, path, asked):
    """Ranks that the verifier watches."""
    import torch.distributed as dist

    from isograd_verify.watch.watched import prepare

    os.environ.clear()
    os.environ |= asked["environment"]
    plain = dist.init_process_group
    prepare(os.environ["ISOGRAD_VERIFY"])
    for module in list(sys.modules.values()):  # who has imported the function by name got the one without watching
        if vars(module).get("init_process_group") is plain:
            module.init_process_group = dist.init_process_group
    start(rank, asked["ranks"], program, asked["ranks"], free_port(), [path, *asked["arguments"]])


def answer(program, path, asked):
    """One request, in a forked child of the server: 0, or 1 when a rank failed."""
    with open(asked["log"], "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        if "truths" in asked:
            from verify.survey.truth import tell

            tell(program, path, asked["truths"], asked["out"])
        else:
            watched(program, path, asked)
    except Exception as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


def serve(address, path):
    import torch

    torch.set_num_threads(1)
    program = load(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        while True:
            connection, _ = listening.accept()
            with connection, connection.makefile("rw") as lines:
                asked = json.loads(lines.readline())
                child = os.fork()
                if not child:
                    os._exit(answer(program, path, asked))
                lines.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")


def ask(address, asked):
    """Asks a server, and waits for its answer: an exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        with server.makefile("rw") as lines:
            lines.write(json.dumps(asked) + "\n")
            lines.flush()
            return abs(int(lines.readline() or 1))


if __name__ == "__main__":
    serve(*sys.argv[1:])
