"""POST /tokenize and /detokenize. Owns: the shape of their answers (vLLM's)."""

import asyncio
from typing import Any

from fastapi import APIRouter

from izh.engine.async_llm import AsyncLLM
from izh.errors import RequestError
from izh.server.convert import chat_prompt, check_model, prompt_ids
from izh.server.schema import DetokenizeBody, TokenizeBody
from izh.server.services import Services


def routes(engine: AsyncLLM, services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        check_model(engine, body.model)
        if body.prompt is not None:
            (tokens,) = await prompt_ids(engine, [body.prompt], body.add_special_tokens)
        else:
            tokens = (await chat_prompt(engine, services.images, body)).token_ids
        strings = [engine.tokenizer.piece(token)[0] for token in tokens] if body.return_token_strs else None
        return {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": engine.info.max_model_len,
            "token_strs": strings,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        check_model(engine, body.model)
        limit = engine.info.vocab_size
        wrong = next((token for token in body.tokens if not 0 <= token < limit), None)
        if wrong is not None:
            raise RequestError(f"tokens has id {wrong}; the vocabulary is 0..{limit - 1}", "tokens")
        text = await asyncio.to_thread(engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return {"prompt": text}

    return router
