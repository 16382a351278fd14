"""`izh bench embed` and `izh bench rerank` on tiny models, whole; whose turn it is; peers that are not there."""

import json
import sys
from pathlib import Path

import clocked
import encoders_made
import pytest
import tiny_checkpoint

from izh.bench import embed, pooling, rerank, served
from izh.bench.clients import ask_all
from izh.bench.options import EmbedBenchOptions, RerankBenchOptions
from izh.bench.peers.catalogue import Environments
from izh.bench.pooling import quantile, take_turns
from izh.bench.served import find_infinity, infinity_server, izh_server
from izh.bench.texts import MIXED, SHORT
from izh.config import EngineOptions, ServerOptions
from izh.errors import OptionError

# What the command `infinity_emb` is asked for, answered with vectors of ones.
INFINITY = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
assert sys.argv[1] == "v2", sys.argv
asked = dict(zip(sys.argv[2:], sys.argv[3:]))
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(b"{}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == asked["--served-model-name"]
        self.answer(json.dumps({"data": [{"embedding": [1.0] * 48}]}).encode())
assert asked["--dtype"] == "float32"
def cli():
    ThreadingHTTPServer((asked["--host"], int(asked["--port"])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench-pooling")
    tiny_checkpoint.save_llama(root / "tiny")
    encoders_made.save(root / "embedder", "bert")
    encoders_made.save(root / "reranker", "roberta", num_labels=1)
    return root


@pytest.fixture
def infinity(tmp_path: Path) -> str:
    """An interpreter that has an infinity_emb."""
    package = tmp_path / "infinity_emb"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cli.py").write_text(INFINITY)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def engine(folders: Path) -> EngineOptions:
    return EngineOptions(model=str(folders / "tiny"), kv_cache_gb=0.01, num_threads=1, device="cpu")


def test_embeddings_offline_and_over_http(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: Path, infinity: str
) -> None:
    options = EmbedBenchOptions(
        embedder=str(folders / "embedder"),
        sentences=6,
        requests=8,
        clients=3,
        repeats=1,
        infinity=infinity,
        json=str(tmp_path / "figures.json"),
    )
    assert embed.report(engine(folders), options) == 0
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [(each["way"], each["texts"], each["engine"]) for each in written["figures"]] == [
        ("offline", "short", "izh"),
        ("offline", "short", "sentence-transformers"),
        ("offline", "mixed", "izh"),
        ("offline", "mixed", "sentence-transformers"),
        ("HTTP", "mixed", "izh"),
        ("HTTP", "mixed", "Infinity"),
    ]
    *same, theirs = written["figures"]
    assert all(each["difference"] < 1e-4 for each in same)
    assert theirs["difference"] > 0.1, "vectors of ones are not izh's"
    assert all(0 < each["p50_s"] <= each["p99_s"] for each in written["figures"][4:])
    assert all(each["tokens"] > each["sentences"] > 0 for each in written["figures"])
    assert written["left_out"] == {}
    printed = capsys.readouterr().out
    assert "HTTP: 3 clients, one sentence a request" in printed
    assert printed.count("Infinity") == 1


def test_peers_that_are_not_there_are_named_with_the_way_to_get_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: Path
) -> None:
    monkeypatch.setattr(pooling, "find_spec", lambda name: None)
    monkeypatch.setattr(served, "Environments", lambda root: Environments(str(tmp_path)))
    python, why = find_infinity(None)
    assert python is None
    assert why is not None
    assert f"missing: cannot run {tmp_path}" in why
    assert why.endswith("izh bench peers --set-up infinity")
    python, why = find_infinity(sys.executable)
    assert python is None
    assert why is not None
    assert "No module named 'infinity_emb'" in why
    options = EmbedBenchOptions(embedder=str(folders / "embedder"), sentences=2, repeats=1, http=False)
    assert embed.report(engine(folders), options) == 0
    cells = [line.strip("│").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in cells] == ["izh", "sentence-transformers"] * 2
    assert cells[1][2].strip() == "-"


def test_reranks(capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: Path) -> None:
    options = RerankBenchOptions(
        reranker=str(folders / "reranker"), documents=5, repeats=2, num_threads=1, json=str(tmp_path / "figures.json")
    )
    assert rerank.report(options) == 0
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [(each["texts"], each["engine"]) for each in written["figures"]] == [
        ("short", "izh"),
        ("short", "CrossEncoder"),
        ("mixed", "izh"),
        ("mixed", "CrossEncoder"),
    ]
    assert all(each["difference"] < 1e-5 for each in written["figures"])
    assert "reranker fp32, 5 documents for a query" in capsys.readouterr().out


def test_turns_are_reversed_and_the_first_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked.install(monkeypatch)
    log: list[str] = []
    seconds = {"a": iter([9.0, 1.0, 3.0, 2.0]), "b": iter([9.0, 4.0, 4.0, 4.0])}

    def ask(name: str) -> int:
        log.append(name)
        clocked.Clocked.now += next(seconds[name])
        return len(log)

    timed = take_turns({"a": lambda: ask("a"), "b": lambda: ask("b")}, 3)
    assert "".join(log) == "ab" + "ab" + "ba" + "ab"
    assert [(speed.engine, speed.seconds, speed.spread) for speed, _ in timed] == [("a", 2.0, 2.0), ("b", 4.0, 0.0)]
    assert [answers for _, answers in timed] == [[1, 3, 6, 7], [2, 4, 5, 8]]


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.99, 10), (0.9, 9), (0.91, 10), (0.01, 1), (1.0, 10)])
def test_a_quantile_is_one_of_the_values(share: float, value: int) -> None:
    assert quantile([*range(10, 0, -1)], share) == value
    assert quantile([7.0], share) == 7.0


def test_sentences_are_the_same_at_every_run() -> None:
    assert SHORT.take(3) == SHORT.take(5)[:3] != SHORT.take(3, seed=1)
    lengths = [len(sentence.split()) for sentence in MIXED.take(500)]
    assert (min(lengths), max(lengths)) == (6, 80)


@pytest.mark.parametrize("field", ["sentences", "requests", "clients", "repeats"])
def test_impossible_options_are_refused(field: str) -> None:
    with pytest.raises(OptionError, match=f"--{field} must be at least 1, got 0"):
        embed.report(EngineOptions(), EmbedBenchOptions(**{field: 0}))


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(OptionError, match="no-such-model"),
        izh_server(EngineOptions(model=str(tmp_path / "no-such-model")), ServerOptions(port=0)),
    ):
        pytest.fail("it must not have started")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho it is broken; exit 3\n")
    broken.chmod(0o755)
    with (
        pytest.raises(OptionError, match="did not start; its log ends with: it is broken"),
        infinity_server(str(broken), tmp_path, 1),
    ):
        pytest.fail("it must not have started")


def test_an_answer_that_is_an_error_ends_the_load(infinity: str, tmp_path: Path) -> None:
    with infinity_server(infinity, tmp_path, 1) as url:
        load = ask_all(url, "/embeddings", [b'{"model": "model"}'] * 5, 2)
        assert len(load.latencies_s) == len(load.answers) == 5
        assert all(0 < wait_s <= load.seconds for wait_s in load.latencies_s)
        with pytest.raises(OSError, match="closed connection"):
            ask_all(url, "/embeddings", [b'{"model": "other"}'], 1)
