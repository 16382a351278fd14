"""The engines that a benchmark compares, each behind the same one call.

Owns: how izh, transformers and PEFT are asked for exactly n greedy tokens per prompt, and which adapter answers which.
Must not know: clocks, reports.
Invariants: `answer` returns when the tokens are on the host: `num_tokens` for every prompt, end-of-sequence or not.
Contestants with equally many adapters give the same turn's prompts the same ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from izh.bench.adapters import adapted_modules
from izh.config import EngineOptions
from izh.errors import OptionError
from izh.llm import LLM
from izh.model.source import ModelSource
from izh.request import SamplingParams

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Contestant(Protocol):
    """An engine under measurement."""

    name: str

    def answer(self, prompts: list[list[int]], num_tokens: int, turn: int = 0) -> list[list[int]]:
        """`num_tokens` greedy tokens for each prompt, all prompts at once. `turn`: see `deal`."""


def deal(num_adapters: int, num_prompts: int, turn: int) -> list[int]:
    """Which adapter answers each prompt: prompt i gets i mod `num_adapters`. More adapters than prompts are spread
    evenly, and the next turn takes their neighbours: after ceil(num_adapters / num_prompts) turns all were used."""
    if num_adapters <= num_prompts:
        return [i % num_adapters for i in range(num_prompts)]
    return [(i * num_adapters // num_prompts + turn) % num_adapters for i in range(num_prompts)]


class Izh:
    """The in-process engine, through its public offline face; with the base model alone, or its adapters mixed."""

    def __init__(self, llm: LLM, name: str = "izh", adapters: Sequence[str] = ()) -> None:
        self.name = name
        self._llm = llm
        self._adapters = adapters

    def answer(self, prompts: list[list[int]], num_tokens: int, turn: int = 0) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        lora = None
        if self._adapters:
            lora = [self._adapters[index] for index in deal(len(self._adapters), len(prompts), turn)]
        answers = self._llm.generate(prompts, params, lora=lora, progress=False)
        return [answer.outputs[0].token_ids for answer in answers]


class Transformers:
    """`generate` of the transformers library on one padded batch (here: prompts of one length, so no padding)."""

    name = "transformers"

    def __init__(self, source: ModelSource, options: EngineOptions) -> None:
        """Options must name device and dtype: both engines run with the same ones."""
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # it would write across the benchmark's own
        assert options.dtype is not None
        is_gguf = source.kind == "gguf"
        where, more = (source.path.parent, {"gguf_file": source.path.name}) if is_gguf else (source.path, {})
        model: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=DTYPES[options.dtype], local_files_only=True, **more
        )
        self._model = model.to(options.device).eval()
        # No end-of-sequence id: an answer ends at its length only. No sampling settings of the checkpoint.
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    def answer(self, prompts: list[list[int]], num_tokens: int, turn: int = 0) -> list[list[int]]:
        return self._generate(prompts, num_tokens)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], num_tokens: int, **more: Any) -> list[list[int]]:
        ids = torch.tensor(prompts, device=self._model.device)
        mask = torch.ones_like(ids)
        whole = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=num_tokens, **more)
        answers: list[list[int]] = whole[:, ids.shape[1] :].tolist()
        return answers


class Peft(Transformers):
    """PEFT's mixed batch on transformers' `generate`: `adapter_names`, one for each prompt."""

    def __init__(self, source: ModelSource, options: EngineOptions, directories: Sequence[Path], name: str) -> None:
        """Raises OptionError when the adapters mean modules that transformers' model does not have, as they do where it
        fuses projections: PEFT would pass over them."""
        from peft import PeftModel

        super().__init__(source, options)
        modules = {name for name, _module in self._model.named_modules()}
        if missing := sorted(adapted_modules(directories[0]) - modules):
            raise OptionError(
                f"PEFT cannot adapt {source.name}: transformers' model of it has no {missing[0]}; "
                "measure without PEFT: --no-peer"
            )
        self.name = name
        self._adapters = [f"adapter-{index}" for index in range(len(directories))]
        where = {"torch_device": options.device, "low_cpu_mem_usage": True}
        model = PeftModel.from_pretrained(self._model, directories[0], adapter_name=self._adapters[0], **where)
        for adapter, directory in zip(self._adapters[1:], directories[1:], strict=True):
            model.load_adapter(directory, adapter, **where)
        self._model = model.eval()

    def answer(self, prompts: list[list[int]], num_tokens: int, turn: int = 0) -> list[list[int]]:
        dealt = deal(len(self._adapters), len(prompts), turn)
        return self._generate(prompts, num_tokens, adapter_names=[self._adapters[index] for index in dealt])
