import pytest

from izh.errors import RequestError
from izh.request import SamplingParams
from izh.sampling.check import check_params


def test_ids_inside_the_vocabulary_pass():
    check_params(SamplingParams(stop_token_ids=(0, 9), logit_bias={0: 1.0, 9: -1.0}), 10)
    check_params(SamplingParams(), 10)


@pytest.mark.parametrize("wrong", [10, -1, "3"])
def test_an_id_outside_names_field_value_and_limit(wrong):
    with pytest.raises(RequestError, match=r"logit_bias .*0 to 9") as raised:
        check_params(SamplingParams(logit_bias={1: 1.0, wrong: 1.0}), 10)
    assert raised.value.param == "logit_bias"
    assert repr(wrong) in raised.value.message


@pytest.mark.parametrize("wrong", [10, -1])
def test_a_stop_id_outside_is_refused(wrong):
    with pytest.raises(RequestError, match=str(wrong)) as raised:
        check_params(SamplingParams(stop_token_ids=(1, wrong)), 10)
    assert raised.value.param == "stop_token_ids"
