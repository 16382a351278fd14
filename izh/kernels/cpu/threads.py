"""How many threads the CPU kernels use, and whose.

Owns: the choice of numba's threading layer; the one place that sets torch's and numba's thread counts together.
Must not know: any op.
Invariant: numba never runs on its `workqueue` layer, which costs 80 microseconds a call and may not be entered from two
threads.

OpenMP comes first: with torch imported before it, numba finds the libgomp that torch brings, and matrix products and
kernels then share one pool. Measured on 2 cores, a loop of [32, 576] x [1536, 576] and the attention of 32 x 192 keys:
5.9 ms per eight of each on OpenMP, 8.0 ms on TBB, whose threads meet torch's still spinning; alone the two are equal
(1.2 and 1.7 us to start a kernel, 0.16 and 0.17 ms for this attention), as they are when torch waits passively.
"""

import ctypes
import importlib
import importlib.metadata

import numba
import torch

from izh.errors import OptionError


def choose_layer() -> str:
    """Fix numba's threading layer, before its first parallel kernel runs: 'omp', else 'tbb'.

    Raises: OptionError when this machine has neither.
    """
    reasons = []
    for layer in ("omp", "tbb"):
        try:
            if layer == "tbb":
                _load_tbb()
            importlib.import_module(f"numba.np.ufunc.{layer}pool")
        except (ImportError, OSError) as error:
            reasons.append(f"{layer}: {error}")
            continue
        numba.config.THREADING_LAYER = layer
        return layer
    raise OptionError(
        "kernels: numba needs OpenMP or TBB and finds neither here. Install libgomp (Debian: apt install libgomp1) or "
        f"the Python package tbb, or choose kernels=reference. ({'; '.join(reasons)})"
    )


def _load_tbb() -> None:
    """Make the library of the Python package `tbb`, which no loader path covers, known to the process."""
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        return  # there may still be one of the system
    for file in files:
        if file.name == "libtbb.so.12":
            ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)


def set_num_threads(num_threads: int) -> None:
    """Let torch and the kernels use this many threads. Counts for the calling thread: call it where the steps run.

    Raises: OptionError when numba started with fewer.
    """
    most = numba.config.NUMBA_NUM_THREADS
    if not 1 <= num_threads <= most:
        raise OptionError(
            f"num_threads: {num_threads} is not between 1 and {most}, the cores this process may use "
            "(or NUMBA_NUM_THREADS, if set)"
        )
    torch.set_num_threads(num_threads)
    numba.set_num_threads(num_threads)
