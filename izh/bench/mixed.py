"""`izh bench mixed`: all kinds of request at once for a minute, every answer compared with its lone answer.

Owns: the load, the comparison, the table. Must not know: how anything is answered.

A server in a process of its own, with a model, random adapters on it, an embedder and a reranker. First every question
is asked with nothing else going on; then clients of all kinds ask questions at random, each again as soon as it is
answered, for `seconds`. Greedy text, vectors and scores must be equal to the last character and bit. One that is not
makes the exit status 1.
"""

import json
import random
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from izh.bench.adapters import refuse_others, write_adapters
from izh.bench.clients import Client
from izh.bench.document import document, write
from izh.bench.options import MixedOptions, at_least_one
from izh.bench.pooling import quantile
from izh.bench.served import izh_server
from izh.bench.shapes import SHAPES
from izh.bench.texts import MIXED, SHORT
from izh.bench.timing import explicit
from izh.config import EngineOptions, ServerOptions
from izh.errors import OptionError
from izh.model.load import load_spec
from izh.model.source import resolve

_SHAPE = SHAPES["r16-all"]
_DOCUMENTS = 8
_CHAT, _ADAPTED, _EMBED, _RERANK = "chat streams", "adapters", "embeddings", "reranks"


@dataclass(frozen=True, slots=True)
class Question:
    """What is sent where."""

    path: str
    body: bytes


