"""What a trained model writes: `isograd generate` and `isograd chat`."""

from isograd.generate.sampling import Sampling, draw
from isograd.generate.writer import Writer, open_writer

__all__ = ["Sampling", "Writer", "draw", "open_writer"]
