"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's fields and answers.

Owns: whether clients may do this at all, and where the directories they name must lie.
Must not know: how an adapter is read.
Invariant: no path outside --lora-root is looked at, however it is spelled.
"""

import asyncio
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import PlainTextResponse

from izh.engine.async_llm import AsyncLLM
from izh.errors import AdapterError, NotFoundError, RequestError
from izh.server.errors import shown
from izh.server.schema import LoadAdapterBody, UnloadAdapterBody


def routes(engine: AsyncLLM) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/load_lora_adapter")
    async def load(body: LoadAdapterBody) -> PlainTextResponse:
        directory = await asyncio.to_thread(_confined, _root(engine), body.lora_path)
        try:
            await engine.load_lora(body.lora_name, directory, replace=body.load_inplace)
        except AdapterError as error:
            raise RequestError(str(error), "lora_name" if body.lora_name in engine.info.adapters else None) from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapterBody) -> PlainTextResponse:
        _root(engine)
        await engine.unload_lora(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _root(engine: AsyncLLM) -> Path:
    if engine.info.lora_root is None:
        raise NotFoundError(
            "loading adapters at run time is off here; start the server with --allow-runtime-lora --lora-root DIR"
        )
    return engine.info.lora_root


def _confined(root: Path, path: str) -> Path:
    """The directory that the client names, absolute or from the root on, links followed."""
    try:
        directory = (root / path).resolve()
        if not directory.is_relative_to(root):
            raise RequestError(f"lora_path must lie in the server's --lora-root, got {shown(path)}", "lora_path")
        has_config = (directory / "adapter_config.json").is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, a loop of links
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"lora_path is no path, got {shown(path)}", "lora_path") from error
    if not has_config:
        raise NotFoundError(
            f"lora_path {shown(path)} holds no adapter: there is no adapter_config.json in that directory", "lora_path"
        )
    return directory