@dataclass(slots=True)
class Kind:
    """Questions of one kind, their lone answers, and what the clients saw."""

    questions: list[Question]
    clients: int
    lone: list[Any] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One kind of request. Times in seconds; those of first tokens are None where nothing is streamed."""

    kind: str
    clients: int
    requests: int
    different: int
    """Answers that were not the lone one."""
    p50_s: float
    p99_s: float
    first_p50_s: float | None
    first_p99_s: float | None


def report(engine: EngineOptions, options: MixedOptions) -> int:
    """Measure, print a table, write the JSON file if asked. Returns the exit status: 1 when an answer was not the lone
    one."""
    check(engine, options)
    engine = explicit(engine)
    source = resolve(engine.model, engine.revision)
    with tempfile.TemporaryDirectory(prefix="izh-bench-mixed-") as folder:
        directories = list(write_adapters(Path(folder), load_spec(source), _SHAPE, options.adapters))
        lora = tuple(f"{directory.name}={directory}" for directory in directories)
        engine = replace(engine, model=str(source.path), served_model_name=source.name, lora=lora)
        server = ServerOptions(port=0, embedder=options.embedder, reranker=options.reranker)
        kinds = kinds_of(options, source.name, [directory.name for directory in directories])
        with izh_server(engine, server) as url:
            ask_alone(url, kinds)
            load(url, kinds, options.seconds)
    found = [figure(name, kind) for name, kind in kinds.items() if kind.latencies_s]
    written = document(engine, source.name, options, found)
    Console().print(table(found, written))
    write(written, options.json)
    return 1 if any(each.different for each in found) else 0


def check(engine: EngineOptions, options: MixedOptions) -> None:
    """Raises OptionError for what cannot be measured."""
    at_least_one(options, "questions", "output_tokens", "adapters")
    for name in ("chats", "adapted", "embeds", "reranks"):
        if getattr(options, name) < 0:
            raise OptionError(f"--{name} must be at least 0, got {getattr(options, name)}")
    if options.chats + options.adapted + options.embeds + options.reranks == 0:
        raise OptionError("--chats, --adapted, --embeds and --reranks are all 0: there is nobody to ask")
    if options.seconds <= 0:
        raise OptionError(f"--seconds must be above 0, got {options.seconds:g}")
    refuse_others(engine)


def kinds_of(options: MixedOptions, model: str, adapters: Sequence[str]) -> dict[str, Kind]:
    """All that is asked."""
    count = options.questions

    def chats(models: Sequence[str], seed: int) -> list[Question]:
        bodies = [
            {
                "model": models[index % len(models)],
                "messages": [{"role": "user", "content": text}],
                "max_tokens": options.output_tokens,
                "temperature": 0,
                "stream": True,
            }
            for index, text in enumerate(MIXED.take(count, seed))
        ]
        return questions("/v1/chat/completions", bodies)

    embeds = [{"input": text, "truncate_prompt_tokens": -1} for text in MIXED.take(count, seed=3)]
    reranks = [
        {"query": query, "documents": MIXED.take(_DOCUMENTS, seed=index), "truncate_prompt_tokens": -1}
        for index, query in enumerate(SHORT.take(count, seed=4))
    ]
    return {
        _CHAT: Kind(chats([model], seed=1), options.chats),
        _ADAPTED: Kind(chats(adapters, seed=2), options.adapted),
        _EMBED: Kind(questions("/v1/embeddings", embeds), options.embeds),
        _RERANK: Kind(questions("/v1/rerank", reranks), options.reranks),
    }


def questions(path: str, bodies: Sequence[Any]) -> list[Question]:
    """One for each body."""
    return [Question(path, json.dumps(body).encode()) for body in bodies]


def ask_alone(url: str, kinds: Mapping[str, Kind]) -> None:
    """Each question by itself."""
    client = Client(url)
    with Console(stderr=True).status("asking each question alone"):
        for kind in kinds.values():
            if kind.clients:
                kind.lone = [ask(client, question)[0] for question in kind.questions]
    client.close()


def load(url: str, kinds: Mapping[str, Kind], seconds: float) -> None:
    """All clients at once. Raises what the first client that failed met."""
    until_s = time.perf_counter() + seconds
    failures: list[Exception] = []

    def work(kind: Kind, seed: int) -> None:
        source, client = random.Random(seed), Client(url)
        try:
            while not failures and time.perf_counter() < until_s:
                index = source.randrange(len(kind.questions))
                asked_s = time.perf_counter()
                answer, first_s = ask(client, kind.questions[index])
                kind.latencies_s.append(time.perf_counter() - asked_s)
                if first_s is not None:
                    kind.firsts_s.append(first_s - asked_s)
                if answer != kind.lone[index]:
                    kind.wrong.append(index)
        except Exception as error:
            failures.append(error)
        finally:
            client.close()

    clients = [kind for kind in kinds.values() for _ in range(kind.clients)]
    threads = [threading.Thread(target=work, args=(kind, seed), daemon=True) for seed, kind in enumerate(clients)]
    columns = (TextColumn("asking all at once"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=1) as bar:
        task = bar.add_task("", total=seconds)
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[-1].join(0.5)
            bar.update(task, completed=seconds - max(0.0, until_s - time.perf_counter()))
    if failures:
        raise failures[0]


def ask(client: Client, question: Question) -> tuple[Any, float | None]:
    """What is compared of the answer, and when its first token came."""
    if question.path != "/v1/chat/completions":
        answer = json.loads(client.post(question.path, question.body))
        return answer.get("data", answer.get("results")), None
    pieces, first_s = [], None
    for event in events(client.open(question.path, question.body)):
        (choice,) = event["choices"]
        if text := choice["delta"].get("content"):
            first_s = first_s or time.perf_counter()
            pieces.append(text)
        pieces.append(choice["finish_reason"] or "")
    return "".join(pieces), first_s


def events(lines: Iterable[bytes]) -> Iterator[Any]:
    """The objects of a stream of server-sent events."""
    for line in lines:
        data = line.removeprefix(b"data: ").strip()
        if data and data != b"[DONE]":
            yield json.loads(data)


def figure(name: str, kind: Kind) -> Figure:
    """What the clients of one kind saw."""
    return Figure(
        kind=name,
        clients=kind.clients,
        requests=len(kind.latencies_s),
        different=len(kind.wrong),
        p50_s=quantile(kind.latencies_s, 0.5),
        p99_s=quantile(kind.latencies_s, 0.99),
        first_p50_s=quantile(kind.firsts_s, 0.5) if kind.firsts_s else None,
        first_p99_s=quantile(kind.firsts_s, 0.99) if kind.firsts_s else None,
    )


def table(figures: Sequence[Figure], document: dict[str, Any]) -> Table:
    """One row for each kind."""
    options, machine = document["options"], document["machine"]
    out = Table(
        title=f"{document['model']} {document['dtype']}, all at once for {options['seconds']:g} s",
        caption=f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}; {document['date']}",
        pad_edge=False,
    )
    out.add_column("kind", no_wrap=True)
    for heading in ("clients", "answers", "not as\nalone", "p50", "p99", "first\np50", "token\np99"):
        out.add_column(heading, justify="right")
    for each in figures:
        times = (each.p50_s, each.p99_s, each.first_p50_s, each.first_p99_s)
        cells = ["" if seconds is None else _shown(seconds) for seconds in times]
        out.add_row(each.kind, str(each.clients), str(each.requests), str(each.different), *cells)
    return out


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
