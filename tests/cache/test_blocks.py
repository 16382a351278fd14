"""The block pool: who holds what, what is found, what is reused first."""

import pytest

from izh.cache.blocks import BlockPool


def named(pool, *keys):
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    return blocks


def test_a_released_named_block_is_found_and_shared_again():
    pool = BlockPool(4)
    blocks = named(pool, b"a", b"b")
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.find([b"a", b"b", b"c"]) == blocks
    assert pool.num_idle(blocks) == 2
    pool.share(blocks)
    assert pool.num_free == 2
    assert pool.num_idle(blocks) == 0
    pool.check()


def test_find_stops_at_the_first_missing_key():
    pool = BlockPool(4)
    named(pool, b"a", b"c")
    assert len(pool.find([b"a", b"b", b"c"])) == 1


def test_unnamed_blocks_are_reused_before_named_and_named_ones_in_order_of_release():
    pool = BlockPool(4)
    first, second = named(pool, b"a"), named(pool, b"b")
    unnamed = pool.allocate(2)
    pool.release(first)
    pool.release(second)
    pool.release(unnamed)
    assert set(pool.allocate(2)) == set(unnamed)
    assert pool.find([b"a"]) == first
    assert pool.allocate(1) == first
    assert pool.find([b"a"]) == []
    assert pool.find([b"b"]) == second
    pool.check()


def test_the_tail_of_a_sequence_is_reused_before_its_head():
    pool = BlockPool(3)
    blocks = named(pool, b"a", b"b", b"c")
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.find([b"a", b"b", b"c"]) == blocks[:2]


def test_a_twin_block_stays_unnamed():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    pool.release([first])
    assert pool.find([b"a"]) == [first]
    pool.check()


def test_misuse_is_caught():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="0 blocks free"):
        pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks)


def test_forget_all_loses_names_but_no_blocks():
    pool = BlockPool(3)
    blocks = named(pool, b"a", b"b")
    pool.forget_all()
    assert pool.find([b"a"]) == []
    pool.release(blocks)
    assert pool.num_free == 3
    pool.check()
