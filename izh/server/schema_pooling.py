"""The bodies of embeddings, reranks and scores; as those in `schema.py`.

Owns: which fields exist, their types. Must not know: the limits of values, which the service knows.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from izh.errors import RequestError
from izh.server import inert
from izh.server.asked import Asked
from izh.server.schema import Body, Int, Text, must_be


class PoolingBody(Body):
    """What all of them share with requests for text (`schema.SamplingBody`)."""

    model: Text | None = None
    truncate_prompt_tokens: Int | None = None
    lora_scale: float | None = Field(default=None, allow_inf_nan=False)
    priority: Int = 0
    cache_salt: Text | None = None

    @model_validator(mode="after")
    def _salt_is_not_empty(self) -> "PoolingBody":
        if self.cache_salt == "":
            raise RequestError("cache_salt must not be empty; leave it out to share the prefix cache", "cache_salt")
        return self

    @property
    def asked(self) -> Asked:
        """What the engine is to do besides."""
        return Asked(self.lora_scale, self.priority, self.cache_salt)


class EmbeddingBody(PoolingBody):
    """POST /v1/embeddings. `input` may be a text, token ids, or a list of either; the service says what is wrong."""

    INERT: ClassVar[inert.Table] = inert.EMBEDDING

    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int | None = None
    prompt_name: Text | None = None


class Document(Body):
    """A document as an object, as Cohere's API allows."""

    text: Text


class RerankBody(PoolingBody):
    """POST /v1/rerank and /v2/rerank."""

    INERT: ClassVar[inert.Table] = inert.RERANK

    query: Text
    documents: list[Annotated[Text | Document, must_be("a text or an object with a text")]]
    top_n: Int | None = None
    return_documents: bool | None = None
    raw_scores: bool = False
    max_tokens_per_doc: Annotated[Int, Field(ge=1)] | None = None


class ScoreBody(PoolingBody):
    """POST /v1/score: each text of `text_1` with its counterpart in `text_2`, or one with each."""

    INERT: ClassVar[inert.Table] = inert.SCORE

    text_1: Annotated[Text | list[Text], must_be("a text or a list of texts")]
    text_2: Annotated[Text | list[Text], must_be("a text or a list of texts")]
    raw_scores: bool = False
