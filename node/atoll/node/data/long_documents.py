"""Encoding of a long document in pieces that give the same tokens as the whole, in bounded memory.

Neighbouring pieces overlap. They are joined where both give the same tokens at the same places, many in a row. In the
middle of such a run, the left piece has seen everything before, and the right piece everything behind.

A joint is the end of a word (pre-token), since tokenizers encode words on their own. Two models have joints inside
words, too:

- BPE: a sequence of tokens is the BPE of a text if each two neighbours are the BPE of theirs, and every two neighbours
  of the joined sequence are neighbours in one of the pieces.
- Unigram: the best path through a text may depend on where the text ends. Every path has a node in the last characters
  of the left piece, as many as the longest token has. So the overlap is encoded up to each of them, and the joint must
  be a node of all these paths. Text that repeats itself three times in a row ("aaa") has paths of equal score, between
  which rounding decides; there is no joint inside such words.

Where no joint is found, the overlap grows, and in the end both pieces are encoded as one. A text that is one word of
WordPiece, or of Unigram with repetitions, can therefore need as much memory as the whole.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from atoll.node.data.encoders import Encoding, FastEncoder

PIECE_CHARACTERS = 1 << 17
OVERLAP_CHARACTERS = 1 << 11
AHEAD = 4  # pieces encoded at once, on as many cores; meanwhile each character needs about 165 bytes of memory
_RUN = 16  # equal tokens in a row
_GROWTH = 4
_REPEATED = re.compile(r"(.{1,32}?)\1\1", re.DOTALL)


class _Text:
    """The characters of a document from `_start` on, read on demand."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._chunks = iter(chunks)
        self._start, self._text, self.ended = 0, "", False

    def read_to(self, stop: int) -> int:
        """Read until character `stop` or the end of the document; return the position that was reached."""
        new, have = [], self._start + len(self._text)
        while have < stop and not self.ended:
            chunk = next(self._chunks, b"")
            self.ended = not chunk
            new.append(self._decoder.decode(chunk, final=self.ended))
            have += len(new[-1])
        if new:
            self._text = "".join((self._text, *new))
        return min(stop, have)

    def piece(self, start: int, stop: int) -> tuple[int, str]:
        """Return a piece of the text for `FastEncoder.encode_pieces`."""
        return start, self._text[start - self._start : stop - self._start]

    def forget(self, before: int) -> None:
        """Forget the text before a character."""
        self._text = self._text[before - self._start :]
        self._start = before


class LongDocument:
    """Encodes one document. `tokens` yields its tokens in order."""

    def __init__(
        self,
        chunks: Iterable[bytes],
        encoder: FastEncoder,
        piece_characters: int = PIECE_CHARACTERS,
        overlap_characters: int = OVERLAP_CHARACTERS,
    ) -> None:
        """`chunks` are the document's UTF-8, cut anywhere."""
        self._text, self._encoder = _Text(chunks), encoder
        self._piece, self._overlap = piece_characters, overlap_characters
        self._ahead: deque[Encoding] = deque()

    def tokens(self) -> Iterator[NDArray[np.uint32]]:
        """Yield the tokens of the whole document, in parts."""
        left = self._encode(0, self._piece)
        done = 0  # characters whose tokens were yielded
        while self._text.read_to(left.stop + 1) > left.stop:
            joint, right = self._next(left, done)
            if joint is None:
                left = right
                self._ahead = deque(piece for piece in self._ahead if piece.stop > left.stop)
                continue
            yield left.ids[left.first_at(done) : left.first_at(joint)]
            left, done = right, joint
            self._text.forget(left.start)
        yield left.ids[left.first_at(done) if done else 0 :]

    def _next(self, left: Encoding, done: int) -> tuple[int | None, Encoding]:
        """Return the next piece and the character where it joins; without a joint, an encoding of both."""
        right = self._piece_after(left.stop)
        overlap = self._overlap
        while (joint := find_joint(left, right, done, partial(self._is_joint, left, right))) is None:
            overlap *= _GROWTH
            start = left.span(max(0, left.first_at(left.stop - overlap) - 1))[0] if len(left) else left.start
            if start <= done or overlap > (left.stop - left.start) // 2:
                return None, self._encode(left.start, 2 * left.stop - left.start)
            right = self._encode(start, left.stop + self._piece)
        return joint, right

    def _is_joint(self, left: Encoding, right: Encoding, joint: int) -> bool:
        """Whether two pieces may be joined at `joint` if it is inside a word."""
        if self._encoder.model != "Unigram":
            return self._encoder.model == "BPE"
        start, stop = right.start, left.stop
        _, text = self._text.piece(left.start, right.stop)
        if _REPEATED.search(text):
            return False
        ends = range(stop - 1, max(joint, stop - 1 - self._encoder.longest_piece), -1)
        paths = self._encoder.encode_pieces([self._text.piece(start, end) for end in ends])
        return all(_has_node(path, joint) for path in paths)

    def _piece_after(self, stop: int) -> Encoding:
        while self._ahead and self._ahead[0].stop <= stop:
            self._ahead.popleft()
        if not self._ahead or self._ahead[0].start >= stop:
            end = self._text.read_to(stop + AHEAD * self._piece)
            starts = range(stop, end, self._piece)
            pieces = [self._text.piece(start - self._overlap, min(end, start + self._piece)) for start in starts]
            self._ahead = deque(self._encoder.encode_pieces(pieces))
        return self._ahead.popleft()

    def _encode(self, start: int, stop: int) -> Encoding:
        return self._encoder.encode_pieces([self._text.piece(start, self._text.read_to(stop))])[0]


def find_joint(left: Encoding, right: Encoding, done: int, inside_word: Callable[[int], bool]) -> int | None:
    """Return a character after `done` at which tokens of `right` can continue those of `left`; None if there is none.

    It is the middle of the first run of equal tokens that holds one. `inside_word` says whether a character that ends
    no word may be one; it is asked once.
    """
    run: list[tuple[int, int]] = []  # neighbouring equal tokens: numbers in left and right
    middle: int | None = None  # of the first run, inside a word
    i, j = left.first_at(right.start), 0
    while i < len(left) and j < len(right) and right.span(j)[0] < left.stop:
        place, other = left.span(i), right.span(j)
        if place == other and left.ids[i] == right.ids[j]:
            run.append((i, j))
        else:
            run.clear()
        if len(run) >= 2 * _RUN and (at := _middle(run, left, done)) is not None:
            if _ends_word(run, left, right) or (middle is None and inside_word(at)):
                return at
            middle = at
        i, j = i + (place <= other), j + (other <= place)
    at = _middle(run, left, done) if len(run) >= _RUN else None
    if at is not None and (_ends_word(run, left, right) or (middle is None and inside_word(at))):
        return at
    return None


def _middle(run: list[tuple[int, int]], left: Encoding, done: int) -> int | None:
    """Return where the middle token of a run starts; None if it is one of several tokens of a character."""
    i, _ = run[len(run) // 2]
    start = left.span(i)[0]
    return None if start <= done or start < left.span(i - 1)[1] or start <= left.span(i - 1)[0] else start


def _ends_word(run: list[tuple[int, int]], left: Encoding, right: Encoding) -> bool:
    """Whether the middle token of a run begins a word."""
    i, j = run[len(run) // 2]
    return left.word(i) != left.word(i - 1) and right.word(j) != right.word(j - 1)


def _has_node(path: Encoding, character: int) -> bool:
    """Whether a token starts at a character and the one before it ends there."""
    number = path.first_at(character)
    return 0 < number < len(path) and path.span(number)[0] == character and path.span(number - 1)[1] <= character
