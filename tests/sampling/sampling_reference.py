"""Plain NumPy definitions, one row at a time, and small builders: what the tests of sampling compare with."""

import numpy as np
import torch

from izh.kernels.reference import REFERENCE
from izh.request import Request, SamplingParams
from izh.sampling.head import SamplingHead
from izh.seams import HiddenRows
from izh.sequence import Chunk, Plan, Sequence

EOS = 2


def sequence(prompt, *, generated=(), choice=0, name="r", **params):
    """A sequence that has generated `generated` and awaits its next token."""
    request = Request(
        id=name, prompt_token_ids=list(prompt), params=SamplingParams(**params), arrival_s=0.0, choice=choice
    )
    made = Sequence(request)
    made.token_ids += list(generated)
    return made


def last_token(made):
    """The chunk of a decode step."""
    return Chunk(made, made.num_tokens - 1, 1)


def head(vocab_size, eos=frozenset({EOS}), max_model_len=10_000):
    """A head for which hidden rows are logits."""
    return SamplingHead(torch.clone, REFERENCE, vocab_size, eos, max_model_len)


def step(sampler, logits, sequences, *, append=True):
    """One decode step of all sequences: {sequence: result}."""
    plan = Plan([last_token(each) for each in sequences])
    assert sampler.rows(plan) == list(range(len(sequences)))
    results = {result.sequence: result for result in sampler.finish(plan, HiddenRows(logits, sampler.rows(plan)))}
    if append:
        for made, result in results.items():
            made.token_ids += result.token_ids
    return results


def edited(logits, params, prompt, generated, eos=frozenset({EOS})):
    """Logits after min_tokens, bias and penalties."""
    x = np.array(logits, np.float64)
    if len(generated) < params.min_tokens:
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
        x[sorted(stops)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in range(len(x)):
        if token in prompt or token in generated:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        count = list(generated).count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return x


def kept(x, params):
    """Probabilities after temperature, min-p, top-k and top-p, with ties at an edge kept."""
    scaled = (x - x.max()) / params.temperature
    p = np.exp(scaled)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0.0
    if params.top_k and params.top_k < len(p):
        p[p < np.sort(p)[-params.top_k]] = 0.0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    above = np.cumsum(p[order]) - p[order]  # mass strictly before each token
    edge = p[order][above < params.top_p].min() if params.top_p < 1.0 else 0.0
    p[p < edge] = 0.0
    return p / p.sum()


def inverse_cdf(p, uniform):
    return int(np.searchsorted(np.cumsum(p), uniform * p.sum(), side="right"))
