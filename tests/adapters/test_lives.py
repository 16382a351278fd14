"""A thousand lives of requests with adapters, ended in every way: nothing is held afterwards, no answer was wrong."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import adapters_made
import engines
import pytest
import tiny_checkpoint

from izh.config import EngineOptions
from izh.engine.build import Adapters, compose
from izh.engine.control import Control
from izh.engine.messages import LoadAdapter, UnloadAdapter
from izh.model.source import resolve
from izh.request import Request, SamplingParams, choices_of

NUM_LIVES = 250
NAMES = ("a", "b", "c", "d")
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """tiny, v0 .. v4 (adapters), and broken."""
    root = tmp_path_factory.mktemp("lives")
    checkpoint = tiny_checkpoint.save_llama(root / "tiny", initializer_range=0.2)
    for seed in range(5):
        adapters_made.make(checkpoint, root / f"v{seed}", seed, r=4)
    shutil.copytree(root / "v0", root / "broken")
    (root / "broken" / "adapter_model.safetensors").write_bytes(b"no")
    return root


class World:
    """An engine with adapters, and a second one around the same model that tells what an answer should have been."""

    def __init__(self, folders: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.folders = folders
        loaded = engines.load(resolve(str(folders / "tiny")))
        options = EngineOptions(model="tiny", max_loras=rng.choice([1, 2, 3]), max_lora_rank=8)
        settings = replace(
            loaded.settings,
            num_blocks=rng.choice([24, 200]),
            # Room for two of the five versions: the others are read again whenever they are asked for.
            lora_host_bytes=2 * self._num_bytes(folders, loaded.model, options, loaded.settings) + 1000,
            limits=replace(loaded.settings.limits, max_num_seqs=8, max_num_batched_tokens=rng.choice([16, 64])),
        )
        self.adapters = Adapters.around(loaded.model, options, settings)
        self.core = compose(settings, loaded.model, loaded.fingerprint, self.adapters)
        self.control = Control(self.adapters.shelf)
        uncached = replace(settings, num_blocks=200, limits=replace(settings.limits, prefix_caching=False))
        self.judge = compose(uncached, loaded.model, loaded.fingerprint, self.adapters)
        self.prompts = [[rng.randrange(5, 300) for _ in range(rng.choice([1, 7, 16, 33, 60]))] for _ in range(5)]
        self.asked: dict[str, tuple[Request, tuple[tuple[str, float], ...] | None]] = {}
        self.ends: dict[str, list[str]] = {}
        self.tokens: dict[str, list[int]] = {}

    @staticmethod
    def _num_bytes(folders, model, options, settings):
        spare = Adapters.around(engines.load(resolve(str(folders / "tiny"))).model, options, settings)
        return spare.shelf.read(folders / "v0").result().num_bytes

    def live(self) -> list[str]:
        return [name for name in self.asked if name not in self.ends]

    def ask(self) -> None:
        rng = self.rng
        uses = rng.choice([(), (("a", 1.0),), (("b", 1.0),), (("c", 1.0),), (("d", 1.0),), (("a", 0.5), ("b", 2.0))])
        if rng.random() < 0.05:
            uses = (("unknown", 1.0),)
        params = SamplingParams(n=rng.choice([1, 1, 4]), temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        name = f"life{len(self.asked)}"
        for request in choices_of(name, rng.choice(self.prompts), params, float(len(self.asked)), adapters=uses):
            known = self.adapters.shelf.sources
            meant = (
                tuple((str(known[each]), scale) for each, scale in uses) if set(known) >= {u for u, _ in uses} else None
            )
            self.asked[request.id] = (request, meant)
            self.core.add(request)

    def command(self) -> None:
        rng = self.rng
        name = rng.choice(NAMES)
        if rng.random() < 0.2:
            self.control.add(UnloadAdapter(call_id=0, name=name))
        else:
            folder = self.folders / rng.choice(["broken", "nowhere", *(f"v{i}" for i in range(5))])
            self.control.add(LoadAdapter(call_id=0, name=name, directory=str(folder), replace=rng.random() < 0.8))

    def step(self) -> None:
        self.control.replies()
        run = self.core._runner.run
        if self.rng.random() < 0.01:
            self.core._runner.run = self._burn
        for output in self.core.step():
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                self.ends.setdefault(output.request_id, []).append(output.finish.reason)
        self.core._runner.run = run

    @staticmethod
    def _burn(plan):
        raise RuntimeError("the device caught fire")

    def expected(self, prompt: list[int], meant: tuple[tuple[str, float], ...]) -> list[int]:
        """The answer alone, on an engine that remembers nothing, with the weights from the directories meant."""
        for folder, _ in meant:
            name = f"judge {folder}"
            if name not in self.adapters.shelf.sources:
                self.adapters.shelf.put(name, self.adapters.shelf.read(Path(folder)).result(), Path(folder))
        request = engines.request("judged", prompt, max_tokens=NUM_TOKENS)
        fields = {field: getattr(request, field) for field in request.__struct_fields__}
        uses = tuple((f"judge {folder}", scale) for folder, scale in meant)
        return engines.run(self.judge, Request(**fields | {"adapters": uses}))["judged"].token_ids


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_nothing_is_held_and_no_answer_is_wrong(folders, seed):
    """250 requests each: refused, aborted while read, in the queue, in prefill and in decode, failed with their step,
    paused, preempted; while names are loaded, replaced, unloaded, and loads fail."""
    world = World(folders, seed)
    rng, gate = world.rng, world.adapters.gate
    for name in NAMES:
        folder = folders / f"v{NAMES.index(name)}"
        world.adapters.shelf.put(name, world.adapters.shelf.read(folder).result(), folder)
    num_lives = num_paused = 0
    while num_lives < NUM_LIVES or world.core.has_work or world.control.is_busy:
        kind = rng.random()
        if kind < 0.12 and num_lives < NUM_LIVES:
            world.ask()
            num_lives += 1
        elif kind < 0.15 and world.live():
            world.core.abort(rng.choice(world.live()))
        elif kind < 0.17 and num_lives < NUM_LIVES:
            world.command()
        else:
            world.step()
        num_paused += sum(lease.slot is None for lease in gate._leases.values())
        world.adapters.bank.slots.check()
    assert set(world.ends) == set(world.asked)
    assert all(len(reasons) == 1 for reasons in world.ends.values()), "each request ends exactly once"
    assert gate.num_live == 0
    assert world.adapters.bank.slots.num_holds == 0
    assert world.core.stats.kv_usage == 0.0
    world.core._scheduler.check()
    assert num_paused > 0
    reasons = [reason for (reason,) in world.ends.values()]
    assert {reason: reasons.count(reason) > 3 for reason in ("length", "abort", "error")} == dict.fromkeys(
        ("length", "abort", "error"), True
    )
    known: dict[tuple, list[int]] = {}
    for name, (request, meant) in world.asked.items():
        if world.ends[name] == ["length"]:
            assert meant is not None
            key = (tuple(request.prompt_token_ids), meant)
            if key not in known:
                known[key] = world.expected(request.prompt_token_ids, meant)
            assert world.tokens[name] == known[key]
    assert len(known) > 20
