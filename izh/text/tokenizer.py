"""The checkpoint's own tokenizer and chat template.

Owns: Tokenizer: load, encode, decode, chat, and what single tokens look like.
Must not know: torch, requests, HTTP. `transformers` is imported only when a tokenizer is loaded.
Invariant: safe to call from several threads: after `load` nothing changes but the table of pieces, which only grows
(truncation and padding are switched off once; the methods of `transformers` that switch them are never called).
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from izh.errors import ModelLoadError, RequestError
from izh.text.detokenizer import detokenizer
from izh.text.encoding import EncoderTokenizer
from izh.text.guard import Guard
from izh.text.messages import template_messages
from izh.text.pieces import Pieces


class Tokenizer:
    """Text to token ids and back, as the checkpoint defines it."""

    def __init__(self, hf: Any) -> None:
        """`hf`: a fast tokenizer of `transformers` (a PreTrainedTokenizerFast), which now belongs to this object."""
        self._hf = hf
        self._backend: Backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.pieces = Pieces(self._backend)
        self._guard = Guard(self._backend)
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = hf.eos_token_id
        # What template variables may not be called: they would change how the template is applied.
        signature = inspect.signature(hf.apply_chat_template).parameters.values()
        self._reserved = {"messages", *(p.name for p in signature if p.kind is not p.VAR_KEYWORD)}

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """The tokenizer of a model directory or a .gguf file. Raises ModelLoadError."""
        from transformers import AutoTokenizer

        is_gguf = path.suffix == ".gguf"
        if not (path.is_file() if is_gguf else path.is_dir()):
            raise ModelLoadError(f"no tokenizer at {path}: expected a model directory or a .gguf file")
        where = (path.parent, {"gguf_file": path.name}) if is_gguf else (path, {})
        try:
            hf = AutoTokenizer.from_pretrained(where[0], local_files_only=True, **where[1])
        except Exception as error:  # `tokenizers` raises plain Exception for a malformed file
            raise ModelLoadError(f"cannot load the tokenizer of {path}: {error}") from error
        if not hf.is_fast:
            raise ModelLoadError(
                f"the tokenizer of {path} ({type(hf).__name__}) has no tokenizer.json form; "
                f"convert it once with transformers and save it beside the weights"
            )
        return cls(hf)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` skips."""
        return self.pieces.special_ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, never truncated. Raises RequestError for text that is no valid Unicode."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # the library's word for a lone surrogate, which JSON can spell
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from error

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text as it stands: nothing is added, and what it spells of control tokens stays text.

        Raises RequestError for text that is no valid Unicode."""
        try:
            return self._guard.plain(texts)
        except TypeError as error:
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from error

    def encoder(self) -> EncoderTokenizer:
        """This tokenizer, for texts that are embedded: many at once, and cut where that is asked for."""
        return EncoderTokenizer(self._hf)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`: exactly what an incremental detokenizer gives for them.

        This is the library's decoding, with one exception told in `SpaceDetokenizer`. Spaces before punctuation are
        kept (no "clean-up", which would not invert `encode`). Ids without a token contribute nothing.
        """
        if self.pieces.joining.kind == "spaces":
            stream = detokenizer(self.pieces, skip_special_tokens=skip_special_tokens)
            return stream.push(token_ids) + stream.flush()
        try:
            return self.pieces.decode(list(token_ids), skip_special_tokens)
        except OverflowError as error:
            raise RequestError(f"token ids must be between 0 and 2**32 - 1: {error}") from error

    def piece(self, token_id: int) -> tuple[str, bytes]:
        r"""A single token as printable text and as raw bytes.

        Bytes that are no whole character are printed as \xNN, so that different tokens look different (as the OpenAI
        API prints them).
        """
        raw = self.pieces.raw(token_id)
        return raw.decode("utf-8", "backslashreplace"), raw

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        image_id: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, written by the checkpoint's own chat template.

        `template_kwargs` are further variables of the template (such as enable_thinking). The template writes the
        special tokens itself, so none are added to its text; those that messages spell stay text. Each part of type
        image or image_url becomes one `image_id`, in order; without one, such parts are refused.

        Raises: RequestError when there is no template, when the template refuses the messages (roles out of order, a
        missing field), or when an argument is impossible.
        """
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template, so it cannot take messages; send a prompt to /v1/completions instead",
                "messages",
            )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true; set one of them to false",
                "continue_final_message",
            )
        if taken := sorted(self._reserved.intersection(template_kwargs or ())):
            raise RequestError(f"chat_template_kwargs may not set {', '.join(taken)}", "chat_template_kwargs")
        hidden: list[str] = []
        conversation = self._guard.hide(
            template_messages(messages, None if image_id is None else self._guard.place), hidden
        )
        try:
            text = self._hf.apply_chat_template(
                conversation,
                tools=self._guard.hide(list(tools), hidden) if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **self._guard.hide(dict(template_kwargs or {}), hidden),
            )
        except (
            Exception
        ) as error:  # the template is a program of the checkpoint: what it raises is about these messages
            raise RequestError(f"the model's chat template refused the messages: {error}", "messages") from error
        num_images = text.count(self._guard.place)
        if num_images != (expected := sum(_num_places(self._guard.place, message) for message in conversation)):
            raise RequestError(
                f"the model's chat template wrote {num_images} of {expected} images of the messages", "messages"
            )
        try:
            return self._guard.encode(text, hidden, image_id)
        except TypeError as error:
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from error


def _num_places(place: str, message: Mapping[str, Any]) -> int:
    content = message.get("content")
    return content.count(place) if isinstance(content, str) else 0
