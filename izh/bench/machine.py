"""What machine a figure was measured on.

Owns: `describe`, the part of a report that lets a reader judge its figures.
Must not know: what was measured.
"""

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch


def describe(device: str) -> dict[str, Any]:
    """Processor, memory, system and the library that does the arithmetic. `threads` is what torch uses now."""
    machine: dict[str, Any] = {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 1024**3, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def processor_name() -> str:
    """As the system calls it; the architecture when it has no name for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
