"""What is asked and what comes back: the vocabulary that crosses the process queue.

Owns: SamplingParams, PoolingParams and Request (frozen, what was asked); Output and Finish (what the engine says of a
request after a step). All are msgspec structs, so that they travel as msgpack.
Must not know: torch, the tokenizer, HTTP.
Invariant: every request that enters ends with exactly one Output whose `finish` is set.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec

from izh.errors import RequestError

MAX_LOGPROBS = 20
"""Most alternatives per position that `logprobs` may ask for (the OpenAI API's limit)."""


def _require(condition: bool, param: str, value: Any, limit: str) -> None:
    if not condition:
        raise RequestError(f"{param} must be {limit}, got {value!r}", param)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="sampling"):
    """How to choose each next token, and when to stop.

    temperature 0 is greedy. top_k 0 means all. `repetition_penalty` counts prompt and answer, `presence_penalty` and
    `frequency_penalty` the answer only (as vLLM and the OpenAI API do). `max_tokens=None`: up to the context's end.
    `logprobs=k` reports the chosen token and the k most likely, from the distribution before temperature and filters;
    0 reports the chosen token alone. A request with a seed draws the same tokens whatever runs beside it; choice i of
    `n` draws from stream (seed, i).

    Raises RequestError (a ValueError) naming the field, the value and the limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        set_field = msgspec.structs.force_setattr
        if isinstance(self.stop, str):
            set_field(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value: Iterable[Any] | None = getattr(self, name)
            set_field(self, name, tuple(value or ()))
        if self.top_k == -1:  # vLLM's spelling of "all"
            set_field(self, "top_k", 0)
        _require(1 <= self.n <= 128, "n", self.n, "between 1 and 128")
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value_ = getattr(self, name)
            _require(math.isfinite(value_) and low <= value_ <= high, name, value_, f"between {low:g} and {high:g}")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 means all)")
        penalty = self.repetition_penalty
        _require(math.isfinite(penalty) and penalty > 0.0, "repetition_penalty", penalty, "above 0")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None:
            _require(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens ({self.max_tokens})",
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or 0 <= count <= MAX_LOGPROBS, name, count, f"between 0 and {MAX_LOGPROBS}")
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        _require(len(self.stop) <= 16, "stop", len(self.stop), "at most 16 strings")
        _require(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "non-empty strings")
        _require(
            all(isinstance(i, int) for i in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "integers"
        )
        for token, bias in (self.logit_bias or {}).items():
            _require(
                math.isfinite(bias) and -100 <= bias <= 100,
                "logit_bias",
                {token: bias},
                "between -100 and 100 for each token",
            )

    @property
    def needs_every_row(self) -> bool:
        """True when each prompt position must be computed, so that no prefix hit may be read."""
        return self.prompt_logprobs is not None

    @property
    def room(self) -> int:
        """Tokens that the context must hold beside the prompt."""
        return self.max_tokens or 1


PoolingMode = Literal["last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean"]
POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pooling"):
    """What to make of a prompt's hidden rows, where no answer is wanted: one float32 vector.

    `mode` is over the tokens from number `skip` on (an instruction's are left out): "last", "cls" (the first), "mean",
    "max", "mean_sqrt_len" (the sum over the square root of their number), "weighted_mean" (by place, 1 for the
    prompt's first token). `normalize` makes the vector's length 1. With `logit_ids` the LM head's logits of these
    tokens, after the last one of the prompt, take the vector's place, as they are.

    Raises RequestError (a ValueError) naming the field, the value and the limit.
    """

    mode: PoolingMode = "last"
    normalize: bool = True
    skip: int = 0
    logit_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(self.mode in POOLING_MODES, "mode", self.mode, f"one of {', '.join(POOLING_MODES)}")
        _require(self.skip >= 0, "skip", self.skip, "at least 0")
        _require(all(isinstance(i, int) for i in self.logit_ids), "logit_ids", self.logit_ids, "integers")
        _require(not self.logit_ids or self.mode == "last", "mode", self.mode, "last where logit_ids are asked for")

    @property
    def needs_every_row(self) -> bool:
        """True when each prompt position must be computed, so that no prefix hit may be read."""
        return self.mode != "last"

    def skipping(self, num_tokens: int) -> "PoolingParams":
        """The same, of the tokens from this number on."""
        return msgspec.structs.replace(self, skip=num_tokens)

    @property
    def room(self) -> int:
        """Tokens that the context must hold beside the prompt."""
        return 0


class PackedFeatures(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """The images of a prompt on their way to the engine; `izh.multimodal.travel` packs them and checks them there.

    Numbers are little-endian and in C order: `rows` float32 [R, width] with the projected rows, `places` int64 [R]
    with the prompt positions that they belong to, `positions` int64 [3, T] with the rotary coordinates. `sections` is
    None for a model with one position axis.
    """

    width: int
    rows: bytes
    places: bytes
    positions: bytes
    delta: int
    sections: tuple[int, int, int] | None


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one user request, as the engine gets it.

    A user request with n choices becomes n Requests with ids "ID/0" .. "ID/n-1" and the same prompt; `choice` tells
    them apart in the random stream. `adapters` are names and scales of LoRA adapters, summed; none is the base model.
    `arrival_s` is on the system's monotonic clock. Lower `priority` runs first. Choices share one `features` object.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    arrival_s: float
    choice: int = 0
    priority: int = 0
    adapters: tuple[tuple[str, float], ...] = ()
    cache_salt: str | None = None
    features: PackedFeatures | None = None


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence for an encoder beside the generator: ids, types (None: all 0), how many tokens from the first on are
    left out of pooling, and whether its score is wanted instead of its vector."""

    ids: list[int]
    type_ids: list[int] | None = None
    skip: int = 0
    is_scored: bool = False


def choices_of(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams | PoolingParams,
    arrival_s: float,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    adapters: tuple[tuple[str, float], ...] = (),
    features: PackedFeatures | None = None,
) -> list[Request]:
    """The Requests of one user request: one for each of its `params.n` choices, one where it is pooled."""
    return [
        Request(
            id=f"{request_id}/{choice}",
            prompt_token_ids=prompt_token_ids,
            params=params,
            arrival_s=arrival_s,
            choice=choice,
            priority=priority,
            cache_salt=cache_salt,
            adapters=adapters,
            features=features,
        )
        for choice in range(params.n if isinstance(params, SamplingParams) else 1)
    ]


FinishReason = Literal["stop", "length", "abort", "error"]


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request ended. `stop_reason` is the stop string or stop id that ended it (None for end-of-sequence);
    `error` and `param` say what was wrong when `reason` is "error", `kind` is the error class's name."""

    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    param: str | None = None
    kind: str | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Log-probabilities (natural log) at one position: the actual token, its rank (1 = most likely), and the most
    likely alternatives as (token id, logprob), best first."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class Output(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step added to one request.

    `prompt_logprobs` comes once, with the first new token: one entry per prompt token, None for the first.
    `queue_s` (seconds from arrival to first computation) and `num_cached_tokens` come with the first Output. `pooled`
    is what PoolingParams asked for: float32, little-endian.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: bytes | None = None
    num_cached_tokens: int = 0
    queue_s: float | None = None
    finish: Finish | None = None


class EngineStats(msgspec.Struct, kw_only=True):
    """The engine's gauges and running totals (since its start) after a step, for `/metrics` and progress bars."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of KV blocks held by live sequences, 0..1
    prefix_query_tokens: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hit_tokens: int = 0
    num_preempted: int = 0
