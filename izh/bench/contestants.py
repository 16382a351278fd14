"""The engines that a benchmark compares, each behind the same one call.

Owns: how izh and transformers are asked for exactly n greedy tokens per prompt.
Must not know: clocks, reports.
Invariant: `answer` returns when the tokens are on the host: `num_tokens` for every prompt, end-of-sequence or not.
"""

from typing import Any, Protocol

import torch

from izh.config import EngineOptions
from izh.llm import LLM
from izh.model.source import ModelSource
from izh.request import SamplingParams

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Contestant(Protocol):
    """An engine under measurement."""

    name: str

    def answer(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """`num_tokens` greedy tokens for each prompt, all prompts at once."""


class Izh:
    """The in-process engine, through its public offline face."""

    name = "izh"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def answer(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return [answer.outputs[0].token_ids for answer in self._llm.generate(prompts, params, progress=False)]


class Transformers:
    """`generate` of the transformers library on one padded batch (here: prompts of one length, so no padding)."""

    name = "transformers"

    def __init__(self, source: ModelSource, options: EngineOptions) -> None:
        """Options must name device and dtype: both engines run with the same ones."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        assert options.dtype is not None
        is_gguf = source.kind == "gguf"
        where, more = (source.path.parent, {"gguf_file": source.path.name}) if is_gguf else (source.path, {})
        model: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=_DTYPES[options.dtype], local_files_only=True, **more
        )
        self._model = model.to(options.device).eval()
        # No end-of-sequence id: an answer ends at its length only. No sampling settings of the checkpoint.
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    @torch.inference_mode()
    def answer(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=self._model.device)
        whole = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens)
        answers: list[list[int]] = whole[:, ids.shape[1] :].tolist()
        return answers
