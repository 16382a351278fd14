"""The shelf: names, the bound in bytes, what is read again, and a loader thread beside the engine's."""

import threading
from pathlib import Path

import engines
import pytest
import torch

from izh.adapters.shelf import MAX_COMBINED, AdapterShelf
from izh.adapters.weights import Adapter, ModuleDelta
from izh.errors import AdapterError, NotFoundError, RequestError
from izh.sequence import Sequence

SIZE = 4 * (8 + 4)  # bytes of one adapter below


def adapter(seed):
    torch.manual_seed(seed)
    return Adapter({"x": ModuleDelta(torch.randn(1, 8), torch.randn(4, 1))})


def sequence(*uses):
    made = engines.request("r", [1])
    fields = {f: getattr(made, f) for f in made.__struct_fields__}
    return Sequence(type(made)(**fields | {"adapters": tuple(uses)}))


class Disk:
    """Adapters by directory; counts what is read."""

    def __init__(self, *seeds):
        self.content = {Path(str(seed)): adapter(seed) for seed in seeds}
        self.reads = []

    def read(self, source):
        self.reads.append(source)
        if source not in self.content:
            raise AdapterError(f"{source} is gone")
        held = self.content[source]
        return Adapter({path: ModuleDelta(d.a.clone(), d.b.clone()) for path, d in held.deltas.items()})


def shelf_of(disk, num, **options):
    """A shelf with room for `num` adapters, knowing all of the disk's, put in the disk's order."""
    shelf = AdapterShelf(lambda each: None, max_bytes=num * SIZE, read=disk.read, **options)
    for source, each in disk.content.items():
        shelf.put(source.name, each, source)
    return shelf


def resident(shelf):
    return [name for name in shelf.names if shelf.get(name) is not None]


def test_put_get_pop():
    shelf = AdapterShelf(lambda each: None)
    first = adapter(0)
    shelf.put("a", first, Path("somewhere"))
    shelf.put("b", adapter(1))
    assert shelf.names == ("a", "b")
    assert shelf.get("a") is first
    assert shelf.get("c") is None
    assert (shelf.source("a"), shelf.source("b"), shelf.source("c")) == (Path("somewhere"), None, None)
    assert shelf.num_bytes == 2 * SIZE
    assert shelf.pop("a") is first
    assert shelf.names == ("b",)
    assert shelf.num_bytes == SIZE
    with pytest.raises(NotFoundError, match="adapter 'a' is not loaded here; loaded: 'b'"):
        shelf.pop("a")


def test_what_does_not_fit_the_bank_changes_nothing():
    def check(each):
        if each.digest == adapter(1).digest:
            raise AdapterError("does not fit")

    shelf = AdapterShelf(check)
    shelf.put("a", adapter(0))
    with pytest.raises(AdapterError, match="does not fit"):
        shelf.put("a", adapter(1))
    assert shelf.get("a").digest == adapter(0).digest


def test_equal_weights_are_kept_once_and_as_long_as_a_name_means_them():
    shelf = AdapterShelf(lambda each: None)
    shelf.put("a", adapter(0))
    shelf.put("b", adapter(0))
    assert shelf.get("a") is shelf.get("b")
    assert shelf.num_bytes == SIZE
    shelf.pop("a")
    assert shelf.get("b") is not None
    shelf.put("b", adapter(1))
    assert shelf.num_bytes == SIZE


def test_the_adapter_unused_for_longest_goes_first_and_comes_back_when_asked_for():
    disk = Disk(0, 1)
    shelf = shelf_of(disk, 2)
    assert shelf.find(sequence(("0", 1.0))).digest == adapter(0).digest
    shelf.get("1")  # a question is no use
    shelf.put("2", adapter(2), Path("2"))
    assert resident(shelf) == ["0", "2"]
    assert shelf.names == ("0", "1", "2")
    assert disk.reads == []
    assert shelf.find(sequence(("1", 1.0))).digest == adapter(1).digest
    assert disk.reads == [Path("1")]
    assert resident(shelf) == ["1", "2"]
    shelf.find(sequence(("1", 1.0)))
    assert disk.reads == [Path("1")]


