"""Many clients at once over HTTP, each asking again as soon as it is answered.

Owns: Client (one connection) and `ask_all` (many). Must not know: what is asked, what answers mean.

Threads with the standard library's client: the cheapest that there is in Python, so that what is measured is the
server's, also where both share the cores.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from urllib.parse import urlsplit

_TIMEOUT_S = 120


class Client:
    """One connection, kept open."""

    def __init__(self, url: str) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)

    def post(self, path: str, body: bytes) -> bytes:
        """The answer's body. Raises RuntimeError for a status other than 200."""
        return self.open(path, body).read()

    def open(self, path: str, body: bytes) -> HTTPResponse:
        """The answer, of which only the head is read."""
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{path}: status {answer.status}: {answer.read(500).decode(errors='replace')}")
        return answer

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients saw: seconds of the whole, and of each request, and the answers, in the order of the bodies."""

    seconds: float
    latencies_s: list[float]
    answers: list[bytes]


def ask_all(
    url: str, path: str, bodies: Sequence[bytes], clients: int, after: Callable[[], None] = lambda: None
) -> Load:
    """Ask for all bodies, `clients` of them at a time. Raises what the first client that failed met."""
    latencies_s, answers = [0.0] * len(bodies), [b""] * len(bodies)
    turn = itertools.count()
    failures: list[Exception] = []

    def work() -> None:
        client = Client(url)
        try:
            while not failures and (index := next(turn)) < len(bodies):
                asked_s = time.perf_counter()
                answers[index] = client.post(path, bodies[index])
                latencies_s[index] = time.perf_counter() - asked_s
                after()
        except Exception as error:
            failures.append(error)
        finally:
            client.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if failures:
        raise failures[0]
    return Load(seconds, latencies_s, answers)
