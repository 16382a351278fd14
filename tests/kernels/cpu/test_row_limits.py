"""Which kernel computes how many rows: measured once, kept, and logged."""

import logging

import numba
import pytest
import torch

from izh.kernels.cpu import row_limits as module
from izh.kernels.cpu.row_limits import (
    ANY_ROWS,
    USUAL,
    Clock,
    RowLimits,
    best_limit,
    measure,
    processor_share,
    row_limits,
)
from izh.kernels.cpu.table import DETERMINISTIC, NUMBA, with_rows
from izh.kernels.reference import REFERENCE
from izh.kernels.select import select, tuned


@pytest.fixture
def measured(monkeypatch):
    """What is measured is given; the widths it was asked for."""
    widths = []
    monkeypatch.setattr(module, "measure", lambda width: widths.append(width) or RowLimits(ANY_ROWS, 16 * len(widths)))
    monkeypatch.setattr(module, "processor_share", lambda *_: 1.0)
    return widths


@pytest.mark.parametrize(("last_lead", "limit"), [(0, 0), (1, 1), (64, 64), (256, 256), (512, ANY_ROWS)])
def test_the_limit_is_where_the_other_overtakes(last_lead, limit):
    assert best_limit([(1.0, 1.5) if rows <= last_lead else (1.5, 1.0) for rows in module._ROWS]) == limit


@pytest.mark.parametrize("disturbed", [0, 2, 7])
def test_one_disturbed_reading_decides_nothing(disturbed):
    times = [(1.0, 1.5) if rows <= 64 else (1.5, 1.0) for rows in module._ROWS]
    times[disturbed] = times[disturbed][::-1]
    assert best_limit(times) == 64


def test_what_is_measured_is_one_of_the_limits_there_are(monkeypatch):
    monkeypatch.setattr(module, "_FLOATS", 2**12)
    limits = measure(48)
    assert {limits.plain, limits.packed} <= {0, *module._ROWS[:-1], ANY_ROWS}


def test_it_is_measured_once_for_each_width_and_number_of_threads(tmp_path, measured, caplog):
    caplog.set_level(logging.INFO, "izh.kernels")
    assert row_limits(64, tmp_path) == row_limits(64, tmp_path) == RowLimits(ANY_ROWS, 16)
    assert measured == [64]
    told = [record.getMessage() for record in caplog.records]
    assert "up to any number of rows, beside packed weights up to 16 (measured now; " in told[0]
    assert "(as measured before; " in told[1]
    assert row_limits(576, tmp_path) == RowLimits(ANY_ROWS, 32)
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        row_limits(64, tmp_path)
    finally:
        numba.set_num_threads(threads)
    assert measured == [64, 576] + [64] * (threads > 1)
    assert row_limits(64, tmp_path) == RowLimits(ANY_ROWS, 16)


def test_what_a_busy_machine_gives_is_neither_used_nor_kept(tmp_path, measured, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "izh.kernels")
    with monkeypatch.context() as busy:
        busy.setattr(module, "processor_share", lambda *_: 0.5)
        assert row_limits(64, tmp_path) == row_limits(64, tmp_path) == USUAL
    assert "it had 50% of its processors; the next start tries again" in caplog.messages[0]
    assert measured == [64, 64]
    assert row_limits(64, tmp_path) == row_limits(64, tmp_path) == RowLimits(ANY_ROWS, 48)


def test_the_share_is_of_what_all_threads_would_have_had(monkeypatch):
    monkeypatch.setattr(Clock, "now", classmethod(lambda cls: Clock(wall=12.0, processors=23.0)))
    assert processor_share(Clock(wall=10.0, processors=20.0), threads=2) == 0.75


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": 3}', '{"a": [1]}', '{"a": ["x", 1]}'])
def test_a_file_that_is_not_ours_is_measured_anew_and_replaced(tmp_path, measured, text):
    (tmp_path / "row-limits.json").write_text(text)
    assert row_limits(64, tmp_path) == row_limits(64, tmp_path) == RowLimits(ANY_ROWS, 16)
    assert measured == [64]
    assert [path.name for path in tmp_path.iterdir()] == ["row-limits.json"]


def test_where_nothing_can_be_kept_it_is_measured_at_every_start(tmp_path, measured, caplog):
    for _ in range(2):
        row_limits(64, tmp_path / "missing")
    assert measured == [64, 64]
    assert "cannot be written" in caplog.text


def test_a_table_takes_the_limits_that_are_given(measured):
    cpu = torch.device("cpu")
    assert tuned(select(cpu, "numba"), 64, 7).few_rows == 7
    assert tuned(select(cpu, "deterministic"), 64, None) is DETERMINISTIC
    assert tuned(REFERENCE, 64, None) is REFERENCE
    assert measured == []
    x, weight = torch.randn(9, 64), torch.randn(5, 64)
    assert torch.equal(with_rows(RowLimits(8, 8)).linear(x, weight, None), REFERENCE.linear(x, weight, None))
    assert torch.equal(with_rows(RowLimits(9, 8)).linear(x, weight, None), DETERMINISTIC.linear(x, weight, None))
    assert with_rows(RowLimits(4, 8)).few_rows == 4, "what goes to `linear` is the kernel's"
    assert with_rows(RowLimits(4, 8)).add_lora is NUMBA.add_lora
