"""Where a text ends: end tokens, and stop strings by an automaton over the raw bytes of tokens."""

from __future__ import annotations

import codecs
from array import array
from collections import deque
from collections.abc import Iterable
from functools import lru_cache

from nightjar.gpu_worker.engine.requests import FinishReason
from nightjar.requests import SamplingParams

ROOT = 0
_LONGEST_START = 3  # bytes of a UTF-8 character that lacks its last one

MAX_REMEMBERED = 1 << 14
"""Steps (state, piece) that an automaton remembers."""


def end_tokens(params: SamplingParams, eos: Iterable[int]) -> dict[int, FinishReason]:
    """The tokens that end a text, and the reason each gives; their bytes are no part of it."""
    ends: dict[int, FinishReason] = dict.fromkeys(params.stop_token_ids, "stop")
    if not params.ignore_eos:
        ends |= dict.fromkeys(eos, "eos")
    return ends


class StopAutomaton:
    """All stops of one set at once: Aho-Corasick.

    trans[state][byte] is the next state (uint16: validation bounds the bytes of all stops, and a
    state costs 512 bytes).  longest[state] is the length of the longest stop that
    ends where the state is entered, 0 if none does; among stops that end at the same byte the
    longest begins earliest, so the shorter ones never win.  held[state] is how many of the last
    bytes may still become part of a stop by what follows.
    """

    def __init__(self, stops: tuple[bytes, ...]) -> None:
        self.trans: list[array[int]] = []
        self.longest: list[int] = [0]
        self.held: list[int] = [0]
        self._link(self._tree(stops))
        self._steps: dict[tuple[int, bytes], tuple[int, int, int]] = {}

    def _tree(self, stops: tuple[bytes, ...]) -> list[dict[int, int]]:
        """The children of each state, by byte; the states are the prefixes of the stops, and
        `held` their lengths."""
        children: list[dict[int, int]] = [{}]
        for stop in stops:
            state = ROOT
            for byte in stop:
                if byte not in children[state]:
                    children[state][byte] = len(children)
                    children.append({})
                    self.longest.append(0)
                    self.held.append(self.held[state] + 1)
                state = children[state][byte]
            self.longest[state] = len(stop)
        return children

    def _link(self, children: list[dict[int, int]]) -> None:
        """Fill the transitions: a child's, else those of the state's longest proper suffix.

        A whole stop that none goes on from holds what its suffix holds.
        """
        nowhere = array("H", [ROOT]) * 256
        suffix = [ROOT] * len(children)
        self.trans = [nowhere] * len(children)
        queue = deque([ROOT])
        while queue:  # by depth, so that a state's suffix comes before it
            state = queue.popleft()
            fallback = self.trans[suffix[state]] if state != ROOT else nowhere
            row = fallback[:]
            if not children[state]:
                self.held[state] = self.held[suffix[state]]
            for byte, child in children[state].items():
                row[byte] = child
                suffix[child] = fallback[byte]
                self.longest[child] = self.longest[child] or self.longest[fallback[byte]]
                queue.append(child)
            self.trans[state] = row

    def feed(self, state: int, piece: bytes) -> tuple[int, int, int]:
        """Read one token's bytes.

        Returns the next state and, for the winning stop complete by the end of the piece, where
        it begins counted from the piece's first byte (negative: in an earlier token) and its
        length; length 0 if none is complete.
        """
        key = (state, piece)
        found = self._steps.get(key)
        if found is None:
            found = self._walk(state, piece)
            if len(self._steps) < MAX_REMEMBERED:
                self._steps[key] = found
        return found

    def _walk(self, state: int, piece: bytes) -> tuple[int, int, int]:
        """`feed` without memory."""
        begin, length = 0, 0
        for end, byte in enumerate(piece, 1):
            state = self.trans[state][byte]
            found = self.longest[state]
            # A later end with the same beginning is a longer stop.
            if found and (not length or end - found <= begin):
                begin, length = end - found, found
        return state, begin, length


@lru_cache(maxsize=16)
def automaton(stops: tuple[bytes, ...]) -> StopAutomaton:
    """The automaton of a set of stops; most requests of a job share one.  The largest takes
    8 MiB."""
    return StopAutomaton(stops)


class StopMatcher:
    """Follows one text: which byte of it a stop begins at, and how much of it is settled.

    A stop that one of the first min_tokens tokens completes does not count.
    """

    def __init__(self, stops: tuple[bytes, ...], min_tokens: int = 0) -> None:
        self._automaton = automaton(stops) if stops else None
        self._uncounted = min_tokens
        self._state = ROOT
        self._length = 0
        # The last bytes: those held for a stop, and before them the start of a character.
        self._tail = b""
        self._tail_size = max(map(len, stops), default=0) + _LONGEST_START

    def feed(self, piece: bytes) -> int | None:
        """Read the next token's bytes; the offset in the text where the stop begins, or None."""
        start = self._length
        self._length += len(piece)
        self._tail = (self._tail + piece)[-self._tail_size :]
        if self._automaton is None:
            return None
        self._state, begin, length = self._automaton.feed(self._state, piece)
        if self._uncounted:
            self._uncounted -= 1
            return None
        return start + begin if length else None

    @property
    def state(self) -> int:
        """The automaton's state after what was read."""
        return self._state

    @property
    def length(self) -> int:
        """Bytes read."""
        return self._length

    @property
    def releasable(self) -> int:
        """How many bytes of the text no stop can take back, in whole characters.

        Right until `feed` finds a stop or the text ends otherwise; then the rest is settled too.
        """
        held = 0 if self._automaton is None else self._automaton.held[self._state]
        settled = self._tail[: len(self._tail) - held]
        return self._length - held - unfinished_character(settled)


def unfinished_character(text: bytes) -> int:
    """Length of the UTF-8 character that a text breaks off in: 0 to 3.

    Bytes that no continuation makes a character are not waited for.
    """
    tail = text[-_LONGEST_START:]
    _, decoded = codecs.utf_8_decode(tail, "replace", False)
    return len(tail) - decoded
