"""Tokens to text, piece by piece, each piece as soon as its characters are whole.

What the pieces say together is what the tokenizer makes of all tokens at once. A character can have several tokens
(bytes), and a token's text can depend on the one before it (a space that only the first word loses). So a token is
decoded behind the tokens of the piece before it, not alone, and not behind the whole answer: an answer costs time by
its length. text.rstrip(HALF) is what no later token changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
LONGEST = 64  # tokens that are waited for; bytes that never become a character are said as they are


class TextStream:
    """The text of one answer."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []  # the tokens of the last piece
        self._ids: list[int] = []  # those since then
        self._said = ""  # of the text of both: what was given

    def add(self, token: int) -> str:
        """The text that is certain with this token; often empty, where a character is not whole."""
        self._ids.append(token)
        text = self._decode([*self._before, *self._ids])
        whole = text.rstrip(HALF)
        piece = whole[len(self._said) :] if whole.startswith(self._said) else ""
        if len(self._ids) > LONGEST:
            return self.rest()
        if piece and whole == text:
            self._next()
        elif piece:
            self._said = whole
        return piece

    def rest(self) -> str:
        """What is left at the end: bytes that have become no character."""
        text = self._decode([*self._before, *self._ids])
        piece = text[len(self._said) :] if text.startswith(self._said) else self._decode(self._ids)
        self._next()
        return piece

    def _next(self) -> None:
        self._before, self._ids = self._ids, []
        self._said = self._decode(self._before)
