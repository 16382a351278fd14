"""`python serve.py ...` is `izh serve ...`, for use from a checkout."""

import sys

from izh.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
