"""izh's offline face. `options` are the engine's."""

from typing import Any

from izh.llm import LLM
from izh.request import SamplingParams


class Engine:
    """As a user makes it."""

    def __init__(
        self, *, model: str, num_threads: int, adapters: list[str], rank: int, options: dict[str, Any], **_others: Any
    ) -> None:
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        if adapters:
            lora = tuple(f"{index}={directory}" for index, directory in enumerate(adapters))
            options |= {"lora": lora, "max_loras": len(adapters), "max_lora_rank": rank}
        self._llm = LLM(**options | {"model": model, "num_threads": num_threads}, quiet=True)

    def answer(self, prompts: list[list[int]], num_tokens: int, adapters: list[int | None]) -> list[list[int]]:
        """See `main.py`."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        lora = [None if index is None else str(index) for index in adapters]
        answers = self._llm.generate(prompts, params, lora=lora, progress=False)
        return [answer.outputs[0].token_ids for answer in answers]
