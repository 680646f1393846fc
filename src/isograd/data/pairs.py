"""Pairs of texts that belong together, one JSON object a line, read by number as token windows are.

Which pairs are held out is decided by the content of each, so it survives additions to the file; so does no order.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

from isograd.data.order import drawn
from isograd.errors import DataError
from isograd.io.untrusted import FileError, open_to_read, parse_line

LONGEST = 1 << 20  # bytes of a line
Pair = tuple[str, str]


class Pairs:
    """A file of pairs, read by number; `batch` pairs are a step."""

    def __init__(
        self, path: str | Path, *, keys: Sequence[str], batch: int, seed: int = 0, held_out: float = 0.1
    ) -> None:
        self.path, self.keys, self.batch, self.seed = Path(path), tuple(keys), batch, seed
        if len(self.keys) != 2 or batch < 1 or not 0 <= held_out < 1:
            raise DataError("IG925", seen=f"keys {self.keys}, batch {batch}, held_out {held_out}")
        # Where lines begin, as numbers: 8 bytes a pair, not a list of all texts.
        self._train, self._held = array("q"), array("q")
        digest = sha256()
        try:
            with open_to_read(self.path, follow=True) as file:
                at = 0
                for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
                    self._texts(line, number)
                    digest.update(line)
                    share = int.from_bytes(blake2b(line, digest_size=8).digest()) / 2**64
                    (self._held if share < held_out else self._train).append(at)
                    at += len(line)
        except FileError as error:
            raise DataError(
                "IG926",
                seen=f"it cannot be read: {error.seen}",
                expected='lines such as {"query": "...", "answer": "..."}',
                fix="check the path",
                path=self.path,
            ) from error
        if not self._train:
            raise DataError(
                "IG926",
                seen=f"{len(self._held)} pairs, all held out",
                expected="at least one line that is not held out",
                fix="lower held_out, or give more pairs",
                path=self.path,
            )
        self.fingerprint = sha256(
            json.dumps([digest.hexdigest(), self.keys, batch, seed, held_out]).encode()
        ).hexdigest()

    def _texts(self, line: bytes, number: int) -> Pair:
        seen: Any
        try:
            found = parse_line(line)
            texts = [found[key] for key in self.keys]
            if len(line) <= LONGEST and all(isinstance(text, str) and text.strip() for text in texts):
                "".join(texts).encode()  # half of a surrogate pair is a ValueError
                return texts[0], texts[1]
            seen = f"a line of over {LONGEST} bytes" if len(line) > LONGEST else texts
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            seen = f"{type(error).__name__}: {error}"
        raise DataError(
            "IG927",
            seen=str(seen)[:200],
            expected=f"a JSON object with texts under {' and '.join(map(repr, self.keys))}",
            path=self.path,
            number=number,
            kind="pair",
        )

    def __len__(self) -> int:
        return len(self._train)

    @property
    def held_out(self) -> int:
        """How many pairs are held out."""
        return len(self._held)

    def rows(self, step: int, rows: range) -> list[Pair]:
        """Each epoch goes through all pairs once, in an order of its own."""
        samples = (step * self.batch + row for row in rows)
        return self._read([self._train[drawn(sample, len(self), str(self.seed))] for sample in samples])

    def held_out_pairs(self, rows: range) -> list[Pair]:
        """Some of the held-out pairs, in the order of the file."""
        return self._read([self._held[row] for row in rows])

    def _read(self, places: Sequence[int]) -> list[Pair]:
        found = []
        with open_to_read(self.path, follow=True) as file:
            for place in places:
                file.seek(place)
                found.append(self._texts(file.readline(LONGEST + 1), -1))
        return found
