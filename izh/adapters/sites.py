"""Where a model can be adapted.

Owns: the map from the checkpoint's names (what adapters say) to the served model's modules (what is wrapped).
Must not know: adapters, slots.
"""

from dataclasses import dataclass

from torch import nn

from izh.adapters.linear import Part
from izh.model.decoder import Decoder
from izh.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Site:
    """A module that can be wrapped: attribute `name` of `parent`."""

    parent: nn.Module
    name: str
    parts: tuple[Part, ...]
    is_embedding: bool = False


def decoder_sites(model: Decoder) -> list[Site]:
    """Every projection of the decoder, the LM head and the token embedding. Fused projections have several parts."""
    spec = model.spec
    query, key, _value = spec.qkv_sizes
    sites = [Site(model, "embed_tokens", (Part("embed_tokens", 0, spec.hidden_size),), is_embedding=True)]
    for index, layer in enumerate(model.layers):
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, nn.Module)
        assert isinstance(mlp, nn.Module)
        at, to = f"layers.{index}.self_attn", f"layers.{index}.mlp"
        sites += [
            Site(
                attention,
                "qkv_proj",
                (
                    Part(f"{at}.q_proj", 0, query),
                    Part(f"{at}.k_proj", query, query + key),
                    Part(f"{at}.v_proj", query + key, query + 2 * key),
                ),
            ),
            Site(attention, "o_proj", (Part(f"{at}.o_proj", 0, spec.hidden_size),)),
            Site(
                mlp,
                "gate_up_proj",
                (
                    Part(f"{to}.gate_proj", 0, spec.intermediate_size),
                    Part(f"{to}.up_proj", spec.intermediate_size, 2 * spec.intermediate_size),
                ),
            ),
            Site(mlp, "down_proj", (Part(f"{to}.down_proj", 0, spec.hidden_size),)),
        ]
    return [*sites, Site(model, "lm_head", (Part("lm_head", 0, spec.vocab_size),))]


def linear_sites(model: nn.Module, targets: tuple[str, ...]) -> list[Site]:
    """Every nn.Linear whose last name is in `targets`: for models that do not fuse their projections."""
    return [
        Site(
            model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], (Part(path, 0, module.out_features),)
        )
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in targets
    ]


def shapes_of(sites: list[Site]) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every target, by path; an embedding's inputs are the vocabulary."""
    shapes: dict[str, tuple[int, int]] = {}
    for site in sites:
        weight = getattr(site.parent, site.name).weight
        inputs = weight.shape[0] if site.is_embedding else weight.shape[1]
        shapes |= {part.path: (inputs, part.stop - part.start) for part in site.parts}
    return shapes


def num_adapter_values(spec: ModelSpec, capacity: int, max_rank: int) -> int:
    """How many numbers a bank holds: capacity slots of rank max_rank at every site."""
    hidden, middle, vocab = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    query, key, value = spec.qkv_sizes
    layer = (3 * hidden + query + key + value) + (query + hidden) + (2 * hidden + 2 * middle) + (middle + hidden)
    return capacity * max_rank * (spec.num_layers * layer + 2 * (hidden + vocab))
