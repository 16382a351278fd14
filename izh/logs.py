"""How izh logs: one format, to standard error, level from IZH_LOG (default INFO).

Owns: the handler on the "izh" logger. Must not touch the root logger: that belongs to the application.
"""

import logging
import os


def configure_logging() -> None:
    """Give the "izh" logger a handler, unless the application has set one. Safe to call twice."""
    logger = logging.getLogger("izh")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("IZH_LOG", "INFO").upper())
    logger.propagate = False
