"""OpenVINO GenAI's continuous batching, on a model exported by `optimum-cli` with the weights it is to have.

With float32 weights, arithmetic and KV cache are float32 too; with 8-bit weights the engine's own defaults hold.
"""

import json
import math
from pathlib import Path
from typing import Any

import openvino
import openvino_genai


class Engine:
    """Adapters are float32 models' only."""

    def __init__(
        self, *, model: str, dtype: str, num_threads: int, max_batch: int, kv_gib: float, adapters: list[str], **_: Any
    ) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = math.ceil(kv_gib)
        scheduler.max_num_seqs = max_batch
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": num_threads}
        if dtype == "fp32":
            properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        self._adapters = [_adapter(Path(path)) for path in adapters]
        if adapters:
            properties["adapters"] = openvino_genai.AdapterConfig([adapter for adapter, _scale in self._adapters])
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def answer(self, prompts: list[list[int]], num_tokens: int, adapters: list[int | None]) -> list[list[int]]:
        """See `main.py`."""
        tensors = [openvino.Tensor([prompt]) for prompt in prompts]
        configs = [self._config(num_tokens, index) for index in adapters]
        return [list(result.m_generation_ids[0]) for result in self._pipeline.generate(tensors, configs)]

    def _config(self, num_tokens: int, adapter: int | None) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.do_sample = False
        config.ignore_eos = True
        if adapter is not None:
            config.adapters = openvino_genai.AdapterConfig(*self._adapters[adapter])
        return config


def _adapter(directory: Path) -> tuple[Any, float]:
    """The weights, and their scale, which OpenVINO does not read from PEFT's configuration."""
    config = json.loads((directory / "adapter_config.json").read_text())
    adapter = openvino_genai.Adapter(str(directory / "adapter_model.safetensors"))
    return adapter, config["lora_alpha"] / config["r"]
