"""The shapes of adapters that are measured.

Owns: SHAPES, by the names that the command line takes.
Must not know: torch, files.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Rank, and the last names of the projections that are adapted, in every layer."""

    title: str
    rank: int
    targets: tuple[str, ...]


SHAPES = {
    "r16-all": AdapterShape(
        "rank 16 on all seven projections",
        16,
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    "r8-qv": AdapterShape("rank 8 on q and v", 8, ("q_proj", "v_proj")),
}
