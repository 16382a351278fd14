"""The shelf: names, the bound in bytes, what is read again, and what happens beside the engine's thread."""

import threading
from pathlib import Path

import engines
import pytest
import torch

from izh.adapters.shelf import AdapterShelf
from izh.adapters.weights import Adapter, ModuleDelta
from izh.errors import AdapterError, AdapterInUseError, NotFoundError, RequestError
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
    """Adapters by directory; counts what is read. While `gate` is not set, reading waits."""

    def __init__(self, *seeds):
        self.content = {Path(str(seed)): adapter(seed) for seed in seeds}
        self.reads = []
        self.gate = threading.Event()
        self.gate.set()

    def read(self, source):
        assert self.gate.wait(10)
        self.reads.append(source)
        if source not in self.content:
            raise AdapterError(f"{source} is gone")
        held = self.content[source]
        copies = {path: {k: v.clone() for k, v in d.tensors().items()} for path, d in held.deltas.items()}
        return Adapter({path: ModuleDelta(**tensors) for path, tensors in copies.items()})


def shelf_of(disk, num=99, fit=lambda each: each, **options):
    """A shelf with room for `num` adapters, knowing all of the disk's, put in the disk's order."""
    shelf = AdapterShelf(disk.read, fit, max_bytes=num * SIZE, **options)
    for source in disk.content:
        load(shelf, source.name)
    disk.reads.clear()
    return shelf


def load(shelf, name, source=None, **options):
    source = Path(source or name)
    shelf.put(name, shelf.read(source).result(10), source, **options)


def find(shelf, *uses):
    """The weights, when they are there."""
    return shelf.find(sequence(*uses)).weights.result(10)


def resident(shelf):
    return [name for name in shelf.sources if shelf.is_in_memory(name)]


def test_names_come_and_go():
    disk = Disk(0, 1)
    shelf = shelf_of(disk)
    assert shelf.sources == {"0": Path("0"), "1": Path("1")}
    assert find(shelf, ("0", 1.0)).digest == shelf.digest("0") == adapter(0).digest
    assert shelf.find(sequence(("1", 1.0))).named == (("1", adapter(1).digest),)
    assert shelf.find(sequence()) is None
    assert shelf.num_bytes == 2 * SIZE
    shelf.pop("0")
    assert shelf.sources == {"1": Path("1")}
    assert shelf.num_bytes == SIZE
    for act in (shelf.pop, shelf.digest, lambda name: shelf.find(sequence((name, 1.0)))):
        with pytest.raises(NotFoundError, match="adapter '0' is not loaded here; loaded: '1'"):
            act("0")


def test_a_name_that_is_taken_is_replaced_only_when_told_to():
    disk = Disk(0, 1)
    shelf = shelf_of(disk)
    before = shelf.find(sequence(("0", 1.0)))
    with pytest.raises(AdapterError, match="'0' is loaded already"):
        load(shelf, "0", "1")
    assert shelf.digest("0") == adapter(0).digest
    load(shelf, "0", "1", replace=True)
    assert shelf.sources["0"] == Path("1")
    assert find(shelf, ("0", 1.0)).digest == adapter(1).digest
    assert before.weights.result().digest == adapter(0).digest, "who leased earlier keeps what was leased"
    assert shelf.num_bytes == SIZE, "equal weights are kept once, and those that no name means not at all"


def test_what_does_not_fit_the_bank_changes_nothing():
    def fit(each):
        if each.digest == adapter(1).digest:
            raise AdapterError("does not fit")
        return each

    disk = Disk(0)
    shelf = shelf_of(disk, fit=fit)
    disk.content[Path("1")] = adapter(1)
    with pytest.raises(AdapterError, match="does not fit"):
        load(shelf, "0", "1", replace=True)
    assert shelf.digest("0") == adapter(0).digest


def test_an_adapter_in_use_is_not_unloaded():
    used = {adapter(0).digest: {"0": 3}}
    shelf = shelf_of(Disk(0, 1), num_leases=lambda digest, name: used.get(digest, {}).get(name or "0", 0))
    load(shelf, "twin", "0")
    with pytest.raises(AdapterInUseError, match="adapter '0' is in use by 3 live requests"):
        shelf.pop("0")
    shelf.pop("twin")
    shelf.pop("1")
    assert list(shelf.sources) == ["0"]


def test_the_adapter_unused_for_longest_goes_first_and_comes_back_when_asked_for():
    disk = Disk(0, 1)
    shelf = shelf_of(disk, 2)
    find(shelf, ("0", 1.0))
    shelf.is_in_memory("1")  # a question is no use
    disk.content[Path("2")] = adapter(2)
    load(shelf, "2")
    assert resident(shelf) == ["0", "2"]
    assert list(shelf.sources) == ["0", "1", "2"]
    disk.reads.clear()
    assert find(shelf, ("1", 1.0)).digest == adapter(1).digest
    assert disk.reads == [Path("1")]
    find(shelf, ("1", 1.0))
    assert resident(shelf) == ["1", "2"]
    assert disk.reads == [Path("1")]


