"""How the engines that `izh bench images` compares are shown images and asked for one token.

Owns: izh's own clients, over HTTP, and transformers' model, processor and template.
Must not know: what is measured, reports.
"""

import asyncio
import base64
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from izh.bench.contestants import DTYPES
from izh.config import EngineOptions
from izh.errors import OptionError
from izh.multimodal.vlm.load import load_processor
from izh.multimodal.vlm.model import FAMILIES

Counts = dict[str, float]
"""The server's own, by the names in /metrics."""

_JSON = {"Content-Type": "application/json"}


async def answer(client: httpx.AsyncClient, images: Sequence[bytes], question: str) -> tuple[float, list[bytes]]:
    """Seconds until the last of the requests has its first token, and those tokens."""
    bodies = [_body(image, question) for image in images]
    start = time.perf_counter()
    found = await asyncio.gather(*(_first_token(client, body) for body in bodies))
    return max(at for at, _ in found) - start, [token for _, token in found]


async def _first_token(client: httpx.AsyncClient, body: bytes) -> tuple[float, bytes]:
    """When it came, and the token."""
    first_s, token = None, b""
    async with client.stream("POST", "/v1/chat/completions", content=body, headers=_JSON) as response:
        if response.status_code != httpx.codes.OK:
            raise OptionError(f"the model refuses such an image: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter()
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    for each in (choice["logprobs"] or {}).get("content", ()):
                        token += bytes(each["bytes"])
    assert first_s is not None
    assert token, "the answer has no token"
    return first_s, token


def _body(image: bytes, question: str) -> bytes:
    """A request for one token, with its log-probability: only there a token's bytes are told."""
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"}},
        {"type": "text", "text": question},
    ]
    asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0}
    return json.dumps(asked | {"stream": True, "logprobs": True, "ignore_eos": True}).encode()


async def counts(client: httpx.AsyncClient) -> Counts:
    """The server's own counts of images, by name."""
    text = (await client.get("/metrics")).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {each.name.removeprefix("izh:"): each.value for each in samples if each.name.startswith("izh:mm_cache")}


class Peer:
    """transformers' own model, processor and template of the checkpoint."""

    name = "transformers"

    def __init__(self, directory: Path, engine: EngineOptions) -> None:
        """Options must name device and dtype: both engines run with the same ones."""
        from transformers import AutoModelForImageTextToText, GenerationConfig

        assert engine.dtype is not None
        model: Any = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=DTYPES[engine.dtype], local_files_only=True
        )
        self._model = model.to(engine.device).eval()
        # No end-of-sequence id: the first token counts, whichever it is. No sampling settings of the checkpoint.
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self._processor = load_processor(directory, FAMILIES[model.config.model_type].processor_class)
        self._processor.tokenizer.padding_side = "left"

    @torch.inference_mode()
    def answer(self, images: Sequence[bytes], question: str) -> tuple[float, list[int]]:
        """Seconds until all have their first token, and those tokens."""
        start = time.perf_counter()
        conversations = [
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": Image.open(io.BytesIO(image)).convert("RGB")},
                        {"type": "text", "text": question},
                    ],
                }
            ]
            for image in images
        ]
        inputs = self._processor.apply_chat_template(
            conversations,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
            padding=True,
        ).to(self._model.device)
        whole = self._model.generate(**inputs, max_new_tokens=1)
        tokens: list[int] = whole[:, -1].tolist()
        return time.perf_counter() - start, tokens
