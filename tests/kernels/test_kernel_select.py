import os
import subprocess
import sys

import pytest
import torch

from izh.errors import OptionError
from izh.kernels.reference import REFERENCE
from izh.kernels.select import default_kernels, prepare, select


def test_numba_is_the_choice_on_cpu() -> None:
    from izh.kernels.cpu.table import NUMBA

    assert default_kernels(torch.device("cpu")) == "numba"
    assert select(torch.device("cpu"), None) is NUMBA
    assert select(torch.device("cpu"), "numba") is NUMBA


def test_triton_is_the_choice_on_cuda_for_low_rank_corrections_alone() -> None:
    from izh.kernels.triton.lora import add_lora
    from izh.kernels.triton.table import TRITON

    assert default_kernels(torch.device("cuda")) == "triton"
    assert select(torch.device("cuda"), None) is TRITON
    assert select(torch.device("cuda", 1), "triton") is TRITON
    assert TRITON.add_lora is add_lora
    others = [name for name in TRITON.__dataclass_fields__ if name != "add_lora"]
    assert all(getattr(TRITON, name) is getattr(REFERENCE, name) for name in others)


def test_without_triton_cuda_gets_the_reference_and_a_word_about_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("izh.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level("WARNING", "izh.kernels"):
        assert select(torch.device("cuda"), None) is REFERENCE
    assert "Triton is not installed: pip install 'izh[gpu]'" in caplog.text
    with pytest.raises(OptionError, match=r"^kernels: 'triton': .*pip install 'izh\[gpu\]'.*or choose 'reference'"):
        select(torch.device("cuda"), "triton")


def test_the_reference_runs_anywhere_and_is_the_choice_elsewhere() -> None:
    assert select(torch.device("cpu"), "reference") is REFERENCE
    assert select(torch.device("cuda", 1), "reference") is REFERENCE
    assert select(torch.device("mps"), None) is REFERENCE


@pytest.mark.parametrize("kernels", ["numba", "reference", "triton"])
def test_prepare_sets_threads_and_reports_what_it_compiles(kernels: str) -> None:
    before = torch.get_num_threads()
    seen: list[tuple[int, int]] = []
    device = torch.device("cuda" if kernels == "triton" else "cpu")
    try:
        prepare(select(device, kernels), 1, lambda done, total: seen.append((done, total)))
        assert torch.get_num_threads() == 1
    finally:
        prepare(select(torch.device("cpu"), "numba"), before)
    assert bool(seen) == (kernels == "numba")
    assert seen == [(done, len(seen) - 1) for done in range(len(seen))]


@pytest.mark.parametrize(("device", "kernels"), [("cuda", "numba"), ("mps", "triton"), ("cuda", "numba "), ("cpu", "")])
def test_what_is_impossible_is_refused_with_the_way_out(device: str, kernels: str) -> None:
    with pytest.raises(OptionError, match=r"^kernels: .*choose 'numba' \(cpu\), 'triton' \(cuda\) or 'reference'"):
        select(torch.device(device), kernels)


def test_triton_on_cpu_is_for_its_interpreter_alone() -> None:
    code = (
        "import torch\nfrom izh.errors import OptionError\nfrom izh.kernels.select import select\n"
        "try:\n    print(select(torch.device('cpu'), 'triton').add_lora.__module__)\n"
        "except OptionError as error:\n    print(error)"
    )
    said = []
    for interpret in ("0", "1"):
        environment = os.environ | {"TRITON_INTERPRET": interpret}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        said.append(done.stdout.strip())
    assert said[0].startswith("kernels: 'triton' runs on cuda, and on cpu only in Triton's interpreter")
    assert said[1] == "izh.kernels.triton.lora"
