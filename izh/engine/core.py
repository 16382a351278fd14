"""The engine: requests in, outputs out, one synchronous step at a time.

Owns: a request's way through admission, steps and its single end.
Must not know: which features exist (it holds gates and heads), processes, text.
Invariant: every request given to `add` gets exactly one Output with `finish` set, whatever happens to it.

    add -> Gate.prepare -> arriving -> Gate.open, length check -> Scheduler
    step -> plan -> run -> commit -> outputs
"""

import logging
from collections.abc import Sequence as Many
from concurrent.futures import Future, wait
from typing import Any

from izh.errors import ContextLengthError, RequestError
from izh.request import EngineStats, Finish, Output, Request, SamplingParams
from izh.runner.runner import Runner
from izh.schedule.scheduler import Scheduler
from izh.seams import Gate, Head, Result
from izh.sequence import Plan, Sequence

log = logging.getLogger("izh.engine")

_ARRIVAL_WAIT_S = 0.005


class EngineCore:
    """Built by `engine/build.py`. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        gates: Many[Gate],
        heads: Many[Head],
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._scheduler = scheduler
        self._runner = runner
        self._gates = gates
        self._heads = heads
        self._outbox: list[Output] = []  # ends that happened between steps
        self._arriving: dict[str, tuple[Sequence, list[Future[Any]]]] = {}  # prepared, and what each waits for

    @property
    def has_work(self) -> bool:
        """True while a request is live or an output has not been handed out."""
        return bool(self._outbox or self._arriving) or self._scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        counts = self._scheduler.counts
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting + len(self._arriving),
            kv_usage=self._scheduler.kv_usage,
            prefix_query_tokens=counts.prefix_query_tokens,
            prefix_hit_tokens=counts.prefix_hit_tokens,
            num_preempted=counts.num_preempted,
        )

    def add(self, request: Request) -> None:
        """Admit a request, at once or as soon as all is there that it needs. One that is refused ends with an error
        Output from a later step."""
        sequence = Sequence(request)
        prepared: list[Gate] = []
        missing: list[Future[Any]] = []
        try:
            if self._scheduler.get(request.id) is not None or request.id in self._arriving:
                raise RequestError(f"a request with id {request.id!r} is already running", "request_id")
            self._check_prompt(sequence)
            for gate in self._gates:
                future = gate.prepare(sequence)
                prepared.append(gate)
                if future is not None:
                    missing.append(future)
        except RequestError as error:
            self._refuse(sequence, prepared, error)
            return
        if missing:
            self._arriving[request.id] = (sequence, missing)
        else:
            self._admit(sequence)

    def abort(self, request_id: str) -> None:
        """End a live request; an id that is not live is no error (it may just have finished)."""
        if request_id in self._arriving:
            sequence, _missing = self._arriving.pop(request_id)
            for gate in self._gates:
                gate.close(sequence)
        elif (found := self._scheduler.get(request_id)) is not None:
            self._end(found)
        else:
            return
        self._outbox.append(Output(request_id=request_id, finish=Finish(reason="abort")))

    def step(self) -> list[Output]:
        """Run one step. A step that fails ends its own sequences and no others. With nothing to run but arrivals to
        wait for, it waits a moment."""
        if self._arriving and not (self._outbox or self._scheduler.has_work):
            wait([future for _, missing in self._arriving.values() for future in missing], _ARRIVAL_WAIT_S)
        for sequence, missing in tuple(self._arriving.values()):
            if all(future.done() for future in missing):
                del self._arriving[sequence.id]
                self._admit(sequence)
        outputs, self._outbox = self._outbox, []
        plan = self._scheduler.plan()
        if plan.chunks:
            outputs += self._run(plan)
        return outputs

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is reused by later requests."""
        self._scheduler.reset_prefix_cache()

    def _admit(self, sequence: Sequence) -> None:
        try:
            for gate in self._gates:
                gate.open(sequence)
            self._check_length(sequence)
        except RequestError as error:
            self._refuse(sequence, self._gates, error)
            return
        sequence.num_prompt = sequence.num_tokens  # a gate may have expanded the prompt
        self._scheduler.add(sequence)

    def _refuse(self, sequence: Sequence, gates: Many[Gate], error: RequestError) -> None:
        for gate in gates:
            gate.close(sequence)
        finish = Finish(reason="error", error=error.message, param=error.param, kind=type(error).__name__)
        self._outbox.append(Output(request_id=sequence.id, finish=finish))

    def _run(self, plan: Plan) -> list[Output]:
        try:
            results = self._runner.run(plan)
        except Exception as error:
            log.exception("step of %d sequences, %d tokens failed", len(plan.chunks), plan.num_tokens)
            finish = Finish(reason="error", error=f"the step failed: {error}", kind="IzhError")
            results = [Result(chunk.sequence, finish=finish) for chunk in plan.chunks]
        else:
            self._scheduler.commit(plan)
        return [self._apply(result) for result in results]

    def _apply(self, result: Result) -> Output:
        sequence = result.sequence
        sequence.token_ids += result.token_ids
        output = Output(
            request_id=sequence.id,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
            pooled=result.pooled,
            finish=result.finish,
        )
        if sequence.num_generated == len(result.token_ids):  # its first output
            assert sequence.first_scheduled_s is not None
            output.queue_s = sequence.first_scheduled_s - sequence.request.arrival_s
            output.num_cached_tokens = sequence.num_reused
        if result.finish is not None:
            self._end(sequence)
        return output

    def _end(self, sequence: Sequence) -> None:
        self._scheduler.close(sequence)
        for head in self._heads:
            head.forget(sequence)

    def _check_prompt(self, sequence: Sequence) -> None:
        if not sequence.token_ids:
            raise RequestError("the prompt is empty: at least one token is needed", "prompt")
        low, high = min(sequence.token_ids), max(sequence.token_ids)
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise RequestError(f"prompt has token id {wrong}; the vocabulary is 0..{self.vocab_size - 1}", "prompt")

    def _check_length(self, sequence: Sequence) -> None:
        """The prompt and the answer it asks for must fit the context; without max_tokens one token must."""
        num_prompt, limit, params = sequence.num_tokens, self.max_model_len, sequence.request.params
        if num_prompt + params.room <= limit:
            return
        if isinstance(params, SamplingParams):
            answer = (
                f"max_tokens {params.max_tokens}" if params.max_tokens is not None else "at least 1 token of answer"
            )
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and with {answer} exceeds the context of {limit} tokens; "
                "shorten the prompt or lower max_tokens",
                "max_tokens" if num_prompt < limit else "prompt",
            )
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and exceeds the context of {limit} tokens; shorten the prompt",
            "prompt",
        )
