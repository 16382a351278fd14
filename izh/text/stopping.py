"""Stop strings in a growing text.

Owns: StopStrings, which finds the first stop string to be completed, also across pieces, and withholds what may still
become one.
Must not know: tokens, requests.
Invariant: the text let out, plus the text withheld, is the text pushed; the result does not depend on how the text is
cut into pieces. The cost is linear in the text and does not depend on the length of the stop strings.
"""


class StopStrings:
    """Watches a text for stop strings.

    Semantics: the text ends where a stop string is first complete (of several complete at the same character, the
    longest counts). It is cut before that string, or after it with `include`. Until then, the longest end of the text
    that begins a stop string is withheld.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self._patterns = [_Pattern(string) for string in stop]
        self._first_chars = frozenset(string[0] for string in stop)
        self._include = include
        self._withheld = ""
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, piece: str, active: bool = True) -> str:
        """Append a piece; returns the text that is certain now, and sets `matched` if the text ends here.

        A stop string completed while not `active` does not count; one only begun then does. After a match nothing
        more may be pushed.
        """
        assert self.matched is None, "text pushed after a stop string"
        if not self._withheld and self._first_chars.isdisjoint(piece):
            return piece
        text = self._withheld + piece
        for end, char in enumerate(piece, start=len(self._withheld) + 1):
            complete = [pattern.string for pattern in self._patterns if pattern.step(char)]
            if complete and active:
                self.matched = max(complete, key=len)
                self._withheld = ""
                return text[:end] if self._include else text[: end - len(self.matched)]
        certain = len(text) - max(pattern.num_matched for pattern in self._patterns)
        self._withheld = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The text ends without a stop string: returns what was withheld."""
        text, self._withheld = self._withheld, ""
        return text


class _Pattern:
    """One stop string, matched character by character.

    `num_matched` is the length of the longest proper prefix of the string that the text ends with. The failure table
    grows only as far as the text has matched, so that a very long stop string costs nothing.
    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
    """

    __slots__ = ("_borders", "num_matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        self._borders = [0]  # [i]: the longest proper prefix of string[:i + 1] that also ends it

    def step(self, char: str) -> bool:
        """Read one character; returns True if it completes the string."""
        matched = self._follow(self.num_matched, char)
        if matched > len(self._borders):
            self._borders.append(self._follow(self._borders[-1], char))
        complete = matched == len(self.string)
        self.num_matched = self._borders[matched - 1] if complete else matched
        return complete

    def _follow(self, matched: int, char: str) -> int:
        string = self.string
        while matched and string[matched] != char:
            matched = self._borders[matched - 1]
        return matched + 1 if string[matched] == char else 0
