"""What a peer's own Python runs: `python -P main.py DRIVER.py`, one request a line on standard input, one reply a line.

Owns: the wire. Must not know: any engine, or izh, which a peer's environment does not have.
Invariant: each request gets exactly one reply; nothing an engine prints gets between them.

    {"call": "load", ...}        -> {"answer": null}      first, once: DRIVER.Engine(...)
    {"call": NAME, ...}          -> {"answer": ...}       a method of the Engine, with the other members as keywords
    a call that raises           -> {"error": "ValueError: ..."}, with the traceback on standard error

A text Engine has `answer(prompts, num_tokens, adapters) -> [[token id]]`: exactly `num_tokens` greedy tokens for every
prompt (token ids), all prompts at once; `adapters` is an index into `load`'s for each prompt, or null for the base.
An embedding Engine has `embed(texts) -> [[number]]`, normalized vectors.
"""

import base64
import ctypes
import json
import os
import signal
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    """Serve one engine until standard input ends, or the parent does: a stopped process would never see either."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = _module(Path(sys.argv[1]))
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        call = request.pop("call")
        reply: dict[str, Any] = {"answer": None}
        try:
            if call == "load":
                engine = module.Engine(**request)
            elif call == "embed":
                reply["answer"] = _packed(engine.embed(**request))
            else:
                reply["answer"] = getattr(engine, call)(**request)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}".strip().partition("\n")[0]}
        wire.write(json.dumps(reply) + "\n")
        wire.flush()


def _module(path: Path) -> Any:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _packed(vectors: Any) -> dict[str, Any]:
    """Numbers as text cost more than some engines need to compute them; these are little-endian float32."""
    import numpy as np

    array = np.asarray(vectors, dtype="<f4")
    return {"shape": array.shape, "base64": base64.b64encode(array.tobytes()).decode()}


if __name__ == "__main__":
    main()
