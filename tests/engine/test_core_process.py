"""What an engine process is started with."""

import pytest

from izh.engine.core_process import environment


def test_threads_of_the_engine_wait_busily_for_a_short_time_only():
    assert environment({"HOME": "somewhere"}) == {"HOME": "somewhere", "GOMP_SPINCOUNT": "3000"}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_says_of_waiting_stands(name):
    assert environment({name: "7"}) == {name: "7"}
