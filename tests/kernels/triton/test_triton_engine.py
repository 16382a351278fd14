"""Triton's table under a whole engine and under a bank used by hand: the same answers as the reference's."""

from pathlib import Path

import adapters_made
import engines
import pytest
import tiny_checkpoint
import torch
from msgspec.structs import replace
from torch import nn

from izh.adapters import AdapterBank
from izh.config import EngineOptions
from izh.engine.build import build
from izh.kernels.triton import lora
from izh.model.source import resolve
from izh.request import Output

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_whole_engine_gives_the_tokens_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt long enough for tiles, then single rows, of adapters of different ranks and targets, beside the base."""
    checkpoint = tiny_checkpoint.save_llama(tmp_path / "model", num_hidden_layers=1, initializer_range=0.2)
    adapters_made.make(checkpoint, tmp_path / "all", 1, r=8)
    adapters_made.make(checkpoint, tmp_path / "two", 2, r=3, target_modules=["q_proj", "down_proj"])
    paths = {"by_rows": 0, "by_tiles": 0}
    for name in paths:

        def counted(*args: object, name: str = name, run: object = getattr(lora, f"_{name}")) -> None:
            paths[name] += 1
            run(*args)

        monkeypatch.setattr(lora, f"_{name}", counted)

    def outputs(kernels: str) -> dict[str, Output]:
        options = EngineOptions(
            model=str(checkpoint),
            lora=(f"all={tmp_path / 'all'}", f"two={tmp_path / 'two'}"),
            kernels=kernels,
            device=DEVICE,
            dtype="fp32",
            kv_cache_gb=0.01,
        )
        core = build(options, resolve(str(checkpoint)), quiet=True).core
        requests = [
            engines.request(name, list(range(5, 5 + length)), max_tokens=5, logprobs=0)
            for name, length in (("all", 36), ("two", 3), ("base", 4))
        ]
        adapted = [replace(each, adapters=() if each.id == "base" else ((each.id, 1.0),)) for each in requests]
        return engines.run(core, *adapted)

    got = outputs("triton")
    assert min(paths.values()) > 0
    counts = dict(paths)
    expected = outputs("reference")
    assert paths == counts
    assert len({tuple(output.token_ids) for output in expected.values()}) == 3
    for name, output in expected.items():
        assert got[name].token_ids == output.token_ids, name
        for mine, reference in zip(got[name].logprobs, output.logprobs, strict=True):
            assert mine.logprob == pytest.approx(reference.logprob, abs=1e-4)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x)


@torch.inference_mode()
def test_a_bank_by_hand() -> None:
    torch.manual_seed(0)
    model = Flat().to(DEVICE)
    plain = model.q_proj
    bank = AdapterBank(model, capacity=2, max_rank=8, targets=["q_proj"], backend="triton")
    made = {name: (torch.randn(rank, 24), torch.randn(40, rank)) for name, rank in (("one", 8), ("two", 3))}
    slots = {name: bank.load(name, {"q_proj": weights}, alpha=4) for name, weights in made.items()}
    x = torch.randn(5, 24, device=DEVICE)
    bank.activate([slots["one"], -1, slots["two"], slots["two"], slots["one"]])
    y, base = model(x), plain(x)
    assert torch.equal(y[1], base[1])
    for rows, name in (([0, 4], "one"), ([2, 3], "two")):
        a, b = (tensor.to(DEVICE) for tensor in made[name])
        torch.testing.assert_close(y[rows], base[rows] + 4 / len(a) * (x[rows] @ a.T @ b.T), rtol=2e-5, atol=2e-5)
