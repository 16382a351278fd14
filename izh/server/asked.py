"""What an embedding, rerank or score may ask of the engine besides its texts.

Owns: Asked. Must not know: bodies, services.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Asked:
    """Only the generator does any of it; the models beside it are computed in the order of arrival, with no cache."""

    lora_scale: float | None = None
    priority: int = 0
    cache_salt: str | None = None

    @property
    def param(self) -> str | None:
        """The first field that asks for something."""
        return next((each.name for each in fields(self) if getattr(self, each.name) != each.default), None)
