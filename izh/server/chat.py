"""POST /v1/chat/completions.

Owns: the shape of chat answers, whole and streamed. Must not know: sampling, scheduling.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from izh.engine.async_llm import AsyncLLM
from izh.outputs import CompletionOutput, RequestOutput
from izh.request import TokenLogprobs
from izh.server.answers import Usage, collect, heading, prompt_logprobs
from izh.server.convert import chat_ids, chat_params, check_model
from izh.server.schema import ChatBody
from izh.server.sse import stream, while_connected
from izh.text.tokenizer import Tokenizer


def routes(engine: AsyncLLM) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        check_model(engine, body.model)
        params = chat_params(body)
        token_ids = await chat_ids(engine, body)
        pieces = engine.generate(token_ids, params, priority=body.priority or 0, cache_salt=body.cache_salt)
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            return await stream(request, _events(engine, pieces, params.n, len(token_ids), include_usage))
        answer = await while_connected(request.receive, collect(pieces))
        return JSONResponse(_whole(engine, answer))

    return router


def _whole(engine: AsyncLLM, answer: RequestOutput) -> dict[str, Any]:
    usage = Usage()
    usage.add_prompt(len(answer.prompt_token_ids))
    usage.add(answer)
    body = heading("chatcmpl", "chat.completion", engine.info.name)
    body["choices"] = [
        {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": _logprobs(engine.tokenizer, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        for output in answer.outputs
    ]
    if answer.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(engine.tokenizer, answer.prompt_logprobs)
    return body | {"usage": usage.body}


async def _events(
    engine: AsyncLLM,
    pieces: AsyncGenerator[RequestOutput, None],
    num_choices: int,
    num_prompt: int,
    include_usage: bool,
) -> AsyncGenerator[dict[str, Any], None]:
    """Chunks: each choice's role first, then what is new, its end on its last; usage, if wanted, alone at the end."""
    head = heading("chatcmpl", "chat.completion.chunk", engine.info.name)
    if include_usage:
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
                for index in range(num_choices):
                    yield chunk(index, {"role": "assistant", "content": ""})
            for output in piece.outputs:
                end = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
                logprobs = _logprobs(engine.tokenizer, output)
                if output.text or logprobs or output.finish_reason:
                    delta = {"content": output.text} if output.text else {}
                    yield chunk(output.index, delta, logprobs=logprobs, **(end if output.finish_reason else {}))
    if include_usage:
        yield head | {"choices": [], "usage": usage.body}


def _logprobs(tokenizer: Tokenizer, output: CompletionOutput) -> dict[str, Any] | None:
    if output.logprobs is None:
        return None
    return {"content": [_entry(tokenizer, entry) for entry in output.logprobs], "refusal": None}


def _entry(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    top = [_token(tokenizer, token, logprob) for token, logprob in entry.top]
    return _token(tokenizer, entry.token_id, entry.logprob) | {"top_logprobs": top}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = tokenizer.piece(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(raw)}
