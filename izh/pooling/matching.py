"""Scores of pairs by how well the query's tokens are matched in the document: the demo reranker's head.

Owns: MatchHead, MatchingEncoder.
Must not know: files other than the head's own, requests.
Invariant: a pair's score depends on its own rows only.

Query and document stand in one sequence and see each other in every layer, so this is a cross-encoder; only its last
step is that of late interaction (Khattab and Zaharia 2020, ColBERT, section 3.3).
"""

from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from izh.errors import ModelLoadError
from izh.pooling.encoders import NativeEncoder

HEAD_FILE = "head.safetensors"


class MatchHead:
    """A pair's rows [T, D] -> its score: scale * sum_i w_i max_j cos(x_i, x_j) + cls . x_0 + bias.

    i runs over the query's rows ([CLS] and the [SEP] between included), j over the document's;
    w = softmax(weigh . x_i).
    """

    def __init__(self, directory: Path, size: int) -> None:
        """Raises ModelLoadError for a file that is not such a head for rows of this size."""
        path = directory / HEAD_FILE
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{path}: {error}") from error
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        wanted = {"weigh": [size], "cls": [size], "scale": [], "bias": []}
        if shapes != wanted:
            raise ModelLoadError(f"{path}: holds {shapes}, the encoder asks for {wanted}")
        self.weigh, self.cls = tensors["weigh"].float(), tensors["cls"].float()
        self.scale, self.bias = tensors["scale"].float(), tensors["bias"].float()

    def __call__(self, rows: Tensor, num_query: int) -> Tensor:
        """rows [T, D], the first `num_query` of which are the query's -> the score, []; NaN for a text alone."""
        if num_query == len(rows):
            return rows.new_tensor(torch.nan)
        unit = F.normalize(rows, dim=-1)
        likeness = (unit[:num_query] @ unit[num_query:].T).amax(1)
        weights = (rows[:num_query] @ self.weigh).softmax(0)
        return self.scale * (weights @ likeness) + rows[0] @ self.cls + self.bias


class MatchingEncoder(NativeEncoder):
    """An encoder whose every row is the score of the pair it stands in. The two sides differ in type for the head
    alone: to the encoder all tokens are of type 0, the one that MiniLM has been trained with."""

    def __init__(self, encoder: NativeEncoder, head: MatchHead) -> None:
        super().__init__(encoder.encoder)
        self.head = head

    @torch.inference_mode()
    def packed(self, token_ids: Tensor, starts: Tensor, type_ids: Tensor | None) -> Tensor:
        """-> [T, 1]. `type_ids` are 0 in the query's rows, which come first, and 1 in the document's."""
        rows = super().packed(token_ids, starts, None)
        types = torch.zeros_like(token_ids) if type_ids is None else type_ids
        scores = [
            self.head(rows[start:stop], int((types[start:stop] == 0).sum()))
            for start, stop in pairwise(starts.tolist())
        ]
        return torch.stack(scores).repeat_interleave(starts.diff().long())[:, None]
