"""A generator as a reranker: the question it is asked, and the two words it may answer.

Owns: JudgeTokenizer: Qwen3-Reranker's published template around a query and a document, and the ids of "yes" and "no".
Must not know: engines, how logits are had.
Invariant: what a query or document spells is text: control tokens come from the template alone.

A score is the probability of "yes" where only "yes" and "no" may follow: softmax over their two logits, which is the
sigmoid of their difference. Source: Zhang et al., Qwen3 Embedding (2025), section 2, and the models' cards.
"""

from collections.abc import Sequence

from torch import Tensor

from izh.errors import ModelLoadError, RequestError
from izh.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class JudgeTokenizer:
    """Pairs as the judge reads them: head, instruction, query and document, tail."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ModelLoadError for a tokenizer without the template's tokens."""
        self._tokenizer = tokenizer
        self._texts = tokenizer.encoder()
        self._head = tokenizer.encode(_HEAD, add_special_tokens=False)
        self._tail = tokenizer.encode(_TAIL, add_special_tokens=False)
        if self._head[0] not in tokenizer.special_ids or self._tail[0] not in tokenizer.special_ids:
            raise ModelLoadError("the tokenizer has no <|im_start|> and <|im_end|>, which a judge's prompt needs")
        answers = tokenizer.encode_plain(["yes", "no"])
        if [len(ids) for ids in answers] != [1, 1]:
            raise ModelLoadError('"yes" and "no" are no single tokens of this model, so it cannot judge')
        self.answer_ids = (answers[0][0], answers[1][0])
        """Of "yes" and of "no"."""

    def encode_pair(self, query: str, document: str) -> list[int]:
        return self.encode_pairs(query, [document])[0]

    def encode_pairs(self, query: str, documents: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """The query with each document; with `max_length` the document's end is cut off until all fits.

        Raises: RequestError for text that is no valid Unicode, and a `max_length` that the template alone fills.
        """
        room = None
        if max_length is not None:
            room = max_length - len(self._head) - len(self._tail)
            if room < 1:
                raise RequestError(
                    f"truncate_prompt_tokens must be above {max_length - room}, the tokens of this model's template, "
                    f"got {max_length}",
                    "truncate_prompt_tokens",
                )
        asked = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: "
        bodies = self._tokenizer.encode_plain([asked + document for document in documents])
        return [self._head + body[:room] + self._tail for body in bodies]

    def cut(self, text: str, max_tokens: int) -> str:
        """The text's beginning, of at most `max_tokens` tokens."""
        return self._texts.cut(text, max_tokens)


def yes_over_no(logits: Tensor) -> Tensor:
    """logits [S, 2] of "yes" and "no" -> [S], the logarithm of the odds of "yes"."""
    return logits[:, 0] - logits[:, 1]
