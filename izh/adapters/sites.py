"""Where a model can be adapted.

Owns: the map from the checkpoint's names (what adapters say) to the served model's modules (what is wrapped).
Must not know: adapters, slots.
"""

from dataclasses import dataclass

from torch import nn

from izh.adapters.linear import Part
from izh.model.decoder import Decoder, Embedding
from izh.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Site:
    """A module that can be wrapped: attribute `name` of `parent`."""

    parent: nn.Module
    name: str
    parts: tuple[Part, ...]


def decoder_sites(model: Decoder) -> list[Site]:
    """Every projection of the decoder, the LM head and the token embedding. Fused projections have several parts."""
    spec = model.spec
    query, key, _value = spec.qkv_sizes
    sites = [Site(model, "embed_tokens", (Part("embed_tokens", 0, spec.hidden_size),))]
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
        module = getattr(site.parent, site.name)
        inputs = module.weight.shape[0 if isinstance(module, Embedding) else 1]
        shapes |= {part.path: (inputs, part.stop - part.start) for part in site.parts}
    return shapes


def targets_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of all that can be adapted in a decoder, by the checkpoint's path; an embedding's inputs are
    the vocabulary. Needs no model: an adapter can be read where none is loaded."""
    hidden, middle = spec.hidden_size, spec.intermediate_size
    query, key, value = spec.qkv_sizes
    layer = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, key),
        "self_attn.v_proj": (hidden, value),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, middle),
        "mlp.up_proj": (hidden, middle),
        "mlp.down_proj": (middle, hidden),
    }
    targets = {"embed_tokens": (spec.vocab_size, hidden), "lm_head": (hidden, spec.vocab_size)}
    return targets | {f"layers.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in layer.items()}


def num_adapter_values(spec: ModelSpec, capacity: int, max_rank: int) -> int:
    """How many numbers a bank holds: A and B of rank max_rank for every target, in each of `capacity` slots."""
    return capacity * max_rank * sum(inputs + outputs for inputs, outputs in targets_of(spec).values())