@pytest.mark.parametrize("keep", ["pinned", "used", "no source", "no reader"])
def test_what_may_not_go_stays_and_a_put_without_room_changes_nothing(keep):
    disk = Disk(0)
    used = {adapter(0).digest} if keep == "used" else set()
    shelf = AdapterShelf(
        lambda each: None,
        max_bytes=SIZE,
        read=None if keep == "no reader" else disk.read,
        is_used=used.__contains__,
    )
    shelf.put("0", adapter(0), None if keep == "no source" else Path("0"), is_pinned=keep == "pinned")
    with pytest.raises(AdapterError, match=f"adapter '1' needs {SIZE} bytes"):
        shelf.put("1", adapter(1), Path("1"))
    assert shelf.names == ("0",)
    assert resident(shelf) == ["0"]


def test_one_pinned_name_keeps_the_weights_of_all_their_names():
    disk = Disk(0)
    shelf = shelf_of(disk, 1)
    shelf.put("also", adapter(0), Path("0"), is_pinned=True)
    with pytest.raises(AdapterError, match="pinned"):
        shelf.put("1", adapter(1), Path("1"))


def test_replacing_a_name_makes_room_by_itself():
    shelf = AdapterShelf(lambda each: None, max_bytes=SIZE)
    shelf.put("a", adapter(0))
    shelf.put("a", adapter(1))
    assert shelf.get("a").digest == adapter(1).digest
    assert shelf.num_bytes == SIZE


def test_weights_without_room_on_the_shelf_are_still_found():
    disk = Disk(0, 1)
    used = set()
    shelf = shelf_of(disk, 1, is_used=used.__contains__)
    used.add(adapter(1).digest)
    assert resident(shelf) == ["1"]
    for _ in range(2):
        assert shelf.find(sequence(("0", 1.0))).digest == adapter(0).digest
    assert resident(shelf) == ["1"]
    assert len(disk.reads) == 2


def test_an_evicted_adapter_that_changed_or_went_is_an_error_of_the_request():
    disk = Disk(0, 1, 2)
    shelf = shelf_of(disk, 1)
    disk.content[Path("0")] = adapter(9)
    del disk.content[Path("1")]
    with pytest.raises(RequestError, match="adapter '0' has changed in 0"):
        shelf.find(sequence(("0", 1.0)))
    with pytest.raises(RequestError, match="adapter '1' cannot be read again: 1 is gone"):
        shelf.find(sequence(("1", 1.0)))
    assert shelf.find(sequence(("2", 1.0))).digest == adapter(2).digest


def test_sums_are_made_once_and_only_so_many_are_kept():
    shelf = AdapterShelf(lambda each: None)
    shelf.put("a", adapter(0))
    shelf.put("b", adapter(1))
    half = shelf.find(sequence(("a", 0.5), ("b", 1.0)))
    assert shelf.find(sequence(("a", 0.5), ("b", 1.0))) is half
    for i in range(MAX_COMBINED):
        shelf.find(sequence(("a", 2.0 + i)))
    assert shelf.find(sequence(("a", 0.5), ("b", 1.0))) is not half
    assert shelf.find(sequence()) is None
    recent = shelf.find(sequence(("b", 3.0)))
    shelf.pop("b")
    shelf.put("b", adapter(1))
    assert shelf.find(sequence(("b", 3.0))) is not recent


def test_unknown_names_and_impossible_sums():
    shelf = AdapterShelf(lambda each: None)
    d = adapter(0).deltas["x"]
    shelf.put("dora", Adapter({"x": ModuleDelta(d.a, d.b, magnitude=torch.ones(4))}))
    with pytest.raises(NotFoundError, match="adapter 'x' is not loaded here; loaded: 'dora'"):
        shelf.find(sequence(("x", 1.0)))
    with pytest.raises(RequestError, match="alone and at scale 1 only"):
        shelf.find(sequence(("dora", 0.5)))


def test_a_loader_thread_fills_the_shelf_while_the_engine_finds():
    """Every find gives the weights its name means, through thousands of evictions on both sides."""
    disk = Disk(*range(6))
    shelf = shelf_of(disk, 2)
    digests = {source.name: each.digest for source, each in disk.content.items()}
    stop, failures = threading.Event(), []

    def fill():
        try:
            while not stop.is_set():
                for source, each in disk.content.items():
                    shelf.put(source.name, each, source)
                shelf.put("extra", adapter(7), Path("7"))
                shelf.pop("extra")
        except Exception as error:
            failures.append(error)

    loader = threading.Thread(target=fill)
    loader.start()
    try:
        for turn in range(600):
            name = str(turn % 6)
            assert shelf.find(sequence((name, 1.0))).digest == digests[name]
            assert shelf.num_bytes <= 2 * SIZE
            shelf.find(sequence((name, 0.5)))
    finally:
        stop.set()
        loader.join()
    assert failures == []
    assert disk.reads
