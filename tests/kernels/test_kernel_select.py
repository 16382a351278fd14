import pytest
import torch

from izh.errors import OptionError
from izh.kernels.reference import REFERENCE
from izh.kernels.select import prepare, select


def test_numba_is_the_choice_on_cpu() -> None:
    from izh.kernels.cpu.table import NUMBA

    assert select(torch.device("cpu"), None) is NUMBA
    assert select(torch.device("cpu"), "numba") is NUMBA


def test_the_reference_runs_anywhere_and_is_the_choice_elsewhere() -> None:
    assert select(torch.device("cpu"), "reference") is REFERENCE
    assert select(torch.device("cuda"), None) is REFERENCE
    assert select(torch.device("cuda", 1), "reference") is REFERENCE


@pytest.mark.parametrize("kernels", ["numba", "reference"])
def test_prepare_sets_threads_and_reports_what_it_compiles(kernels: str) -> None:
    before = torch.get_num_threads()
    seen: list[tuple[int, int]] = []
    try:
        prepare(select(torch.device("cpu"), kernels), 1, lambda done, total: seen.append((done, total)))
        assert torch.get_num_threads() == 1
    finally:
        prepare(select(torch.device("cpu"), "numba"), before)
    assert bool(seen) == (kernels == "numba")
    assert seen == [(done, len(seen) - 1) for done in range(len(seen))]


@pytest.mark.parametrize(("device", "kernels"), [("cuda", "numba"), ("cpu", "triton"), ("cuda", "numba ")])
def test_what_is_impossible_is_refused_with_the_way_out(device: str, kernels: str) -> None:
    with pytest.raises(OptionError, match=r"^kernels: .*choose 'numba' \(cpu\)|^kernels: .*choose 'reference'"):
        select(torch.device(device), kernels)
