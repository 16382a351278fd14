"""`python run.py ...` is `izh ...`, for use from a checkout."""

import sys

from izh.cli import main

if __name__ == "__main__":
    sys.exit(main())
