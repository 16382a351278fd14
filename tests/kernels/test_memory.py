"""Memory that a step frees is there for the next one, unless the user chose malloc's limits."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")

FAULTS = """
import resource, sys
import torch
from izh.kernels.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    torch.empty(2**24).fill_(1.0)
for _ in range(20):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(word: str, **environment: str) -> int:
    """How many pages, of 4 KiB as a rule, five steps of 64 MiB got anew once malloc had settled."""
    run = [sys.executable, "-c", FAULTS, word]
    return int(subprocess.run(run, env=os.environ | environment, capture_output=True, check=True, text=True).stdout)


def test_a_step_gets_the_memory_of_the_last_one():
    without = faults("leave")
    assert without > 100
    assert faults("keep") < without / 20


def test_the_users_own_limits_stay():
    chosen = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    assert faults("keep", **chosen) > faults("leave", **chosen) / 2 > 50
