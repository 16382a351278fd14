"""Which implementation of the ops runs on a device: the only place that asks.

Must not know: what the ops do. The CPU kernels are imported only when chosen: that compiles or loads machine code.
"""

from collections.abc import Callable

import torch

from izh.errors import OptionError
from izh.kernels.ops import Ops
from izh.kernels.reference import REFERENCE


def select(device: torch.device, kernels: str | None) -> Ops:
    """The op table for `device`; None chooses numba on cpu and the reference elsewhere.

    Raises: OptionError when `kernels` is no name, does not run on `device`, or lacks a library.
    """
    name = kernels or ("numba" if device.type == "cpu" else "reference")
    if name == "reference":
        return REFERENCE
    if name != "numba":
        raise OptionError(f"kernels: {name!r} is not known; choose 'numba' (cpu) or 'reference' (any device)")
    if device.type != "cpu":
        raise OptionError(f"kernels: 'numba' runs on cpu, not on {device}; choose 'reference' or device=cpu")
    from izh.kernels.cpu.table import NUMBA
    from izh.kernels.cpu.threads import choose_layer

    choose_layer()
    return NUMBA


def prepare(ops: Ops, num_threads: int, progress: Callable[[int, int], None] | None = None) -> None:
    """Give torch and the ops this many threads, and compile what is not compiled yet, calling `progress(done, total)`.
    Call it in the thread that will run the steps.

    Raises: OptionError for an impossible number of threads.
    """
    if ops is REFERENCE:
        torch.set_num_threads(num_threads)
        return
    from izh.kernels.cpu.table import warm_up
    from izh.kernels.cpu.threads import set_num_threads

    set_num_threads(num_threads)
    warm_up(progress)
