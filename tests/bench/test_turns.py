"""`izh bench turns` on a tiny model: what is counted, and what is refused."""

import json

import pytest
import tiny_checkpoint

from izh.bench.options import TurnsOptions
from izh.bench.turns import Answers, check, figure, report
from izh.config import EngineOptions
from izh.errors import OptionError


def test_the_whole_run_gives_a_row_for_each_number_of_adapters(tmp_path, capsys):
    checkpoint = tiny_checkpoint.save_llama(tmp_path / "tiny")
    engine = EngineOptions(model=str(checkpoint), kv_cache_gb=0.02, num_threads=1)
    options = TurnsOptions(
        adapters=(1, 3),
        slots=1,
        clients=3,
        requests=6,
        prompt_tokens=8,
        output_tokens=4,
        repeats=1,
        json=str(tmp_path / "figures.json"),
    )
    assert report(engine, options) == 0
    printed = capsys.readouterr().out
    assert "1 in 1" in printed
    assert "3 in 1" in printed
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [(each["adapters"], each["slots"]) for each in written["figures"]] == [(1, 1), (3, 1)]
    for each in written["figures"]:
        assert 0 < each["first_median_s"] <= each["first_p90_s"]
        assert 0 < each["gap_median_s"] <= each["gap_p99_s"]
        assert each["output"] > 0


def test_a_figure_is_the_median_rate_and_the_distribution_of_all_times():
    loads = [Answers(10.0, [1.0, 2.0], [0.1] * 99), Answers(30.0, [3.0], [0.5]), Answers(20.0, [], [])]
    made = figure(16, 8, loads)
    assert (made.adapters, made.slots, made.output) == (16, 8, 20.0)
    assert (made.first_median_s, made.first_p90_s) == (2.0, 3.0)
    assert (made.gap_median_s, made.gap_p99_s) == (0.1, 0.5)


@pytest.mark.parametrize("field", ["slots", "clients", "requests", "output_tokens"])
def test_impossible_options_are_refused(field):
    with pytest.raises(OptionError, match=f"--{field.replace('_', '-')} must be at least 1, got 0"):
        check(EngineOptions(), TurnsOptions(**{field: 0}))


def test_own_adapters_are_refused():
    with pytest.raises(OptionError, match="--lora is not for this command"):
        check(EngineOptions(lora=("a=b",)), TurnsOptions())
