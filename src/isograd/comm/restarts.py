"""A name for each start of a world, where torchrun starts its ranks anew in a store that still knows the old ones.

With `--max-restarts`, torchrun ends all ranks when one dies, and starts them again. Its machines keep the store
in which ranks meet, so a new rank may find the addresses of the old ones there, and wait for them for ever (torch 2.13,
gloo, c10d on two machines). No number that torchrun gives to its ranks is the same on all machines and another one at
each start: TORCHELASTIC_RESTART_COUNT counts the deaths of one machine. So rank 0 makes a name up, and tells it to each
rank that asks. A rank asks with a word of its own, new at each start: what an old one has asked is answered in vain.
"""

from __future__ import annotations

import os
import time
from typing import Any
from uuid import uuid4

from isograd.errors import CommError


def possible() -> bool:
    """Whether torchrun may start the ranks of this world again."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")


def name(store: Any, rank: int, size: int, seconds: float) -> str:
    """The same on all ranks of this start. `store`: torch's, where ranks of earlier starts may have met, too."""
    if rank:
        mine = uuid4().hex
        store.set(f"isograd/asks/{rank}", mine)
        found = str(store.get(f"isograd/start/{mine}").decode())
        store.set(f"isograd/knows/{found}/{rank}", "")
        return found
    found, answered, end = uuid4().hex, dict[int, bytes](), time.monotonic() + seconds
    missing = list(range(1, size))
    while missing:
        for other in missing:
            word = store.get(f"isograd/asks/{other}") if store.check([f"isograd/asks/{other}"]) else b""
            if word != answered.get(other, b""):
                answered[other] = word
                store.set(f"isograd/start/{word.decode()}", found)
        missing = [other for other in missing if not store.check([f"isograd/knows/{found}/{other}"])]
        if missing and time.monotonic() > end:
            raise CommError("IG208", seen=f"no word of ranks {missing[:8]} in {seconds:.0f} s", size=size)
        time.sleep(0.01 if missing else 0)
    return found
