"""Stop strings on bytes: an Aho-Corasick automaton over the raw bytes of tokens."""

from __future__ import annotations

from array import array
from collections import deque
from functools import lru_cache

ROOT = 0

MAX_REMEMBERED = 1 << 14
"""Steps (state, piece) that an automaton remembers."""


class StopAutomaton:
    """All stops of one set at once.

    trans[state][byte] is the next state (uint16: validation bounds the bytes of all stops, and a
    state costs 512 bytes).  longest[state] is the length of the longest stop that
    ends where the state is entered, 0 if none does; among stops that end at the same byte the
    longest begins earliest, so the shorter ones never win.
    """

    def __init__(self, stops: tuple[bytes, ...]) -> None:
        self.trans: list[array[int]] = []
        self.longest: list[int] = [0]
        self._link(self._tree(stops))
        self._steps: dict[tuple[int, bytes], tuple[int, int, int]] = {}

    def _tree(self, stops: tuple[bytes, ...]) -> list[dict[int, int]]:
        """The children of each state, by byte; the states are the prefixes of the stops."""
        children: list[dict[int, int]] = [{}]
        for stop in stops:
            state = ROOT
            for byte in stop:
                if byte not in children[state]:
                    children[state][byte] = len(children)
                    children.append({})
                    self.longest.append(0)
                state = children[state][byte]
            self.longest[state] = len(stop)
        return children

    def _link(self, children: list[dict[int, int]]) -> None:
        """Fill the transitions: a child's, else those of the state's longest proper suffix."""
        nowhere = array("H", [ROOT]) * 256
        suffix = [ROOT] * len(children)
        self.trans = [nowhere] * len(children)
        queue = deque([ROOT])
        while queue:  # by depth, so that a state's suffix comes before it
            state = queue.popleft()
            fallback = self.trans[suffix[state]] if state != ROOT else nowhere
            row = fallback[:]
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
    """Follows one text: which byte of it a stop begins at, once one is complete."""

    def __init__(self, stops: tuple[bytes, ...]) -> None:
        self._automaton = automaton(stops) if stops else None
        self._state = ROOT
        self._length = 0

    def feed(self, piece: bytes) -> int | None:
        """Read the next token's bytes; the offset in the text where the stop begins, or None."""
        if self._automaton is None:
            return None
        self._state, begin, length = self._automaton.feed(self._state, piece)
        start = self._length + begin
        self._length += len(piece)
        return start if length else None
