"""Engine outputs to user outputs.

Owns: OutputProcessor: per choice the detokenizer and the stop strings, per request which choices still live; which
requests are pooled.
Must not know: the engine, queues, HTTP. One thread calls it: the one that reads the engine's outputs.
Invariant: the RequestOutputs of a request, added up, are the unstreamed answer; exactly one of them is `finished`,
unless the request is aborted or fails. Nothing is kept of a request after its end.

    engine choice "ID/0" --+
    engine choice "ID/1" --+--> one RequestOutput of ID per call, with the choices that moved
    pooled prompt "ID/0" -----> one PoolingOutput of ID, at its end
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from izh.errors import RequestError
from izh.outputs import CompletionOutput, PoolingOutput, RequestOutput
from izh.request import Finish, Output, SamplingParams
from izh.text.detokenizer import Detokenizer, detokenizer
from izh.text.stopping import StopStrings
from izh.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Processed:
    """What a list of engine outputs came to.

    `ready`: one delta per request that moved. `pooled`: the requests whose vector is there. `abort`: engine ids that
    nobody waits for any more and that the engine still runs. `failed`: user requests of which a choice ended in an
    error; all of each request is forgotten.
    """

    ready: list[RequestOutput] = field(default_factory=list)
    pooled: list[PoolingOutput] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)
    failed: list[tuple[str, Finish]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Request:
    id: str
    prompt_token_ids: list[int]
    prompt: str | None
    params: SamplingParams
    live: dict[str, "_Choice"] = field(default_factory=dict)  # by engine id
    has_started: bool = False  # num_cached_tokens is told
    has_prompt_logprobs: bool = False  # they are told


@dataclass(slots=True, eq=False)
class _Choice:
    index: int
    request: _Request
    text: Detokenizer
    stops: StopStrings | None
    num_tokens: int = 0


class OutputProcessor:
    """Turns what engine steps add to choices into what users receive of requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = tokenizer.pieces
        self._requests: dict[str, _Request] = {}
        self._choices: dict[str, _Choice] = {}
        self._pooled: dict[str, list[int]] = {}  # engine id -> prompt token ids

    def __len__(self) -> int:
        """User requests not yet ended."""
        return len(self._requests) + len(self._pooled)

    def add(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, prompt: str | None = None
    ) -> None:
        """Expect outputs of the choices "ID/0" .. "ID/n-1". Raises RequestError when the id is in use."""
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use by a request that has not ended", "request_id")
        request = _Request(request_id, prompt_token_ids, prompt, params)
        for index in range(params.n):
            request.live[f"{request_id}/{index}"] = _Choice(
                index,
                request,
                detokenizer(self._pieces, prompt_token_ids, params.skip_special_tokens),
                StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None,
            )
        self._requests[request_id] = request
        self._choices.update(request.live)

    def add_pooled(self, request_id: str, prompt_token_ids: list[int]) -> None:
        """Expect the one output of the pooled prompt "ID/0"."""
        self._pooled[f"{request_id}/0"] = prompt_token_ids

    def abort(self, request_id: str) -> list[str]:
        """Forget a request; returns the engine ids that still run for it. An unknown id has none."""
        if self._pooled.pop(f"{request_id}/0", None) is not None:
            return [f"{request_id}/0"]
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        for engine_id in request.live:
            del self._choices[engine_id]
        return list(request.live)

    def process(self, outputs: Iterable[Output]) -> Processed:
        """Take in the outputs of one or more steps. Outputs of unknown choices (ended, aborted) are ignored."""
        done = Processed()
        ready: dict[str, RequestOutput] = {}
        for output in outputs:
            if (prompt := self._pooled.pop(output.request_id, None)) is not None:
                _conclude(done, output, prompt)
                continue
            choice = self._choices.get(output.request_id)
            if choice is None:
                continue
            request = choice.request
            if output.finish is not None and output.finish.reason == "error":
                self._end(output.request_id, request)
                done.abort += self.abort(request.id)
                done.failed.append((request.id, output.finish))
                ready.pop(request.id, None)
                continue
            completion = self._completion(choice, output)
            if completion.finish_reason is not None:
                self._end(output.request_id, request)
                if output.finish is None:
                    done.abort.append(output.request_id)
            delta = self._delta(request, completion, output)
            if request.id in ready:
                ready[request.id].add(delta)
            else:
                ready[request.id] = delta
        done.ready = list(ready.values())
        return done

    def _end(self, engine_id: str, request: _Request) -> None:
        """Forget a choice, and its request with the last one."""
        del self._choices[engine_id]
        del request.live[engine_id]
        if not request.live:
            del self._requests[request.id]

    def _delta(self, request: _Request, completion: CompletionOutput, output: Output) -> RequestOutput:
        """What the output adds to its request. Each choice reports on the prompt; the first report is passed on."""
        num_cached_tokens = 0 if request.has_started else output.num_cached_tokens
        prompt_logprobs = None if request.has_prompt_logprobs else output.prompt_logprobs
        request.has_started = True
        request.has_prompt_logprobs = request.has_prompt_logprobs or prompt_logprobs is not None
        return RequestOutput(
            request_id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=not request.live,
            prompt=request.prompt,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached_tokens,
        )

    def _completion(self, choice: _Choice, output: Output) -> CompletionOutput:
        """What the output adds to the choice, cut where a stop string ends it."""
        text, num_tokens, stop = _advance(choice, output)
        completion = CompletionOutput(choice.index, text, output.token_ids, output.logprobs)
        if stop is not None:
            completion.token_ids = output.token_ids[:num_tokens]
            completion.logprobs = output.logprobs[:num_tokens] if output.logprobs is not None else None
            completion.finish_reason, completion.stop_reason = "stop", stop
        elif output.finish is not None:
            completion.finish_reason, completion.stop_reason = output.finish.reason, output.finish.stop_reason
        return completion


def _conclude(done: Processed, output: Output, prompt_token_ids: list[int]) -> None:
    """The end of a pooled prompt."""
    request_id = output.request_id.rpartition("/")[0]
    if output.pooled is None:
        assert output.finish is not None
        done.failed.append((request_id, output.finish))
        return
    vector = np.frombuffer(output.pooled, "<f4")
    done.pooled.append(PoolingOutput(request_id, prompt_token_ids, vector, output.num_cached_tokens))


def _advance(choice: _Choice, output: Output) -> tuple[str, int, str | None]:
    """Feed the output's tokens; returns the new text, the number of tokens used, and the stop string that ended it.

    The token that made the engine stop (end-of-sequence, or a stop id) has no text, unless asked for.
    """
    token_ids, finish, params, stops = output.token_ids, output.finish, choice.request.params, choice.stops
    if finish is not None and finish.reason == "stop" and not params.include_stop_str_in_output:
        visible = token_ids[:-1]
    else:
        visible = token_ids
    if stops is None:
        choice.num_tokens += len(token_ids)
        text = choice.text.push(visible)
        return (text if finish is None else text + choice.text.flush()), len(token_ids), None
    out: list[str] = []
    for num_used, token_id in enumerate(visible, start=1):
        choice.num_tokens += 1
        out.append(stops.push(choice.text.push((token_id,)), active=choice.num_tokens >= params.min_tokens))
        if stops.matched is not None:
            return "".join(out), num_used, stops.matched
    if finish is not None:
        choice.num_tokens += len(token_ids) - len(visible)
        out.append(stops.push(choice.text.flush(), active=choice.num_tokens >= params.min_tokens))
        out.append(stops.flush())
    return "".join(out), len(token_ids), stops.matched
