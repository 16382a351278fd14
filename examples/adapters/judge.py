"""The share of held-out cases that a model gets right: with the adapter, without it, and prompted as well as we can.

Owns: the judging, all cases and all three ways in one batch of the engine that serves the adapters.
Must not know: tasks, training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from task import Example, Task

from izh import LLM, SamplingParams

NUM_SHOWN = 4  # cases printed with their answers


@dataclass(frozen=True)
class Figures:
    """Shares of right answers, 0 to 1. `base_prompted`: the base model, asked as `Task.prompted` does."""

    num_cases: int
    adapted: float
    base: float
    base_prompted: float


def judge(task: Task, cases: Sequence[Example], directory: Path) -> Figures:
    """Ask every case greedily; prints the wrong answers, and some of the others."""
    llm = LLM("demo", quiet=True, lora=(f"judged={directory}",), kv_cache_gb=0.5, max_num_seqs=64)
    plain = [llm.tokenizer.chat([{"role": "user", "content": case.message}]) for case in cases]
    prompts = [*plain, *plain, *(llm.tokenizer.chat(task.prompted(case.message)) for case in cases)]
    lora = ["judged"] * len(cases) + [None] * 2 * len(cases)
    params = SamplingParams(temperature=0, max_tokens=task.max_tokens)
    answers = [each.outputs[0].text for each in llm.generate(prompts, params, lora=lora)]
    adapted, base, prompted = (answers[n * len(cases) : (n + 1) * len(cases)] for n in range(3))
    right = [task.is_right(case, answer) for case, answer in zip(cases, adapted, strict=True)]
    for index, case in enumerate(cases):
        if index < NUM_SHOWN or not right[index]:
            print(f"{'right' if right[index] else 'WRONG'}: {case.message}\n    wanted:   {case.answer}")
            for who, answer in (("adapter", adapted), ("base", base), ("prompted", prompted)):
                print(f"    {who + ':':9} {answer[index]!r}")
    return Figures(len(cases), _share(task, cases, adapted), _share(task, cases, base), _share(task, cases, prompted))


def _share(task: Task, cases: Sequence[Example], answers: Sequence[str]) -> float:
    return sum(task.is_right(case, answer) for case, answer in zip(cases, answers, strict=True)) / len(cases)
