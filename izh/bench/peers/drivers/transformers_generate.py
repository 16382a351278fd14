"""transformers' `generate` on one batch, and PEFT's mixed batch (`adapter_names`) when there are adapters."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


class Engine:
    """Prompts of one call have one length, so nothing is padded."""

    def __init__(self, *, model: str, num_threads: int, adapters: list[str], **_others: Any) -> None:
        torch.set_num_threads(num_threads)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        # No end-of-sequence id: an answer ends at its length only. No sampling settings of the checkpoint.
        loaded.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self._has_adapters = bool(adapters)
        for index, directory in enumerate(adapters):
            if index == 0:
                from peft import PeftModel

                loaded = PeftModel.from_pretrained(loaded, directory, adapter_name="0")
            else:
                loaded.load_adapter(directory, str(index))
        self._model = loaded.eval()

    @torch.inference_mode()
    def answer(self, prompts: list[list[int]], num_tokens: int, adapters: list[int | None]) -> list[list[int]]:
        """See `main.py`."""
        ids = torch.tensor(prompts)
        more = {}
        if self._has_adapters:
            more["adapter_names"] = ["__base__" if index is None else str(index) for index in adapters]
        whole = self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, **more
        )
        answers: list[list[int]] = whole[:, ids.shape[1] :].tolist()
        return answers
