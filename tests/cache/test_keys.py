"""Cache keys: nothing that differs may read alike."""

import pytest

from izh.cache.keys import BlockKeys, digest
from izh.request import Request, SamplingParams
from izh.sequence import Sequence


def sequence(tokens, salt=None):
    return Sequence(Request(id="r", prompt_token_ids=tokens, params=SamplingParams(), arrival_s=0.0, cache_salt=salt))


def keys_of(tokens, *, salt=None, identity=b"model", rope=lambda n: b"", parts=()):
    keys = BlockKeys(4, identity, rope, parts)
    made = sequence(tokens, salt)
    keys.extend(made)
    return made.keys


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("t", b"ab", b"c"), ("t", b"a", b"bc")),
        (("t", b"1"), ("t", "1")),
        (("t", "1"), ("t", 1)),
        (("t", b""), ("t",)),
        (("t", b"", b"x"), ("t", b"x", b"")),
        (("ta", b"b"), ("t", b"ab")),
    ],
)
def test_digest_separates_parts_types_and_tags(one, other):
    assert digest(*one) != digest(*other)


def test_only_full_blocks_have_keys_and_extending_adds_to_them():
    keys = BlockKeys(4, b"model", lambda n: b"", ())
    made = sequence(list(range(7)))
    keys.extend(made)
    assert len(made.keys) == 1
    first = made.keys[0]
    made.token_ids += [7, 8]
    keys.extend(made)
    assert len(made.keys) == 2
    assert made.keys[0] == first
    assert made.keys == keys_of(list(range(9)))


def test_a_changed_token_changes_its_block_and_all_later_ones():
    plain, changed = keys_of(list(range(16))), keys_of([0, 1, 2, 3, 4, 99, *range(6, 16)])
    assert plain[0] == changed[0]
    assert all(a != b for a, b in zip(plain[1:], changed[1:], strict=True))


def test_model_salt_and_rope_length_change_every_block():
    plain = keys_of(list(range(8)))
    for other in (
        keys_of(list(range(8)), identity=b"other"),
        keys_of(list(range(8)), salt="tenant"),
        keys_of(list(range(8)), rope=lambda n: b"long"),
    ):
        assert not set(plain) & set(other)


def test_feature_parts_count_from_the_block_they_touch():
    plain = keys_of(list(range(12)))
    marked = keys_of(list(range(12)), parts=[lambda seq, start, stop: (b"image",) if start == 4 else ()])
    assert plain[0] == marked[0]
    assert plain[1] != marked[1]
    assert plain[2] != marked[2]
