from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from izh.runner.runner import allocate_pages


def model(num_layers: int) -> SimpleNamespace:
    return SimpleNamespace(spec=SimpleNamespace(num_layers=num_layers, num_kv_heads=2, head_dim=8))


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_zero_and_apart(dtype: torch.dtype) -> None:
    pages = [each for both in allocate_pages(model(2), 5, 4, dtype, torch.device("cpu")) for each in both]
    for number, each in enumerate(pages, 1):
        assert each.shape == (5, 2, 4, 8)
        assert each.dtype is dtype
        assert not each.any()
        each.fill_(number)
    assert [each.unique().tolist() for each in pages] == [[1.0], [2.0], [3.0], [4.0]]


def test_memory_is_used_only_when_written() -> None:
    before = resident_bytes()
    pages = allocate_pages(model(4), 1 << 17, 4, torch.float32, torch.device("cpu"))
    assert sum(each.nbytes for both in pages for each in both) == 1 << 28
    assert resident_bytes() - before < 1 << 25
