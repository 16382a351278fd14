"""The generator as what embeds and reranks: what its checkpoint says of that, and services that follow it.

Owns: Resident, which makes such a PoolingService for the model or an adapter.
Must not know: engines, HTTP: whoever has an engine gives what pools in it (a RemotePooler).
Invariant: what a caller may send is checked, tokenized and answered by PoolingService, as for any other encoder; only
where the vectors come from differs.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from izh.errors import ModelLoadError
from izh.model.projections import read_json
from izh.pooling.encoders import RemotePooler
from izh.pooling.judge import JudgeTokenizer, yes_over_no
from izh.pooling.load import MAX_DOCUMENTS, MAX_INPUTS
from izh.pooling.recipe import Recipe, read_sentence_files
from izh.pooling.service import PoolingService
from izh.request import PoolingParams
from izh.text.tokenizer import Tokenizer

PoolerOf = Callable[[PoolingParams], RemotePooler]
"""Makes what computes such vectors."""


class Resident:
    """A generating model's checkpoint. Its services hold no threads and need no closing."""

    def __init__(self, path: Path, tokenizer: Tokenizer, max_model_len: int) -> None:
        """`max_model_len` is the engine's. Raises ModelLoadError for a checkpoint that wants to be pooled in a way we
        do not know."""
        self._tokenizer = tokenizer
        self._texts = tokenizer.encoder()
        self._recipe, length = _recipe(path, self._texts.model_max_length)
        self._max_model_len = max_model_len
        self._max_text_len = min(max_model_len, length or max_model_len)
        self._judge: JudgeTokenizer | None = None

    def embedder(self, name: str, pooler_of: PoolerOf) -> PoolingService:
        """Vectors as the checkpoint wants them, or of the last token."""
        # The recipe's last steps are the service's.
        pooler = pooler_of(PoolingParams(mode=self._recipe.modes[0], normalize=False))
        return PoolingService(
            pooler,
            self._texts,
            name,
            recipe=self._recipe,
            max_model_len=self._max_text_len,
            max_batch=MAX_INPUTS,
        )

    def judge(self, generates: bool) -> JudgeTokenizer:
        """What asks the model. `generates`: it has an LM head. Raises ModelLoadError when it cannot rerank."""
        if not generates:
            raise ModelLoadError("this checkpoint has no LM head, so it has no yes and no to weigh")
        if self._judge is None:
            self._judge = JudgeTokenizer(self._tokenizer)
        return self._judge

    def reranker(self, name: str, judge: JudgeTokenizer, pooler_of: PoolerOf) -> PoolingService:
        """Scores by what the model answers."""
        return PoolingService(
            pooler_of(PoolingParams(logit_ids=judge.answer_ids)),
            judge,
            name,
            recipe=Recipe(modes=("last",), normalize=False),
            score_head=yes_over_no,
            score_activation=torch.sigmoid,
            max_model_len=self._max_model_len,
            max_batch=MAX_DOCUMENTS,
        )


def _recipe(path: Path, tokenizer_length: int) -> tuple[Recipe, int | None]:
    """How the checkpoint wants its rows pooled, and the longest text that it was made for, which the tokenizer knows
    where no file says. One that says nothing of all that (a chat model) gives its last token's row, of length 1."""
    modules = path / "modules.json"
    if not modules.is_file() or not any(each.get("type", "").endswith(".Pooling") for each in read_json(modules)):
        return Recipe(modes=("last",)), None
    files = read_sentence_files(path)
    if len(files.recipe.modes) > 1:
        raise ModelLoadError(f"{path}: pooling modes {', '.join(files.recipe.modes)} side by side are not supported")
    if files.lower_case:
        raise ModelLoadError(f"{path}: do_lower_case is not supported for a decoder")
    return files.recipe, files.max_seq_length or tokenizer_length
