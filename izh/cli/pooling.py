"""`izh embed` and `izh rerank`: lines in, vectors or places out.

Owns: the forms of both answers. Must not know: flags, how vectors and scores are made.
Invariant: standard output carries the answer alone; the bar and all else go to standard error.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from izh.cli.lines import read_lines
from izh.cli.options import EmbedOptions, RerankOptions
from izh.errors import OptionError
from izh.offline.progress import progress_bar
from izh.pooling import load_embedder, load_reranker
from izh.pooling.offline import embed_all, rerank_all

_NPY = ".npy"


def embed_lines(file: str, options: EmbedOptions) -> int:
    """Write the vector of each line. Returns the exit status."""
    lines = read_lines(file)
    out = None if options.out is None else Path(options.out).expanduser()
    if out is not None and not out.absolute().parent.is_dir():
        raise OptionError(f"--out {options.out}: there is no directory {out.absolute().parent}; make it first")
    service = load_embedder(options.embedder, num_threads=options.num_threads, quantization=options.quantization)
    with progress_bar("Embedding", len(lines.texts), sys.stderr.isatty()) as advance:
        vectors = embed_all(
            service,
            lines.texts,
            dimensions=options.dimensions,
            prompt_name=options.prompt_name,
            truncate_prompt_tokens=options.truncate_prompt_tokens,
            label=lines.label,
            after=advance,
        ).numpy()
    service.close()
    try:
        if out is None:
            _write_json(vectors, sys.stdout)
        elif out.suffix == _NPY:
            np.save(out, vectors)
        else:
            with out.open("w", encoding="utf-8") as written:
                _write_json(vectors, written)
    except OSError as error:
        if out is None:
            raise
        raise OptionError(f"--out {options.out}: cannot write: {error.strerror}") from error
    return 0


def rerank_lines(query: str, file: str, options: RerankOptions) -> int:
    """Print the lines, best first. Returns the exit status."""
    lines = read_lines(file)
    service = load_reranker(options.reranker, num_threads=options.num_threads, quantization=options.quantization)
    with progress_bar("Reranking", len(lines.texts), sys.stderr.isatty()) as advance:
        ranked = rerank_all(
            service,
            query,
            lines.texts,
            top_n=options.top_n,
            raw_scores=options.raw_scores,
            truncate_prompt_tokens=options.truncate_prompt_tokens,
            label=lines.label,
            after=advance,
        )
    service.close()
    if options.json:
        for index, score in ranked:
            print(json.dumps({"index": index, "score": score, "document": lines.texts[index]}, ensure_ascii=False))
    else:
        Console().print(_table(ranked, lines.texts))
    return 0


def _write_json(vectors: "np.ndarray[Any, Any]", file: TextIO) -> None:
    for index, vector in enumerate(vectors):
        file.write(json.dumps({"index": index, "embedding": vector.tolist()}) + "\n")


def _table(ranked: Sequence[tuple[int, float]], texts: Sequence[str]) -> Table:
    out = Table()
    for heading in ("place", "score", "line"):
        out.add_column(heading, justify="right")
    out.add_column("text", overflow="ellipsis", no_wrap=True)
    for place, (index, score) in enumerate(ranked, 1):
        out.add_row(str(place), f"{score:.4f}", str(index + 1), escape(texts[index]))
    return out
