"""What share of its best rate a kernel reaches, by the sizes that it is given.

A product is cut into tiles, and a device computes `units` of them at once: 133 tiles take as long as 264. Of some tiles
the library takes the best; a small product is also cut along k. Rows that are no multiple of 16 bytes are read without
the instructions that feed the matrix units. Devices without such units (a CPU) say `units: 0`, and reach the same share
at every size.
"""

from __future__ import annotations

import math
from functools import lru_cache

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.8), (64, 64, 0.6))  # rows, columns, share
CUTS = (1, 2, 4)  # of a product along k
CUT_COST = 0.05  # of the time, for each further part: its sums are written and read again
FILLED = 128  # elements of k before a tile is computed at its full rate
ALIGNED = 8  # elements of 16 bits in 16 bytes
UNALIGNED = 0.25  # 16-bit products of an A100 outside of its matrix units: 78 of 312 TFLOPS
BLOCK = 128  # queries and keys of a block of fused attention; those on the diagonal are computed whole


@lru_cache(maxsize=65536)
def product_share(m: float, n: float, k: float, units: int) -> float:
    """Of the rate of large products, for [m, k] times [k, n]."""
    if not units:
        return 1.0
    best = 0.0
    for rows, columns, share in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        used = m * n / (tiles * rows * columns)
        for cuts in CUTS:
            waves = math.ceil(tiles * cuts / units)
            filled = tiles * cuts / (waves * units)
            depth = k / cuts
            best = max(best, share * used * filled * depth / (depth + FILLED) / (1 + CUT_COST * (cuts - 1)))
    return best * (1.0 if k % ALIGNED == 0 and n % ALIGNED == 0 else UNALIGNED)


def attention_share(length: float) -> float:
    """Of the rate of long sequences, counting half of the products: blocks on the diagonal do all of theirs."""
    return length / (length + BLOCK)
