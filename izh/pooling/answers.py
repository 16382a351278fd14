"""Answers in the shapes that clients know: OpenAI's for embeddings, Jina's and Cohere's for a rerank.

Owns: the two shapes and the two encodings of a vector.
Must not know: how vectors and scores were made.
"""

import base64
import uuid
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from izh.errors import RequestError

ENCODINGS = ("float", "base64")


def check_encoding(encoding_format: Any) -> None:
    """Raises: RequestError for a name that is not one of ENCODINGS."""
    if encoding_format not in ENCODINGS:
        raise RequestError(
            f"encoding_format must be one of {', '.join(ENCODINGS)}, got {encoding_format!r}", "encoding_format"
        )


def embeddings_answer(vectors: Tensor, encoding_format: str, model_name: str, num_tokens: int) -> dict[str, Any]:
    """vectors [S, D] float32 -> the answer of /v1/embeddings."""
    values: Sequence[Any]
    if encoding_format == "base64":
        raw = vectors.numpy().astype("<f4", copy=False)
        values = [base64.b64encode(row.tobytes()).decode("ascii") for row in raw]
    else:
        values = vectors.tolist()
    data = [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(values)]
    return {"object": "list", "data": data, "model": model_name, "usage": usage(num_tokens)}


def rerank_answer(
    scores: Sequence[float], documents: Sequence[str] | None, top_n: int, model_name: str, num_tokens: int
) -> dict[str, Any]:
    """The answer of /v1/rerank: by descending score, ties by index; the texts too, unless `documents` is None."""
    results: list[dict[str, Any]] = []
    for index in sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if documents is not None:
            result["document"] = {"text": documents[index]}
        results.append(result)
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "object": "list",
        "model": model_name,
        "results": results,
        "usage": usage(num_tokens),
    }


def usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
