"""The command line: `izh`, `python -m izh`, and `serve.py` / `run.py` at the repository root.

Owns: from words to a command, and from an IzhError to one line on stderr and exit status 2.
Must not know: how a command does its work. Nothing heavy is imported before a command runs, so `--help` is instant.
"""

import os
import sys
from collections.abc import Sequence

from izh.cli.parser import parse
from izh.errors import IzhError

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_NO_READER = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        status: int = arguments.command(arguments)
        sys.stdout.flush()
    except IzhError as error:
        print(f"izh: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `izh embed FILE | head`: whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes at its end
        return EXIT_NO_READER
    return status
