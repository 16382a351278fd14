"""The one random number behind each sampled token.

Owns: the map (seed, choice, index of the generated token) -> [0, 1).
Must not know: torch, sequences.
Invariant: a pure function: no draw depends on an earlier one, so neither neighbours, batch order, chunking nor
preemption can change a token.

Source: Philox4x64-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), as numpy holds it.
"""

import os

import numpy as np

Key = tuple[int, int]
_MASK = (1 << 64) - 1


def stream_key(seed: int | None, choice: int) -> Key:
    """The Philox key of one choice of one request; without a seed it is a fresh one from the operating system."""
    word = int.from_bytes(os.urandom(8), "little") if seed is None else seed & _MASK
    return word, choice


class Uniforms:
    """Draws from counter-based streams. It holds scratch space only: every draw sets key and counter first."""

    def __init__(self) -> None:
        self._philox = np.random.Philox()
        self._counter = np.zeros(4, np.uint64)
        self._key = np.zeros(2, np.uint64)
        self._buffer = np.zeros(4, np.uint64)

    def at(self, key: Key, index: int) -> float:
        """Number `index` of the stream: a multiple of 2**-53 in [0, 1)."""
        self._key[:] = key
        self._counter[0] = index
        self._philox.state = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": self._key},
            "buffer": self._buffer,
            "buffer_pos": 4,  # the buffer is used up: the next draw runs the cipher
            "has_uint32": 0,
            "uinteger": 0,
        }
        return (self._philox.random_raw() >> 11) * 2.0**-53
