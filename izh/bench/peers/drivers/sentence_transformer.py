"""sentence-transformers' `encode`, which sorts by length and pads batches of 32; on torch, or on OpenVINO."""

from typing import Any

import torch
from sentence_transformers import SentenceTransformer


class Engine:
    """`options["backend"]` is sentence-transformers' own word for what computes."""

    def __init__(self, *, model: str, num_threads: int, options: dict[str, Any], **_others: Any) -> None:
        torch.set_num_threads(num_threads)
        backend = options["backend"]
        more: dict[str, Any] = {}
        if backend == "openvino":
            more = {"ov_config": {"INFERENCE_NUM_THREADS": str(num_threads), "INFERENCE_PRECISION_HINT": "f32"}}
        self._encoder = SentenceTransformer(model, device="cpu", backend=backend, model_kwargs=more)

    def embed(self, texts: list[str]) -> Any:
        """See `main.py`."""
        return self._encoder.encode(texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False)
