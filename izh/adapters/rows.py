"""Rows of a weight that an adapter brings in place of the base's own.

Owns: ReplacedRows, for a few tokens of a vocabulary or for all of it.
Must not know: slots, which modules there are, files.
Invariant: the tensors given are used as they are, so on the host they cost no memory beyond the adapter's.

V = rows of the weight, K = its width, n = rows replaced, N = rows of the step that use the adapter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from izh.errors import AdapterError
from izh.kernels.ops import Ops


@dataclass(frozen=True, slots=True, eq=False)
class ReplacedRows:
    """Row `ids[i]` of a weight [V, K] is `values[i]`."""

    ids: Tensor  # [n] int64, ascending
    values: Tensor  # [n, K] float32

    def check(self, num_rows: int, width: int) -> None:
        """Raises AdapterError for rows that a weight [num_rows, width] does not have, or has once only."""
        if self.values.shape != (len(self.ids), width):
            raise AdapterError(
                f"{tuple(self.values.shape)} values for {len(self.ids)} rows; the model's weight has {num_rows} rows "
                f"of {width}"
            )
        if not bool((self.ids.diff() > 0).all()):
            raise AdapterError("rows to replace must be ascending, each once")
        for row in self.ids[:1].tolist() + self.ids[-1:].tolist():
            if not 0 <= row < num_rows:
                raise AdapterError(f"row {row} is replaced; the model's weight has {num_rows} rows")

    def to(self, device: torch.device) -> "ReplacedRows":
        return ReplacedRows(self.ids.to(device), self.values.to(device))

    def merged(self, weight: Tensor) -> Tensor:
        """The weight [V, K] with these rows in it, in float32."""
        return weight.float().index_copy(0, self.ids, self.values)

    def look_up(self, found: Tensor, tokens: Tensor) -> Tensor:
        """found [N, K] are the base's rows for tokens [N] -> the same, with the replaced ones among them replaced."""
        place = torch.searchsorted(self.ids, tokens).clamp_(max=len(self.ids) - 1)
        is_mine = self.ids[place] == tokens
        return torch.where(is_mine[:, None], self.values[place].to(found), found)

    def project(self, x: Tensor, ops: Ops) -> Tensor:
        """x [N, K] -> [N, n], what the replaced rows give in a linear with this weight."""
        return ops.linear(x.float().contiguous(), self.values, None)
