"""The demo's embedder and reranker behind one server. The pages quoted are of a package that training left out."""

import httpx
import pytest
from fake_engine import FakeEngine
from serving import serving

PAGES = {  # one-line description -> how the page's DESCRIPTION begins
    "report or omit repeated lines": "Filter adjacent matching lines from INPUT (or standard input), writing to OUTPUT "
    "(or standard output). With no options, matching lines are merged to the first occurrence.",
    "concatenate and print files in reverse": "Write each FILE to standard output, last line first. With no FILE, or "
    "when FILE is -, read standard input.",
    "remove sections from each line of files": "Print selected parts of lines from each FILE to standard output. With "
    "no FILE, or when FILE is -, read standard input.",
    "output the last part of files": "Print the last 10 lines of each FILE to standard output. With more than one "
    "FILE, precede each with a header giving the file name.",
    "generate random permutations": "Write a random permutation of the input lines to standard output. With no FILE, "
    "or when FILE is -, read standard input.",
    "run a program with modified scheduling priority": "Run COMMAND with an adjusted niceness, which affects process "
    "scheduling. With no COMMAND, print the current niceness.",
    "run a command with a time limit": "Start COMMAND, and kill it if still running after DURATION.",
}
MISSED = ("concatenate and print files in reverse", "run a command with a time limit")
"""Whose pages come second: it is a small model."""


@pytest.fixture(scope="module")
def http():
    with (
        serving(FakeEngine(), embedder="demo", reranker="demo") as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def test_both_are_listed_by_what_they_do(http) -> None:
    tasks = {model["id"]: model["tasks"] for model in http.get("/v1/models").json()["data"]}
    assert tasks["minilm-embed"] == ["embed"]
    assert tasks["minilm-rerank"] == ["rerank"]


@pytest.mark.parametrize("query", [query for query in PAGES if query not in MISSED])
def test_the_right_page_comes_first(http, query) -> None:
    documents = list(PAGES.values())
    body = {"model": "minilm-rerank", "query": query, "documents": documents}
    results = http.post("/v1/rerank", json=body).json()["results"]
    assert results[0]["document"]["text"] == PAGES[query]
    assert sorted(result["index"] for result in results) == list(range(len(documents)))
    assert all(0 < result["relevance_score"] < 1 for result in results)
