"""POST /v1/chat/completions.

Owns: the shape of chat answers, whole and streamed. Must not know: sampling, scheduling.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from izh.engine.async_llm import AsyncLLM
from izh.outputs import RequestOutput
from izh.server.answers import Usage, collect, finish_reason, heading
from izh.server.convert import chat_params, chat_prompt, chosen_adapters
from izh.server.logprobs import chat_logprobs, prompt_logprobs
from izh.server.schema import ChatBody
from izh.server.services import Services
from izh.server.sse import stream, while_connected


def routes(engine: AsyncLLM, services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        adapters = chosen_adapters(engine, body)
        params = chat_params(body)
        prompt = await while_connected(request.receive, chat_prompt(engine, services.images, body))
        pieces = engine.generate(
            prompt.token_ids,
            params,
            priority=body.priority,
            cache_salt=body.cache_salt,
            adapters=adapters,
            features=prompt.features,
        )
        if body.stream:
            return await stream(request, _events(engine, pieces, body, len(prompt.token_ids)))
        answer = await while_connected(request.receive, collect(pieces))
        return JSONResponse(_whole(engine, answer, body))

    return router


def _whole(engine: AsyncLLM, answer: RequestOutput, asked: ChatBody) -> dict[str, Any]:
    """The answer in one body."""
    usage = Usage()
    usage.add_prompt(len(answer.prompt_token_ids))
    usage.add(answer)
    body = heading("chatcmpl", "chat.completion", asked.model or engine.info.name)
    body["choices"] = [
        {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": chat_logprobs(engine.tokenizer, output),
            "finish_reason": finish_reason(output),
            "stop_reason": output.stop_reason,
        }
        for output in answer.outputs
    ]
    if asked.prompt_logprobs is not None and answer.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(engine.tokenizer, answer.prompt_logprobs, asked.prompt_logprobs)
    return body | {"usage": usage.body}


async def _events(
    engine: AsyncLLM,
    pieces: AsyncGenerator[RequestOutput, None],
    asked: ChatBody,
    num_prompt: int,
) -> AsyncGenerator[dict[str, Any], None]:
    """Chunks: each choice's role first, then what is new, its end on its last; usage, if wanted, alone at the end."""
    head = heading("chatcmpl", "chat.completion.chunk", asked.model or engine.info.name)
    if asked.include_usage:
        head["usage"] = None
    usage = Usage()
    usage.add_prompt(num_prompt)

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return head | {"choices": [choice]}

    has_begun = False
    async with aclosing(pieces):
        async for piece in pieces:
            usage.add(piece)
            if not has_begun:
                has_begun = True
                for index in range(asked.n):
                    yield chunk(index, {"role": "assistant", "content": ""})
            for output in piece.outputs:
                reason = finish_reason(output)
                end = {"finish_reason": reason, "stop_reason": output.stop_reason} if reason else {}
                logprobs = chat_logprobs(engine.tokenizer, output)
                if output.text or output.logprobs or end:
                    delta = {"content": output.text} if output.text else {}
                    yield chunk(output.index, delta, logprobs=logprobs, **end)
    if asked.include_usage:
        yield head | {"choices": [], "usage": usage.body}
