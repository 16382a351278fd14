"""What is measured beside what: the sections of the report, who takes part in each, and who does not, and why.

Owns: SECTIONS, and the cells of each for given options. Must not know: processes, figures.
Invariant: everyone in a section gets the same prompts, and weights of the same width (the 8-bit section's first peer,
transformers, is there as the reference for tokens, in float32).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from izh.bench.peers.options import SECTION_NAMES, PeersOptions

CONTEXT_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contestant: `label` in the report, the environment it lives in (None: izh's own), its driver, and the form
    and options it is loaded with."""

    label: str
    peer: str | None
    driver: str
    form: str = "hf"
    dtype: str = "fp32"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Section:
    """`reference`: whose answers the others' are compared with. `absent`: well-known peers that have no part in it."""

    title: str
    entries: tuple[Entry, ...]
    reference: str
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Engines loaded once, with so many adapters, and asked for batches of these (requests, prompt tokens)."""

    adapters: int
    cells: tuple[tuple[int, int], ...]


IZH = Entry(label="izh", peer=None, driver="izh_llm")
TRANSFORMERS = Entry(label="transformers", peer="transformers", driver="transformers_generate")
IZH_INT8 = Entry(label="izh int8", peer=None, driver="izh_llm", dtype="int8", options={"quantization": "int8"})
PEFT = Entry(label="PEFT", peer="peft", driver="transformers_generate")
OPENVINO = Entry(label="OpenVINO GenAI", peer="openvino", driver="openvino_pipeline", form="openvino-fp32")
OPENVINO_INT8 = Entry(
    label="OpenVINO GenAI int8", peer="openvino", driver="openvino_pipeline", form="openvino-int8", dtype="int8"
)
LLAMA = Entry(label="llama.cpp F32", peer="llamacpp", driver="llama_server", form="gguf-f32")
LLAMA_Q8 = Entry(label="llama.cpp Q8_0", peer="llamacpp", driver="llama_server", form="gguf-q8_0", dtype="int8")
VLLM = Entry(label="vLLM", peer="vllm", driver="vllm_llm")

FLOAT32 = (IZH, TRANSFORMERS, OPENVINO, LLAMA, VLLM)

SECTIONS = {
    "float32": Section(title="float32 weights", entries=FLOAT32, reference="transformers"),
    "int8": Section(
        title="8-bit weights",
        entries=(IZH_INT8, IZH, TRANSFORMERS, OPENVINO_INT8, LLAMA_Q8),
        reference="transformers",
        absent={"vLLM": "reads only checkpoints that were quantized ahead"},
    ),
    "adapters": Section(
        title="LoRA adapters, rank 16 on all seven projections, float32",
        entries=(IZH, PEFT, OPENVINO, VLLM),
        reference="PEFT",
        absent={"llama.cpp": "never puts two adapters into one batch"},
    ),
    "context": Section(title="longer prompts, float32", entries=FLOAT32, reference="transformers"),
    "embeddings": Section(
        title="embeddings, float32",
        entries=(
            Entry(label="izh", peer=None, driver="izh_pooling"),
            Entry(
                label="sentence-transformers",
                peer="sentence-transformers",
                driver="sentence_transformer",
                options={"backend": "torch"},
            ),
            Entry(
                label="sentence-transformers on OpenVINO",
                peer="openvino",
                driver="sentence_transformer",
                options={"backend": "openvino"},
            ),
            Entry(label="Infinity", peer="infinity", driver="infinity_engine"),
        ),
        reference="sentence-transformers",
    ),
}
assert tuple(SECTIONS) == SECTION_NAMES


def groups_of(section: str, options: PeersOptions) -> list[Group]:
    """The loads of a section that generates text, and the cells of each."""
    usual = options.prompt_tokens
    if section == "adapters":
        cells = ((max(options.batch), usual),)
        return [Group(adapters=count, cells=cells) for count in dict.fromkeys((0, *options.adapters))]
    if section == "context":
        return [Group(adapters=0, cells=tuple((CONTEXT_BATCH, length) for length in dict.fromkeys(options.context)))]
    return [Group(adapters=0, cells=tuple((batch, usual) for batch in dict.fromkeys(options.batch)))]
