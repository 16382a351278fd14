"""What a cached thing is called.

Owns: `digest`, the one way a cache key is made, and `BlockKeys`, which names KV blocks.
Must not know: what a feature is; features contribute opaque parts through a callable.
Invariant: a key is SHA-256 over tagged, length-prefixed parts, so no two lists of parts ever read alike.

    root  = digest("root", model identity, rope length key, cache salt)
    key_0 = digest("block", root,  tokens of block 0, parts of block 0 ...)
    key_i = digest("block", key_{i-1}, tokens of block i, parts of block i ...)

A key therefore names everything that its block's KV depends on: all tokens before it, and all features of those.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable

from izh.sequence import Sequence

Parts = Callable[[Sequence, int, int], tuple[bytes, ...]]
"""parts(sequence, start, stop): what makes the KV of this span distinct beyond its tokens."""

_TAGS = {bytes: b"b", str: b"s", int: b"i"}


def digest(tag: str, *parts: bytes | str | int) -> bytes:
    """SHA-256 over the tag and the parts, each written as type, length, content. 32 bytes."""
    hasher = hashlib.sha256()
    for part in (tag, *parts):
        kind = _TAGS[type(part)]
        content = part if isinstance(part, bytes) else str(part).encode()
        hasher.update(kind + len(content).to_bytes(8, "little"))
        hasher.update(content)
    return hasher.digest()


class BlockKeys:
    """Names the full blocks of sequences, each key computed once."""

    def __init__(
        self, block_size: int, model_identity: bytes, rope_key: Callable[[int], bytes], parts: Iterable[Parts]
    ) -> None:
        self._block_size = block_size
        self._model_identity = model_identity
        self._rope_key = rope_key  # prompt length -> part of the root, b"" for recipes that do not depend on length
        self._parts = tuple(parts)

    def extend(self, sequence: Sequence) -> None:
        """Append to `sequence.keys` until every full block of its known tokens has one."""
        keys, size = sequence.keys, self._block_size
        num_full = sequence.num_tokens // size
        while len(keys) < num_full:
            start = len(keys) * size
            stop = start + size
            parent = keys[-1] if keys else self._root(sequence)
            tokens = array("I", sequence.token_ids[start:stop]).tobytes()
            extra = [part for parts in self._parts for part in parts(sequence, start, stop)]
            keys.append(digest("block", parent, tokens, *extra))

    def _root(self, sequence: Sequence) -> bytes:
        salt = sequence.request.cache_salt
        salted = () if salt is None else (salt,)
        return digest("root", self._model_identity, self._rope_key(sequence.num_prompt), *salted)
