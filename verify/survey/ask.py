"""A launcher's command for the verifier to watch: asks a server of survey/launch.py to start ranks of its program.

python -S -m verify.survey.ask SOCKET --nproc-per-node 2 program.py --its --arguments
"""

import os
import sys

from verify.survey.launch import ask

if __name__ == "__main__":
    address, _, count, _program, *arguments = sys.argv[1:]
    log = os.readlink("/proc/self/fd/1")
    sys.exit(ask(address, {"ranks": int(count), "arguments": arguments, "environment": dict(os.environ), "log": log}))
