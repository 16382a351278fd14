"""The CPU's op table, and the compiling of its kernels ahead of the first request.

Owns: `NUMBA: Ops`, `warm_up`. Must not know: models, the progress bar that watches.
"""

from izh.kernels.cpu import attention, elementwise
from izh.kernels.ops import Ops

NUMBA = Ops(
    rms_norm=elementwise.rms_norm,
    add_rms_norm=elementwise.add_rms_norm,
    rope=elementwise.rope,
    write_kv=elementwise.write_kv,
    paged_attention=attention.paged_attention,
    silu_mul=elementwise.silu_mul,
    gelu_tanh_mul=elementwise.gelu_tanh_mul,
)
