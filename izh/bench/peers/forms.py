"""A model in the forms that peers read.

Owns: `form_of`: a checkpoint as it is, as GGUF in F32 or Q8_0, or as OpenVINO's files; each made once, in izh's cache.
Must not know: what is done with them.
Invariant: all forms hold the same weights, each rounded once to what its name says.

GGUF forms are copies of the demo's own file, or of a given one, with the tensors rewritten: names, metadata and the
tokenizer stay what llama.cpp's converter wrote.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, Keys
from gguf.constants import GGML_QUANT_SIZES, LlamaFileType
from gguf.quants import dequantize, quantize

from izh.errors import OptionError
from izh.model.demo import demo_gguf
from izh.model.packages import cached_directory
from izh.model.source import ModelSource

_GGUF = {
    "gguf-f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "gguf-q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_OPENVINO = {"openvino-fp32": "fp32", "openvino-int8": "int8"}


def form_of(source: ModelSource, form: str, openvino: Path) -> Path:
    """Where the model lies in this form: "hf", "gguf-f32", "gguf-q8_0", "openvino-fp32" or "openvino-int8". `openvino`
    is the interpreter that has OpenVINO's exporter.

    Raises OptionError when it cannot be made of this model.
    """
    if form == "hf":
        if source.kind != "directory":
            raise OptionError(f"{source.path.name} is a GGUF file, and this peer reads Hugging Face directories")
        return source.path
    if form in _OPENVINO:
        directory = form_of(source, "hf", openvino)
        return _cached(directory, form, lambda _, made: _export(openvino, directory, _OPENVINO[form], made))
    if source.kind == "gguf":
        made = _cached(source.path, form, lambda _, made: convert(source.path, form, made / "model.gguf"))
        return made / "model.gguf"
    if source.name == "demo":
        made = _cached(source.path, form, lambda scratch, made: convert(demo_gguf(scratch), form, made / "model.gguf"))
        return made / "model.gguf"
    raise OptionError(f"no GGUF file of {source.name} is known; measure llama.cpp with 'demo' or a .gguf file")


def convert(source: Path, form: str, target: Path) -> None:
    """Copy a GGUF file with its weights in another type: matrices as `form` says where their rows are whole blocks of
    it, all else in F32."""
    kind, file_type = _GGUF[form]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields[Keys.General.ARCHITECTURE].contents()))
    skipped = {Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE, Keys.General.QUANTIZATION_VERSION}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in skipped:
            continue
        of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], of)
    writer.add_file_type(file_type)
    block = GGML_QUANT_SIZES[kind][0]
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        as_kind = kind if values.ndim > 1 and values.shape[-1] % block == 0 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _export(python: Path, model: Path, weights: str, target: Path) -> None:
    command = [str(python.parent / "optimum-cli"), "export", "openvino", "--task", "text-generation-with-past"]
    command += ["--model", str(model), "--weight-format", weights, str(target)]
    print(" ".join(command), file=sys.stderr)
    if (status := subprocess.run(command, stdout=sys.stderr, check=False).returncode) != 0:
        raise OptionError(f"OpenVINO's exporter ended with status {status}: {' '.join(command)}")


def _cached(path: Path, form: str, make: Callable[[Path, Path], None]) -> Path:
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    stats = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    return cached_directory(f"{form}-{hashlib.sha256(repr(stats).encode()).hexdigest()[:16]}", make)
