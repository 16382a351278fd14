"""The sampling parameters of a step's rows, as the tensors that `Ops.draw` takes.

Must not know: sequences, how a token is drawn (`izh/kernels/draw.py`).
"""

from collections.abc import Sequence as Many

import numpy as np
import torch

from izh.kernels.draw import Filters
from izh.request import SamplingParams


def filters_of(params: Many[SamplingParams], vocab_size: int, device: torch.device) -> Filters:
    with np.errstate(divide="ignore"):
        min_logit = np.log(np.array([each.min_p for each in params], np.float64)).astype(np.float32)
    top_k = [min(each.top_k or vocab_size, vocab_size) for each in params]
    return Filters(
        temperature=torch.tensor([each.temperature for each in params], dtype=torch.float32, device=device),
        min_logit=torch.from_numpy(min_logit).to(device),
        top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
        top_p=torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device),
        is_on=min(top_k) < vocab_size or any(each.top_p < 1.0 or each.min_p > 0.0 for each in params),
    )
