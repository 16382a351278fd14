"""POST /v1/rerank, /rerank, /v2/rerank and /v1/score, /score.

Owns: Jina's and Cohere's shape of a rerank, and vLLM's of a score.
Must not know: how pairs are scored.
"""

import asyncio
import uuid
from typing import Any

from fastapi import APIRouter, Request

from izh.errors import RequestError
from izh.server.schema_pooling import RerankBody, ScoreBody
from izh.server.services import Services
from izh.server.sse import while_connected


def routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/rerank")
    @router.post("/v1/rerank")
    async def rerank(body: RerankBody, request: Request) -> dict[str, Any]:
        answer = _rerank(services, body, True if body.return_documents is None else body.return_documents)
        return await while_connected(request.receive, answer)

    @router.post("/v2/rerank")
    async def rerank_v2(body: RerankBody, request: Request) -> dict[str, Any]:
        return await while_connected(request.receive, _rerank(services, body, bool(body.return_documents)))

    @router.post("/score")
    @router.post("/v1/score")
    async def score(body: ScoreBody, request: Request) -> dict[str, Any]:
        service = services.for_reranking(body.model, body.asked)
        queries, documents = _pairs(body.text_1, body.text_2)
        # One query with many documents is one call; many pairs are many, which the service batches together.
        calls = (
            [(queries[0], documents)]
            if len(set(queries)) == 1
            else [(query, [document]) for query, document in zip(queries, documents, strict=True)]
        )
        answers = await while_connected(
            request.receive,
            asyncio.gather(
                *(
                    service.scores(
                        query,
                        texts,
                        raw_scores=body.raw_scores,
                        truncate_prompt_tokens=body.truncate_prompt_tokens,
                    )
                    for query, texts in calls
                )
            ),
        )
        scores = [score for found, _ in answers for score in found]
        num_tokens = sum(count for _, count in answers)
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "model": service.model_name,
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    return router


async def _rerank(services: Services, body: RerankBody, return_documents: bool) -> dict[str, Any]:
    service = services.for_reranking(body.model, body.asked)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    if body.max_tokens_per_doc is not None:
        documents = await service.cut(documents, body.max_tokens_per_doc)
    return await service.rerank(
        body.query,
        documents,
        body.top_n,
        raw_scores=body.raw_scores,
        return_documents=return_documents,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


def _pairs(first: str | list[str], second: str | list[str]) -> tuple[list[str], list[str]]:
    """One with one, one with each of many, or each with its counterpart."""
    left = [first] if isinstance(first, str) else first
    right = [second] if isinstance(second, str) else second
    for name, texts in (("text_1", left), ("text_2", right)):
        if not texts or not all(texts):
            raise RequestError(f"{name} must hold at least one text, none of them empty", name)
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise RequestError(
            f"text_1 has {len(left)} texts and text_2 {len(right)}; give one and many, or as many of both", "text_2"
        )
    return left, right
