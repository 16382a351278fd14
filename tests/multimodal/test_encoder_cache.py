"""The encoder cache: its bound in bytes, its order of leaving, its counts, and many threads at once."""

import random
import threading

import pytest
import torch

from izh.multimodal.encoder_cache import EncoderCache

ROW_BYTES = 32  # one row of 8 floats


def rows(value, count=1):
    return torch.full((count, 8), float(value))


def test_what_was_put_is_found_and_counted():
    cache = EncoderCache(10 * ROW_BYTES)
    assert cache.get(b"a") is None
    cache.put(b"a", rows(1, 2))
    found = cache.get(b"a")
    assert torch.equal(found, rows(1, 2))
    assert (cache.counts.hits, cache.counts.misses) == (1, 1)
    assert (cache.counts.num_entries, cache.counts.num_bytes) == (1, 2 * ROW_BYTES)


def test_the_least_recently_used_leaves_first():
    cache = EncoderCache(3 * ROW_BYTES)
    for key in (b"a", b"b", b"c"):
        cache.put(key, rows(0))
    cache.get(b"a")
    cache.put(b"d", rows(0))
    assert cache.get(b"b") is None
    assert all(cache.get(key) is not None for key in (b"a", b"c", b"d"))
    cache.put(b"e", rows(0, 2))
    assert [key for key in (b"a", b"c", b"d", b"e") if cache.get(key) is not None] == [b"d", b"e"]
    assert cache.counts.num_bytes == 3 * ROW_BYTES


def test_what_alone_exceeds_the_bound_is_not_kept_and_evicts_nobody():
    cache = EncoderCache(2 * ROW_BYTES)
    cache.put(b"a", rows(0))
    cache.put(b"big", rows(0, 3))
    assert cache.get(b"big") is None
    assert cache.get(b"a") is not None
    off = EncoderCache(0)
    off.put(b"a", rows(0))
    assert off.get(b"a") is None
    with pytest.raises(ValueError, match="max_bytes"):
        EncoderCache(-1)


def test_entries_are_copies_and_detached():
    cache = EncoderCache(10 * ROW_BYTES)
    batch = torch.zeros(4, 8, requires_grad=True)
    cache.put(b"a", batch[1:2])
    with torch.no_grad():
        batch += 1
    found = cache.get(b"a")
    assert not found.requires_grad
    assert torch.equal(found, rows(0))
    assert found.untyped_storage().nbytes() == ROW_BYTES


def test_putting_a_key_again_changes_nothing():
    cache = EncoderCache(10 * ROW_BYTES)
    cache.put(b"a", rows(1))
    cache.put(b"a", rows(1))
    assert cache.counts.num_bytes == ROW_BYTES


def test_many_threads_leave_the_bytes_right():
    cache = EncoderCache(10 * ROW_BYTES)
    wrong = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(300):
            number = rng.randrange(20)
            found = cache.get(b"%d" % number)
            if found is None:
                cache.put(b"%d" % number, rows(number, 1 + number % 3))
            elif not torch.equal(found, rows(number, 1 + number % 3)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = cache.counts
    held = [number for number in range(20) if cache.get(b"%d" % number) is not None]
    assert wrong == []
    assert counts.hits + counts.misses == 8 * 300
    assert counts.num_bytes == sum(ROW_BYTES * (1 + number % 3) for number in held) <= cache.max_bytes
    assert counts.num_entries == len(held)
