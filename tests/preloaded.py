"""What every rank of the tests' worlds has imported before it is forked.

torch imports its compiler when the first optimizer is made: 1.5 s of CPU in each rank of each world, and again whenever
a test ends a world.
"""

# ruff: noqa: F401

import torch._dynamo

import isograd.engine
import isograd.models
import isograd.train.loop

from . import settled

settled.settle()
