"""How a CPU kernel is compiled, where its machine code is kept, and how it reads a tensor.

Owns: `kernel`, the one decorator of this package; the cache folder; typed views of raw addresses.
Must not know: any op.
Invariant: tensors cross into kernels as addresses, sizes and strides, so each kernel has exactly one signature (a numpy
array type would differ between contiguous and strided views) and a call costs well under a microsecond. Whoever calls a
kernel has checked dtype, device and shape, and keeps the tensors alive during the call.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba import types
from numba.extending import intrinsic


def cache_folder() -> Path:
    """A writable folder for compiled kernels: under NUMBA_CACHE_DIR if set, else the user's cache, else a new one.

    Never a guessable name in a shared temporary folder: numba loads what it finds there as code. The last part is a
    digest of this package's sources and of the definitions above it, because numba itself notices a change only in the
    file that holds the decorated function, not in functions that it calls nor in constants that it imports.
    """
    sources = hashlib.sha256()
    for package in Path(__file__).parents[:2]:
        for path in sorted(package.glob("*.py")):
            sources.update(path.read_bytes())
    name = sources.hexdigest()[:16]
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for root in (os.environ.get("NUMBA_CACHE_DIR"), os.path.join(user_cache, "izh", "numba")):
        if not root:
            continue
        folder = Path(root, name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="izh-numba-"))


CACHE_FOLDER = str(cache_folder())


def kernel(
    parallel: bool = False, fastmath: bool | set[str] = False, cache: bool = True, inline: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Compile on first call or in `warm_up`, without the interpreter lock, and keep the machine code on disk.

    `fastmath` is given only where the order of a sum is either unimportant or fixed by there being one loop for it.
    `inline` puts the code where it is called: a call hands over each array in seven words, some ten nanoseconds for a
    few arrays, which is what a page of keys takes.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        # numba reads the folder while decorating; other users of numba in this process keep their own.
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = CACHE_FOLDER
        try:
            options = {"nogil": True, "error_model": "numpy", "parallel": parallel, "fastmath": fastmath}
            return numba.njit(cache=cache, inline="always" if inline else "never", **options)(function)
        finally:
            numba.config.CACHE_DIR = before

    return decorate


@kernel()
def share(total: int, part: int, parts: int) -> Any:
    """Where the `part`-th of `parts` equal shares of `total` begins. Signed, though a parallel loop counts unsigned."""
    return np.int64(total) * np.int64(part) // np.int64(parts)


def _pointer_to(element: types.Type) -> Any:
    @intrinsic
    def pointer(typing_context: Any, address: types.Type) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return pointer


float32_at = _pointer_to(types.float32)
float64_at = _pointer_to(types.float64)
int8_at = _pointer_to(types.int8)
uint16_at = _pointer_to(types.uint16)
int32_at = _pointer_to(types.int32)
int64_at = _pointer_to(types.int64)


@intrinsic
def count_up(typing_context: Any, counter: Any) -> Any:
    """One more in the array's first int64. Whoever sees it with `count_of` sees what was written before."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer = context.make_array(counter)(context, builder, args[0]).data
        builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "acq_rel")
        return context.get_dummy_value()

    return types.void(counter), codegen


@intrinsic
def count_of(typing_context: Any, counter: Any) -> Any:
    """What all threads have counted up by now."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.load_atomic(context.make_array(counter)(context, builder, args[0]).data, "acquire", 8)

    return types.int64(counter), codegen
