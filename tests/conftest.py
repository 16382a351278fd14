"""Shared test settings: no test may reach the hub, and without a GPU Triton's kernels run in its interpreter."""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton reads this when first imported, which other libraries may do: so before any test module is.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    parser.addoption("--every-kernel", action="store_true", help="run tests/whole with each kernel of linear layers")
