"""`izh bench mixed` for a second, on tiny models: every kind is asked, and an answer that differs is found."""

import json
from pathlib import Path

import encoders_made
import pytest
import tiny_checkpoint

from izh.bench import mixed
from izh.bench.mixed import Kind, Question, check, events, figure
from izh.bench.options import MixedOptions
from izh.config import EngineOptions
from izh.errors import OptionError


def test_all_kinds_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_checkpoint.save_llama(tmp_path / "tiny", max_position_embeddings=1024)
    encoders_made.save(tmp_path / "embedder", "bert")
    encoders_made.save(tmp_path / "reranker", "roberta", num_labels=1)
    options = MixedOptions(
        seconds=1.5,
        chats=2,
        adapted=2,
        embeds=2,
        reranks=1,
        adapters=2,
        questions=3,
        output_tokens=6,
        embedder=str(tmp_path / "embedder"),
        reranker=str(tmp_path / "reranker"),
        json=str(tmp_path / "figures.json"),
    )
    engine = EngineOptions(model=str(tmp_path / "tiny"), kv_cache_gb=0.02, num_threads=1)
    asked: dict[str, Kind] = {}
    load = mixed.load

    def spoiled(url: str, kinds: dict[str, Kind], seconds: float) -> None:
        """The load, then the same with one lone answer that no request can give."""
        load(url, kinds, seconds)
        asked.update(kinds)
        assert {name: kind.wrong for name, kind in kinds.items()} == {name: [] for name in kinds}
        kinds["embeddings"].lone[1] = []
        load(url, {"embeddings": kinds["embeddings"]}, 0.5)

    monkeypatch.setattr(mixed, "load", spoiled)
    assert mixed.report(engine, options) == 1
    assert len({kind.lone[0] for name, kind in asked.items() if name in ("chat streams", "adapters")}) == 2
    assert set(asked["embeddings"].wrong) == {1}
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [each["kind"] for each in written["figures"]] == ["chat streams", "adapters", "embeddings", "reranks"]
    assert [each["different"] > 0 for each in written["figures"]] == [False, False, True, False]
    for each in written["figures"]:
        assert each["requests"] >= each["clients"] > 0
        assert 0 < each["p50_s"] <= each["p99_s"]
        assert (each["first_p50_s"] is not None) == (each["kind"] in ("chat streams", "adapters"))
    assert "all at once for 1.5 s" in capsys.readouterr().out


def test_events_of_a_stream() -> None:
    lines = [b'data: {"a": 1}\n', b"\n", b'data: {"a": 2}\n', b"\n", b"data: [DONE]\n", b"\n"]
    assert list(events(lines)) == [{"a": 1}, {"a": 2}]


def test_a_figure_counts_answers_that_differ() -> None:
    kind = Kind([Question("/", b"")], 2, latencies_s=[0.1, 0.3, 0.2], wrong=[0, 0])
    made = figure("embeddings", kind)
    assert (made.requests, made.different, made.p50_s, made.p99_s) == (3, 2, 0.2, 0.3)
    assert made.first_p50_s is None


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"questions": 0}, "--questions must be at least 1, got 0"),
        ({"chats": -1}, "--chats must be at least 0, got -1"),
        ({"seconds": 0}, "--seconds must be above 0, got 0"),
        ({"chats": 0, "adapted": 0, "embeds": 0, "reranks": 0}, "there is nobody to ask"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, float], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        check(EngineOptions(), MixedOptions(**options))
    with pytest.raises(OptionError, match="--lora is not for this command"):
        check(EngineOptions(lora=("a=b",)), MixedOptions())
