"""`python -m izh`: the command line."""

import sys

from izh.cli import main

sys.exit(main())
