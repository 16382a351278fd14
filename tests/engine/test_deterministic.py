"""`--deterministic`: a request's logits, of every row it computes, are those of the request alone, to the last bit."""

import random
from dataclasses import replace
from pathlib import Path

import adapters_made
import engines
import image_cases
import pytest
import tiny_checkpoint
import torch

from izh.config import EngineOptions
from izh.engine.build import Adapters, compose, pack_features
from izh.engine.core import EngineCore
from izh.errors import OptionError
from izh.model.source import resolve
from izh.request import Request, SamplingParams, choices_of

NUM_SCHEDULES = 250  # of each of four seeds
NUM_TOKENS, BLOCK = 8, 4
USES = ((), (), (("plain", 1.0),), (("dora", 1.0),), (("words", 1.0),), (("plain", 0.5), ("words", 2.0)))


class Recorder:
    """A Head that notes the logits of every row of every step; a row that is computed again must not change."""

    def __init__(self, model) -> None:
        self._model = model
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        self.num_again = 0

    def rows(self, plan):
        return list(range(sum(chunk.count for chunk in plan.chunks)))

    def finish(self, plan, hidden):
        logits = iter(self._model.logits(hidden.take(range(len(hidden.values)))))
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.stop):
                row, before = next(logits).clone(), self.logits.get((chunk.sequence.id, position))
                if before is not None:
                    self.num_again += 1
                    assert torch.equal(row, before), f"{chunk.sequence.id}: position {position} changed"
                self.logits[chunk.sequence.id, position] = row
        return []

    def forget(self, sequence):
        pass


class World:
    """A model with adapters, requests of every kind, and what each gives alone."""

    def __init__(self, root: Path) -> None:
        checkpoint = tiny_checkpoint.save_llama(root / "tiny", initializer_range=0.2, max_position_embeddings=1024)
        adapters_made.make(checkpoint, root / "plain", 1, r=4)
        adapters_made.make(checkpoint, root / "dora", 2, r=8, use_dora=True)
        adapters_made.make(checkpoint, root / "words", 3, r=3, target_modules=["embed_tokens", "lm_head", "q_proj"])
        loaded = engines.load(resolve(str(checkpoint)), deterministic=True)
        self.loaded, self.settings = loaded, loaded.settings
        options = EngineOptions(model="tiny", max_loras=2, max_lora_rank=8)
        self.adapters = Adapters.around(loaded.model, options, self.settings)
        for name in ("plain", "dora", "words"):
            shelf = self.adapters.shelf
            shelf.put(name, shelf.read(root / name).result(), root / name)
        self.requests = self._requests(random.Random(0))
        self.alone: dict[str, dict[int, torch.Tensor]] = {}
        self.answers: dict[str, tuple[list[int], list[float]]] = {}
        for request in self.requests:
            engine, recorder = self.engine(num_blocks=600, max_num_batched_tokens=2048, prefix_caching=False)
            output = engines.run(engine, request)[request.id]
            assert output.finish.reason == "length", output.finish
            self.alone[request.id] = {position: row for (_, position), row in recorder.logits.items()}
            self.answers[request.id] = (output.token_ids, [each.logprob for each in output.logprobs])

    @staticmethod
    def _requests(rng: random.Random) -> list[Request]:
        """Prompts that begin alike and differ, of one row to more than a matrix product takes at once; images."""
        base = [rng.randrange(10, 190) for _ in range(800)]
        prompts = [([*base[:length], rng.randrange(10, 190)], None) for length in (0, 6, 15, 33, 64, 100, 150)]
        prompts += [(base[:444], None)]
        for seed, layout in enumerate([(9, (1, 3, 3), 4), ((1, 4, 4), 2), (20, (1, 2, 3), 3, (1, 5, 5), 1)]):
            made = image_cases.prompt(*layout, seed=seed)
            prompts.append((made.token_ids, pack_features(made.features())))
        requests: list[Request] = []
        for number, (ids, features) in enumerate(prompts):
            for uses in dict.fromkeys(USES):
                params = SamplingParams(
                    temperature=rng.choice([0.0, 0.8]), seed=number, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0
                )
                name = f"{number}-{'+'.join(use for use, _ in uses)}"
                requests += choices_of(name, ids, params, 0.0, adapters=uses, features=features)
        return requests

    def engine(self, num_blocks: int, **limits) -> tuple[EngineCore, Recorder]:
        settings = replace(
            self.settings, num_blocks=num_blocks, limits=replace(self.settings.limits, block_size=BLOCK, **limits)
        )
        core = compose(settings, self.loaded.model, self.loaded.fingerprint, self.adapters)
        recorder = Recorder(self.loaded.model)
        core._runner._heads = [*core._runner._heads, recorder]
        return core, recorder


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("deterministic"))


@pytest.mark.parametrize("seed", range(4))
def test_logits_are_those_of_the_request_alone_whatever_the_schedule(world, seed):
    """Batch sizes, chunk sizes, prefix hits, preemptions, adapters that take turns, images, requests that leave."""
    rng = random.Random(seed)
    num_hits = num_preempted = num_rows = 0
    for _ in range(NUM_SCHEDULES):
        tokens = rng.choice([6, 17, 64, 200, 1024])
        few = [request for request in world.requests if len(request.prompt_token_ids) < 8 * tokens]
        asked = rng.sample(few, rng.randint(2, 7))
        most = max(len(request.prompt_token_ids) + NUM_TOKENS for request in asked) // BLOCK + 1
        num_blocks = rng.choice([most + 1, most + 8, 600])
        engine, recorder = world.engine(num_blocks, max_num_seqs=rng.randint(2, 6), max_num_batched_tokens=tokens)
        waiting, outputs = list(asked), {request.id: ([], []) for request in asked}
        leaving = rng.choice(asked).id if rng.random() < 0.2 else None
        while waiting or engine.has_work:
            while waiting and rng.random() < 0.6:
                engine.add(waiting.pop())
            for output in engine.step():
                outputs[output.request_id][0].extend(output.token_ids)
                outputs[output.request_id][1].extend(each.logprob for each in output.logprobs or [])
                num_hits += bool(output.num_cached_tokens)
            if leaving is not None and outputs[leaving][0]:
                engine.abort(leaving)
                leaving = None
        num_preempted += engine.stats.num_preempted
        for (name, position), row in recorder.logits.items():
            assert torch.equal(row, world.alone[name][position]), f"{name}: logits at position {position} differ"
        for name, (tokens_out, logprobs) in outputs.items():
            whole = world.answers[name]
            assert tokens_out == whole[0][: len(tokens_out)]
            assert logprobs == whole[1][: len(logprobs)]
        num_rows += len(recorder.logits)
    assert num_hits > NUM_SCHEDULES // 8
    assert num_preempted > NUM_SCHEDULES // 8
    assert num_rows > 100 * NUM_SCHEDULES


@pytest.mark.parametrize(
    "options",
    [{"kernels": "reference"}, {"dtype": "bf16"}, {"pack_weights": True}],
    ids=lambda given: next(iter(given)),
)
def test_what_cannot_be_deterministic_is_refused(world, options, tmp_path):
    with pytest.raises(OptionError, match="--deterministic"):
        engines.load(resolve(str(tiny_checkpoint.save_llama(tmp_path))), deterministic=True, **options)
