import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch

from izh.errors import OptionError
from izh.kernels.cpu import attention, compile, draw, elementwise, linear, table, threads
from izh.kernels.draw import Filters


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert compile.cache_folder().parent == tmp_path / "user" / "izh" / "numba"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "own"))
    assert compile.cache_folder().parent == tmp_path / "own"


def test_without_a_writable_cache_kernels_go_to_a_private_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file where a folder is needed")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(compile.tempfile, "tempdir", str(tmp_path))
    folder = compile.cache_folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o077 == 0


def test_a_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    program = (
        "import torch\n"
        "from izh.kernels.select import select\n"
        "from izh.kernels.cpu import elementwise\n"
        "ops = select(torch.device('cpu'), None)\n"
        "assert ops.silu_mul(torch.ones(1, 2)).shape == (1, 1)\n"
        "stats = elementwise.gate_kernel.stats\n"
        "print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.split() for run in runs] == [["0", "1"], ["1", "0"]]
    assert all("NumbaWarning" not in run.stderr for run in runs)


def test_warm_up_reports_and_leaves_nothing_to_compile() -> None:
    threads.choose_layer()
    seen: list[tuple[int, int]] = []
    table.warm_up(lambda done, total: seen.append((done, total)))
    total = seen[0][1]
    assert seen == [(done, total) for done in range(total + 1)]
    strided, pages = torch.zeros(3, 4, 16)[:, :2, :8], torch.zeros(2, 2, 4, 8)
    table.NUMBA.linear(strided[:, 0], torch.ones(5, 8), torch.ones(5))
    table.NUMBA.rms_norm(strided, torch.ones(8), 0)
    table.NUMBA.rope(strided, strided, torch.zeros(3, 2), torch.zeros(3, 2))
    table.NUMBA.write_kv(strided, strided, pages, pages, torch.arange(3))
    table.NUMBA.gelu_tanh_mul(torch.zeros(3, 8))
    starts, lens, blocks = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [3], [[1]]))
    table.NUMBA.paged_attention(strided, pages, pages, starts, lens, blocks, 1, 2)
    ones, double = torch.ones(3), torch.ones(3, dtype=torch.float64)
    table.NUMBA.draw(strided[:, 0], ones, Filters(ones, -ones, torch.tensor([1, 2, 8]), double, True), double / 2)
    kernels = (elementwise.norm_kernel, elementwise.rope_kernel, elementwise.write_kv_kernel, elementwise.gate_kernel)
    others = (linear._linear, attention.paged_attention_kernel, draw._draw)
    assert [len(kernel.signatures) for kernel in (*kernels, *others)] == [1] * 7


def test_thread_counts_go_together() -> None:
    before = torch.get_num_threads()
    most = numba.config.NUMBA_NUM_THREADS
    try:
        threads.set_num_threads(1)
        assert torch.get_num_threads() == numba.get_num_threads() == 1
    finally:
        threads.set_num_threads(min(before, most))
    for wrong in (0, most + 1):
        with pytest.raises(OptionError, match=f"^num_threads: {wrong} is not between 1 and {most}"):
            threads.set_num_threads(wrong)


def test_the_layer_is_openmp_else_tbb_else_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = set()
    real = threads.importlib.import_module

    def import_module(name: str) -> object:
        if name.rpartition(".")[2] in missing:
            raise ImportError(f"{name} lacks its library")
        return real(name) if name.endswith("omppool") else None

    monkeypatch.setattr(threads.importlib, "import_module", import_module)
    monkeypatch.setattr(numba.config, "THREADING_LAYER", "default")
    assert threads.choose_layer() == numba.config.THREADING_LAYER == "omp"
    missing.add("omppool")
    assert threads.choose_layer() == numba.config.THREADING_LAYER == "tbb"
    missing.add("tbbpool")
    with pytest.raises(OptionError, match=r"neither here\. Install .*omp: .*omppool lacks.*tbb: .*tbbpool lacks"):
        threads.choose_layer()
