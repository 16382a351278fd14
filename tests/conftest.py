"""Shared test settings: no test may reach the hub."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
