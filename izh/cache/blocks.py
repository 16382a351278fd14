"""The pool of KV blocks and the index of what is cached in them.

Owns: which block is held by how many sequences, which free block is reused next, and which key names which block.
Must not know: tensors, sequences, policies. Called by the scheduler only.

A block's life:

    free, unnamed --allocate--> held (1 holder) --publish--> held, named --share--> held by more
         ^                          |                            |
         |                       release                      release (last holder)
         |                          v                            v
         +---- reused last-in <-- free, unnamed          free, named: still found by its key, reused
                                                         least-recently-released first, then loses its name

Invariants: a block is free exactly when no one holds it; a key names at most one block and a block has at most one key.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` interchangeable blocks; block ids are 0 .. num_blocks-1."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to reuse first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def holders(self) -> tuple[int, ...]:
        """How many sequences hold each block."""
        return tuple(self._holders)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest run of leading keys that are cached. Pure."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free now, so that sharing them uses up free ones. Pure."""
        return sum(1 for block in blocks if self._holders[block] == 0)

    def share(self, blocks: Sequence[int]) -> None:
        """Hold these (cached) blocks once more."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` blocks with no content. The caller has made sure that `count <= num_free`."""
        assert count <= len(self._free), f"allocate({count}) with {len(self._free)} blocks free"
        blocks = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: bytes) -> None:
        """Name a held block whose KV is now complete. The first block with a key keeps it; later twins stay unnamed."""
        assert self._holders[block] > 0
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each. Later blocks of a sequence are reused before earlier ones: they are worth less."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} released more often than held"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Drop every name: nothing computed so far will be found again."""
        self._key_of.clear()
        self._block_of.clear()

    def check(self) -> None:
        """Assert the invariants. For tests."""
        free = set(self._free)
        assert len(self._holders) == self.num_blocks
        assert all((count == 0) == (block in free) for block, count in enumerate(self._holders))
        assert all(count >= 0 for count in self._holders)
        assert len(self._key_of) == len(self._block_of)
        assert all(self._block_of[key] == block for block, key in self._key_of.items())

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
