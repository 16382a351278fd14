"""Lines of a file, or of standard input, one text each.

Owns: reading them, and how an error names one. Must not know: what the texts are for.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from izh.errors import OptionError


@dataclass(frozen=True)
class Lines:
    """The texts, and where they come from."""

    texts: list[str]
    source: str

    def label(self, index: int) -> str:
        """The text of an index, as an editor would find it."""
        return f"{self.source}, line {index + 1},"


def read_lines(file: str) -> Lines:
    """The lines of a UTF-8 file; '-' is standard input. Raises OptionError naming the file and the line."""
    source = "standard input" if file == "-" else file
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
    except OSError as error:
        raise OptionError(
            f"cannot read {file}: {error.strerror}; give a file of one text a line, or - to type"
        ) from error
    texts = []
    # At newlines alone: str.splitlines would also split at what may stand within a text, as a form feed.
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n"), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise OptionError(f"{source}, line {number}, is not UTF-8 (byte {error.start + 1}); convert it") from error
        if not text.strip():
            what = "has no text; remove the line" if raw else "is empty; give one text a line"
            raise OptionError(f"{source}, line {number}, {what}" if raw else f"{source} {what}")
        texts.append(text)
    return Lines(texts, source)