def test_what_is_leased_stays_and_a_put_without_room_changes_nothing():
    shelf = shelf_of(Disk(0), 1, num_leases=lambda digest, name: digest == adapter(0).digest)
    disk = Disk(1)
    with pytest.raises(AdapterError, match=f"adapter '1' needs {SIZE} bytes"):
        shelf.put("1", disk.read(Path("1")), Path("1"))
    assert list(shelf.sources) == resident(shelf) == ["0"]


def test_replacing_a_name_makes_room_by_itself():
    disk = Disk(0)
    shelf = shelf_of(disk, 1)
    disk.content[Path("1")] = adapter(1)
    load(shelf, "0", "1", replace=True)
    assert shelf.digest("0") == adapter(1).digest
    assert shelf.num_bytes == SIZE


def test_weights_without_room_on_the_shelf_are_still_found():
    disk = Disk(0, 1)
    shelf = shelf_of(disk, 1, num_leases=lambda digest, name: digest == adapter(1).digest)
    assert resident(shelf) == ["1"]
    for _ in range(2):
        assert find(shelf, ("0", 1.0)).digest == adapter(0).digest
    assert resident(shelf) == ["1"]
    assert disk.reads == [Path("0"), Path("0")]


def test_an_evicted_adapter_that_changed_or_went_is_an_error_of_the_request():
    disk = Disk(0, 1, 2)
    shelf = shelf_of(disk, 1)
    disk.content[Path("0")] = adapter(9)
    del disk.content[Path("1")]
    with pytest.raises(RequestError, match="adapter '0' has changed in 0"):
        find(shelf, ("0", 1.0))
    with pytest.raises(RequestError, match="adapter '1' cannot be read again: 1 is gone"):
        find(shelf, ("1", 1.0))
    assert find(shelf, ("2", 1.0)).digest == adapter(2).digest


def test_reading_happens_beside_the_caller_and_once_for_all_who_wait():
    disk = Disk(0, 1, 2)
    shelf = shelf_of(disk, 1)
    disk.gate.clear()
    waiting = [shelf.find(sequence(("0", 1.0))).weights for _ in range(3)]
    summed = shelf.find(sequence(("0", 0.5), ("2", 1.0))).weights
    assert not any(weights.done() for weights in (*waiting, summed))
    assert shelf.find(sequence(("2", 1.0))).weights.done(), "what is in memory waits for nobody"
    disk.gate.set()
    assert {weights.result(10).digest for weights in waiting} == {adapter(0).digest}
    summed.result(10)
    assert disk.reads == [Path("0")]


def test_what_was_unloaded_while_it_was_read_is_not_kept():
    disk = Disk(0, 1)
    shelf = shelf_of(disk, 1)
    disk.gate.clear()
    loan = shelf.find(sequence(("0", 1.0)))
    shelf.pop("0")
    disk.gate.set()
    assert loan.weights.result(10).digest == adapter(0).digest
    find(shelf, ("1", 1.0))
    assert shelf.num_bytes == SIZE


def test_sums_are_made_once_and_count_as_memory():
    shelf = shelf_of(Disk(0, 1), 4)
    half = find(shelf, ("0", 0.5), ("1", 1.0))  # of rank 2: as large as both
    assert find(shelf, ("0", 0.5), ("1", 1.0)) is half
    assert shelf.num_bytes == 4 * SIZE
    for scale in (2.0, 3.0, 4.0):
        find(shelf, ("0", scale))
        assert shelf.num_bytes <= 4 * SIZE
    assert find(shelf, ("0", 0.5), ("1", 1.0)) is not half
    scaled = find(shelf, ("1", 3.0))
    assert find(shelf, ("1", 3.0)) is scaled
    shelf.pop("1")
    load(shelf, "1")
    assert find(shelf, ("1", 3.0)) is not scaled


def test_impossible_sums_are_errors_of_the_request():
    d = adapter(0).deltas["x"]
    disk = Disk()
    disk.content[Path("dora")] = Adapter({"x": ModuleDelta(d.a, d.b, magnitude=torch.ones(4))})
    shelf = shelf_of(disk)
    with pytest.raises(RequestError, match="alone and at scale 1 only"):
        find(shelf, ("dora", 0.5))


def test_thousands_of_evictions_and_replacements_never_give_the_wrong_weights():
    disk = Disk(*range(6))
    shelf = shelf_of(disk, 2)
    digests = {source.name: each.digest for source, each in disk.content.items()}
    for turn in range(600):
        name = str(turn % 6)
        assert find(shelf, (name, 1.0)).digest == digests[name]
        assert shelf.num_bytes <= 2 * SIZE
        find(shelf, (name, 0.5))
        if turn % 7 == 0:
            load(shelf, name, replace=True)
    assert len(disk.reads) > 600
