"""Weights that an adapter brings in place of the base's: trained tokens, modules saved whole, copies of base weights.

Owns: which rows of the token embedding and of the LM head a PEFT file replaces, as PEFT has them after loading it.
Must not know: files, A and B.
Invariant: what PEFT cannot compute, or computes by the order of tensors in the file, is refused.

Where the head shares the embedding's weights, a copy in the file is written over both, and the head follows the
embedding's trained tokens unless it has its own; a module saved whole replaces that one alone, unless
ensure_weight_tying.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from izh.adapters.peft_config import PeftConfig
from izh.adapters.peft_fields import refuse
from izh.adapters.peft_tensors import COPY, TOKENS, WEIGHT, WEIGHT_AGAIN, Tensors, checked
from izh.adapters.rows import ReplacedRows
from izh.adapters.sites import Targets
from izh.errors import AdapterError

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


def replaced_rows(
    config: PeftConfig, found: Mapping[str, Tensors], keys: Mapping[str, str], targets: Targets
) -> dict[str, ReplacedRows]:
    """{path: rows}. `keys` is {what the adapter calls a module: its path}; `found`, by such names, the tensors that are
    one of `ROWS`.

    Raises AdapterError naming the tensor, or the field and its value.
    """
    key_of = {path: key for key, path in keys.items() if path in (_EMBEDDING, _HEAD)}
    for key, tensors in found.items():
        if key not in key_of.values():
            raise AdapterError(f"{key}: {', '.join(tensors)} found; only lm_head and embed_tokens can be replaced")
    _check_config(config, key_of, targets.is_tied)
    mine = {path: found.get(key, {}) for path, key in key_of.items()}
    copies = _copies(config, key_of, mine, targets)
    rows = {}
    for path, key in key_of.items():
        if config.saves(key):
            _check_once(key, mine[path], WEIGHT, WEIGHT_AGAIN)
            weight = checked(key, WEIGHT, mine[path], _shape(targets, path))
            rows[path] = ReplacedRows(torch.arange(len(weight)), weight)
        else:
            tokens = _tokens(config, key_of, mine, path, targets)
            if path in copies:
                whole = ReplacedRows(torch.arange(len(copies[path])), copies[path])
                rows[path] = whole if tokens is None else ReplacedRows(whole.ids, tokens.merged(whole.values))
            elif tokens is not None:
                rows[path] = tokens
    both_saved = config.ensure_weight_tying and len(rows) == 2 and all(map(config.saves, key_of.values()))
    if both_saved and not torch.equal(rows[_EMBEDDING].values, rows[_HEAD].values):
        raise AdapterError("ensure_weight_tying = True, but the weights of embed_tokens and lm_head differ")
    return rows


def _check_config(config: PeftConfig, key_of: Mapping[str, str], is_tied: bool) -> None:
    """What PEFT cannot build is no file of its."""

    def because(why: str) -> AdapterError:
        indices = {name: list(ids) for name, ids in config.trainable_token_indices.items()}
        return refuse("trainable_token_indices", indices, why)

    for name in config.trainable_token_indices:
        if not any(key.endswith(name) for key in key_of.values()):
            raise because(f"holds {name!r}, which the adapted model does not have")
    for key in key_of.values():
        if config.tokens(key) and (config.saves(key) or config.targets(key)):
            raise because(f"replaces rows of {key}, which is saved whole or targeted too")
    if is_tied and len(key_of) == 2:
        embedding, head = (config.tokens(key_of[path]) for path in (_EMBEDDING, _HEAD))
        if embedding and head and embedding != head and config.ensure_weight_tying:
            raise because("differs between modules that ensure_weight_tying ties")
        key = key_of[_HEAD]
        if _follows(config, key_of) and (config.saves(key) or (config.use_dora and config.targets(key))):
            raise because("reaches the head, which shares the embedding's weights, and is saved whole or uses DoRA")


def _follows(config: PeftConfig, key_of: Mapping[str, str]) -> bool:
    """True when a head that shares the embedding's weights takes its trained tokens as well."""
    embedding, head = config.tokens(key_of[_EMBEDDING]), config.tokens(key_of[_HEAD])
    return bool(embedding) and head in ((), embedding)


def _copies(
    config: PeftConfig, key_of: Mapping[str, str], mine: Mapping[str, Tensors], targets: Targets
) -> dict[str, Tensor]:
    """Base weights as the file has them, where they are not those of the model. With `save_embedding_layers` PEFT saves
    copies, and puts them into the base it is loaded on."""
    found = {}
    for path, key in key_of.items():
        names = [name for name in (COPY, WEIGHT) if name in mine[path] and not (name == WEIGHT and config.saves(key))]
        if len(names) == 2:
            raise AdapterError(f"{key}: {COPY} is there twice, under two spellings")
        if names:
            found[path] = checked(key, names[0], mine[path], _shape(targets, path))
    if targets.is_tied and len(found) == 2 and not torch.equal(*found.values()):
        raise AdapterError("the copies of the weight that embed_tokens and lm_head share differ")
    changed = {path: copy for path, copy in found.items() if not (path in targets.holds and targets.holds[path](copy))}
    return dict.fromkeys(key_of, next(iter(changed.values()))) if targets.is_tied and changed else changed


def _tokens(
    config: PeftConfig, key_of: Mapping[str, str], mine: Mapping[str, Tensors], path: str, targets: Targets
) -> ReplacedRows | None:
    source = path
    if path == _HEAD and targets.is_tied and _EMBEDDING in key_of and _follows(config, key_of):
        source = _EMBEDDING
        if TOKENS in mine[_HEAD]:
            _check_once(key_of[_HEAD], {**mine[_EMBEDDING], "again": mine[_HEAD][TOKENS]}, TOKENS, "again")
    ids = torch.tensor(config.tokens(key_of[source]), dtype=torch.int64)
    if not len(ids):
        if TOKENS in mine[path]:
            raise AdapterError(f"{key_of[path]}: {TOKENS} found, but trainable_token_indices names none")
        return None
    num_rows, width = _shape(targets, path)
    values = checked(key_of[source], TOKENS, mine[source], (len(ids), width))
    if int(ids.max()) >= num_rows:
        raise AdapterError(f"trainable_token_indices holds {int(ids.max())}; the model has {num_rows} tokens")
    order = ids.argsort()
    return ReplacedRows(ids[order], values[order])


def _check_once(key: str, tensors: Tensors, first: str, again: str) -> None:
    """PEFT may write a tensor a second time, which it does not read back: it must say the same."""
    if again in tensors and not torch.equal(tensors.get(first, torch.empty(0)), tensors[again]):
        raise AdapterError(f"{key}: {first} is there twice, with different values")


def _shape(targets: Targets, path: str) -> tuple[int, int]:
    """[V, D] of the module's weight."""
    inputs, outputs = targets[path]
    return (inputs, outputs) if path == _EMBEDDING else (outputs, inputs)
