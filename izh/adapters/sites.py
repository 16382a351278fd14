"""Where a model can be adapted.

Owns: the map from the checkpoint's names (what adapters say) to the served model's modules (what is wrapped); Targets,
what an adapter's reader has to know of the model.
Must not know: adapters, slots.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from izh.adapters.linear import Part
from izh.kernels.ops import QuantizedLinear
from izh.model.decoder import Decoder, Embedding
from izh.model.families import family_of
from izh.model.quantize import LowBitEmbedding, LowBitLinear
from izh.model.spec import ModelSpec


@dataclass(frozen=True)
class Targets(Mapping[str, tuple[int, int]]):
    """(inputs, outputs) of all that can be adapted, by the checkpoint's path, such as "layers.3.self_attn.q_proj"; the
    inputs of "embed_tokens" are the vocabulary.

    `is_tied`: the head computes with the embedding's weights. `holds`: of the embedding and the head, whether a weight
    [V, D] is the one that is served, in the format in which it is; none where no model is loaded.
    """

    shapes: Mapping[str, tuple[int, int]]
    is_tied: bool = False
    holds: Mapping[str, Callable[[Tensor], bool]] = field(default_factory=dict, compare=False, repr=False)

    def __getitem__(self, path: str) -> tuple[int, int]:
        return self.shapes[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@dataclass(frozen=True, slots=True)
class Site:
    """A module that can be wrapped: attribute `name` of `parent`."""

    parent: nn.Module
    name: str
    parts: tuple[Part, ...]

    @property
    def module(self) -> nn.Module:
        module = getattr(self.parent, self.name)
        assert isinstance(module, nn.Module)
        return module


def decoder_sites(model: Decoder) -> list[Site]:
    """Every projection of the decoder, the LM head and the token embedding. One that computes several of the
    checkpoint's modules has several parts."""
    sites = []
    for place, parts in _parts(model.spec).items():
        parent, _, name = place.rpartition(".")
        sites.append(Site(model.get_submodule(parent), name, parts))
    return sites


def linear_sites(model: nn.Module, targets: tuple[str, ...]) -> list[Site]:
    """Every nn.Linear whose last name is in `targets`: for models that do not fuse their projections."""
    return [
        Site(
            model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], (Part(path, 0, module.out_features),)
        )
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in targets
    ]


def shapes_of(sites: list[Site]) -> Targets:
    """What adapters can say of a model with these sites, none of them wrapped yet."""
    shapes: dict[str, tuple[int, int]] = {}
    weights: dict[str, Tensor | QuantizedLinear] = {}
    for site in sites:
        inputs, weight = _inputs_and_weight(site.module)
        shapes |= {part.path: (inputs, part.stop - part.start) for part in site.parts}
        weights |= {part.path: weight for part in site.parts if part.path in ("embed_tokens", "lm_head")}
    is_tied = len(weights) == 2 and weights["embed_tokens"] is weights["lm_head"]
    return Targets(shapes, is_tied, {path: _holds(weight) for path, weight in weights.items()})


def _inputs_and_weight(module: nn.Module) -> tuple[int, Tensor | QuantizedLinear]:
    if isinstance(module, LowBitEmbedding):
        return module.num_tokens, module.quantized
    if isinstance(module, LowBitLinear):
        return module.in_features, module.quantized
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0 if isinstance(module, Embedding) else 1], weight


def _holds(weight: Tensor | QuantizedLinear) -> Callable[[Tensor], bool]:
    if isinstance(weight, Tensor):
        return lambda copy: torch.equal(copy.to(weight), weight)
    return weight.holds


def targets_of(spec: ModelSpec) -> Targets:
    """The same of a decoder that need not be loaded, without its weights."""
    inputs = {
        "qkv_proj": spec.hidden_size,
        "o_proj": spec.qkv_sizes[0],
        "gate_up_proj": spec.hidden_size,
        "down_proj": spec.intermediate_size,
        "embed_tokens": spec.vocab_size,
        "lm_head": spec.hidden_size,
    }
    shapes = {
        part.path: (inputs[place.rpartition(".")[2]], part.stop - part.start)
        for place, parts in _parts(spec).items()
        for part in parts
    }
    return Targets(shapes, spec.tie_word_embeddings)


def num_adapter_values(spec: ModelSpec, capacity: int, max_rank: int) -> int:
    """How many numbers a bank holds at most, in `capacity` slots: A and B of rank max_rank for every target, a gain and
    a shift for each output. Not counted: rows that adapters bring in place of the base's, which stay where the adapter
    itself is, on the host."""
    return capacity * sum(max_rank * (inputs + outputs) + 2 * outputs for inputs, outputs in targets_of(spec).values())


def _parts(spec: ModelSpec) -> dict[str, tuple[Part, ...]]:
    """{projection of the decoder: the checkpoint's modules that it computes, in the order of its outputs}."""
    query, key, value = spec.qkv_sizes
    middle = spec.intermediate_size
    outputs: dict[str, dict[str | None, tuple[int, int]]] = {
        "qkv_proj": {
            "q": (0, query),
            "k": (query, query + key),
            "v": (query + key, query + key + value),
            None: (0, query + key + value),
        },
        "o_proj": {None: (0, spec.hidden_size)},
        "gate_up_proj": {"gate": (0, middle), "up": (middle, 2 * middle), None: (0, 2 * middle)},
        "down_proj": {None: (0, spec.hidden_size)},
        "embed_tokens": {None: (0, spec.hidden_size)},
        "lm_head": {None: (0, spec.vocab_size)},
    }
    found: dict[str, list[Part]] = {}
    for path, (place, part) in family_of(spec.model_type).modules.items():
        name = place.rpartition(".")[2]
        if name not in outputs:  # norms
            continue
        for layer in range(spec.num_layers if "{i}" in path else 1):
            found.setdefault(place.format(i=layer), []).append(Part(path.format(i=layer), *outputs[name][part]))
    return {place: tuple(sorted(parts, key=lambda part: part.start)) for place, parts in found.items()}
