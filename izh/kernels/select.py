"""Which implementation of the ops runs on a device: the only place that asks.

Must not know: what the ops do. The CPU kernels and Triton's are imported only when chosen: the first compile or load
machine code, the second need a library that not every installation has.
"""

import logging
from collections.abc import Callable

import torch

from izh.errors import OptionError
from izh.kernels.ops import Ops
from izh.kernels.reference import REFERENCE

log = logging.getLogger("izh.kernels")

_CHOICES = "choose 'numba' (cpu), 'triton' (cuda) or 'reference' (any device)"


def default_kernels(device: torch.device) -> str:
    """The name of the table that `device` gets when nobody chooses one; a choice for want of a library is logged."""
    if device.type == "cpu":
        return "numba"
    if device.type != "cuda":
        return "reference"
    try:
        import izh.kernels.triton.table  # noqa: F401  # only whether it can be
    except ImportError:
        log.warning("kernels: 'reference' on %s, as Triton is not installed: pip install 'izh[gpu]'", device)
        return "reference"
    return "triton"


def select(device: torch.device, kernels: str | None) -> Ops:
    """The op table for `device`: "numba" (cpu), "triton" (cuda: low-rank corrections by Triton, the other ops by the
    reference), "reference" (any device), "deterministic" (cpu: numba's, each row in one order of arithmetic); None
    takes `default_kernels`. On cpu "triton" runs in Triton's interpreter, when TRITON_INTERPRET=1 was set at the start:
    for tests.

    Raises: OptionError when `kernels` is no name, does not run on `device`, or lacks a library.
    """
    name = default_kernels(device) if kernels is None else kernels
    if name == "reference":
        return REFERENCE
    if name == "triton":
        return _triton(device)
    if name not in ("numba", "deterministic"):
        raise OptionError(f"kernels: {name!r} is not known; {_CHOICES}")
    if device.type != "cpu":
        raise OptionError(f"kernels: {name!r} runs on cpu, not on {device}; {_CHOICES}")
    from izh.kernels.cpu.table import DETERMINISTIC, NUMBA
    from izh.kernels.cpu.threads import choose_layer

    choose_layer()
    return NUMBA if name == "numba" else DETERMINISTIC


def tuned(ops: Ops, width: int, kernel_rows: int | None) -> Ops:
    """`ops` with its linear layers, of `width` inputs and float32 weights, on izh's own kernel up to `kernel_rows`
    rows, or if that is None up to as many as make it the fastest here; tables with no such choice come back as they
    are. Measures that at a machine's first start, so call it where the steps run, after `prepare`.
    """
    if ops.linear is REFERENCE.linear:  # the reference, or Triton's table
        return ops
    from izh.kernels.cpu.row_limits import RowLimits, row_limits
    from izh.kernels.cpu.table import NUMBA, with_rows

    if ops is not NUMBA:
        return ops
    return with_rows(row_limits(width) if kernel_rows is None else RowLimits(kernel_rows, kernel_rows))


def _triton(device: torch.device) -> Ops:
    if device.type not in ("cuda", "cpu"):
        raise OptionError(f"kernels: 'triton' runs on cuda, not on {device}; {_CHOICES}")
    try:
        from izh.kernels.triton.lora import IS_INTERPRETED
        from izh.kernels.triton.table import TRITON
    except ImportError as error:
        raise OptionError(f"kernels: 'triton': {error}; or choose 'reference'") from error
    if device.type == "cpu" and not IS_INTERPRETED:
        raise OptionError(
            f"kernels: 'triton' runs on cuda, and on {device} only in Triton's interpreter, which is for tests "
            f"(TRITON_INTERPRET=1 in the environment); {_CHOICES}"
        )
    return TRITON


def prepare(
    ops: Ops, num_threads: int, progress: Callable[[int, int], None] | None = None, *, quantized: bool = False
) -> None:
    """Give torch and the ops this many threads, and compile the CPU kernels not compiled yet, calling
    `progress(done, total)`; those for weights of few bits only if `quantized`. Triton's compile when first called. Call
    it in the thread that will run the steps.

    Raises: OptionError for an impossible number of threads.
    """
    if ops.linear is REFERENCE.linear:  # the reference, or Triton's table
        torch.set_num_threads(num_threads)
        return
    from izh.kernels.cpu.table import warm_up
    from izh.kernels.cpu.threads import set_num_threads

    set_num_threads(num_threads)
    warm_up(progress, quantized=quantized)
    set_num_threads(num_threads)  # numba, when it starts its threads, gives an OpenMP shared with torch all of them
