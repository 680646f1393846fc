"""Files and terminals: bounded reading of what comes from outside, whole-or-absent writing, temporary folders."""

from isograd_verify.io import tempdir as tempdir
from isograd_verify.io import terminal as terminal

__all__: list[str] = []  # nothing here is public API
