"""An imagined CUDA device and an imagined NCCL, for tests: a GPU's faults are found on a CPU. Imports no torch."""

from .world import Finding as Finding
from .world import Result as Result
from .world import right as right
from .world import run as run
