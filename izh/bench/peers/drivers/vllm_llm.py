"""vLLM's offline `LLM` on a CPU, in the driver's own process, without prefix caching: no prompt comes twice."""

import math
import os
from typing import Any


class Engine:
    """Eager: compilation for a CPU takes minutes for each batch size."""

    def __init__(
        self,
        *,
        model: str,
        num_threads: int,
        max_batch: int,
        max_len: int,
        kv_gib: float,
        adapters: list[str],
        rank: int,
        **_others: Any,
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))[:num_threads]
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(kv_gib)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": max(rank, 8)} if adapters else {}
        self._llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_num_seqs=max_batch,
            max_model_len=max_len,
            **lora,
        )
        self._adapters = [LoRARequest(str(index), index + 1, path) for index, path in enumerate(adapters)]

    def answer(self, prompts: list[list[int]], num_tokens: int, adapters: list[int | None]) -> list[list[int]]:
        """See `main.py`."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        lora = [None if index is None else self._adapters[index] for index in adapters] if self._adapters else None
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._llm.generate(asked, params, lora_request=lora, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]
