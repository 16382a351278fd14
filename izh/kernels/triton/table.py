"""The op table with Triton kernels: the reference's ops, and low-rank corrections by Triton.

Owns: `TRITON: Ops`. Must not know: devices. Importing it needs Triton; `select.py` decides whether to.
"""

from dataclasses import replace

from izh.kernels.reference import REFERENCE
from izh.kernels.triton.lora import add_lora

TRITON = replace(REFERENCE, add_lora=add_lora)
