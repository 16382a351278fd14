"""Directories that sentence-transformers saved give the vectors that sentence-transformers gives."""

import json
import shutil

import encoders_made
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

from izh.errors import ModelLoadError, RequestError
from izh.pooling import HFEncoder, load_embedder
from izh.pooling.encoders import NativeEncoder

TEXTS = [
    "the quick brown fox",
    "a",
    "",
    "jumps over the lazy dog, and for Äpfel 日本 def f(x): return x; the quick brown fox jumps over the lazy dog",
    "QUICK Brown",
]
SIZE = encoders_made.SIZES["hidden_size"]


@pytest.fixture(scope="module")
def transformers_folder(tmp_path_factory):
    folders = {}

    def folder(family: str, **options):
        key = (family, *sorted(options.items()))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(family)
            encoders_made.save(folders[key], family, **options)
        return folders[key]

    return folder


def saved(folder, tmp_path, *modules, transformer=None, **options):
    """(the model of sentence-transformers, the directory it wrote)."""
    parts = [Transformer(str(folder), **(transformer or {})), *modules]
    model = SentenceTransformer(modules=parts, device="cpu", **options)
    path = tmp_path / "saved"
    model.save(str(path))
    return SentenceTransformer(str(path), device="cpu"), path


async def difference(model, service, texts=TEXTS, prompt_name=None) -> float:
    theirs = torch.from_numpy(model.encode(texts, prompt_name=prompt_name))
    ours, _ = await service.vectors(texts, truncate_prompt_tokens=-1, prompt_name=prompt_name)
    service.close()
    assert theirs.std() > 0.01
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("family", encoders_made.FAMILIES)
async def test_families(transformers_folder, tmp_path, family) -> None:
    model, path = saved(transformers_folder(family), tmp_path, Pooling(SIZE, "mean"), Normalize())
    service = load_embedder(path)
    assert isinstance(service.encoder, NativeEncoder)
    assert service.recipe.normalize
    assert await difference(model, service) < 1e-5


@pytest.mark.parametrize(
    "mode", ["cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("mean", "cls"), ("lasttoken", "max")]
)
async def test_pooling_modes(transformers_folder, tmp_path, mode) -> None:
    model, path = saved(transformers_folder("bert"), tmp_path, Pooling(SIZE, mode))
    service = load_embedder(path)
    assert not service.recipe.normalize
    assert await difference(model, service) < 1e-5


async def test_the_older_spelling_of_pooling_modes(transformers_folder, tmp_path) -> None:
    _, path = saved(transformers_folder("bert"), tmp_path, Pooling(SIZE, "mean"))
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": SIZE} | flags))
    service = load_embedder(path)
    assert service.recipe.modes == ("cls", "mean")
    assert await difference(SentenceTransformer(str(path), device="cpu"), service) < 1e-5


@pytest.mark.parametrize(
    "modules",
    [
        lambda: [Dense(SIZE, 16), Normalize()],
        lambda: [Dense(SIZE, 16, bias=False, activation_function=torch.nn.Identity())],
        lambda: [Normalize(), Dense(SIZE, SIZE, activation_function=torch.nn.GELU(), use_residual=True)],
        lambda: [Dense(SIZE, 24, use_residual=True), LayerNorm(24), Normalize()],
    ],
)
async def test_layers_after_pooling(transformers_folder, tmp_path, modules) -> None:
    torch.manual_seed(0)
    model, path = saved(transformers_folder("bert"), tmp_path, Pooling(SIZE, "mean"), *modules())
    assert await difference(model, load_embedder(path)) < 1e-5


async def test_dense_weights_in_the_older_format(transformers_folder, tmp_path) -> None:
    model, path = saved(transformers_folder("bert"), tmp_path, Pooling(SIZE, "mean"), Dense(SIZE, 16))
    weights = path / "2_Dense" / "model.safetensors"
    torch.save(model[2].state_dict(), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    assert await difference(model, load_embedder(path)) < 1e-5


@pytest.mark.parametrize("includes", [True, False])
@pytest.mark.parametrize("mode", ["mean", "cls", "weightedmean"])
async def test_prompts(transformers_folder, tmp_path, mode, includes) -> None:
    prompts = {"query": "the query: ", "document": "over ", "plain": ""}
    model, path = saved(
        transformers_folder("bert"),
        tmp_path,
        Pooling(SIZE, mode, include_prompt=includes),
        prompts=prompts,
        default_prompt_name="query",
    )
    for name in (None, "document", "plain"):
        assert await difference(model, load_embedder(path), prompt_name=name) < 1e-5


async def test_length_limit_and_lower_case(transformers_folder, tmp_path) -> None:
    options = {"max_seq_length": 9, "do_lower_case": True}
    model, path = saved(transformers_folder("bert"), tmp_path, Pooling(SIZE, "mean"), transformer=options)
    service = load_embedder(path)
    assert service.max_model_len == model.max_seq_length == 9
    assert await difference(model, service) < 1e-5
    service = load_embedder(path, max_model_len=15)
    with pytest.raises(RequestError, match="at most 15"):
        await service.embed(TEXTS[3])
    (upper, lower), _ = await service.vectors(["QUICK", "quick"])
    assert torch.equal(upper, lower)
    service.close()
    with pytest.raises(ModelLoadError, match="99 is not between 1 and 66"):
        load_embedder(path, max_model_len=99)


async def test_a_saved_width_is_kept_and_declared_ones_may_be_asked_for(transformers_folder, tmp_path) -> None:
    model, path = saved(transformers_folder("bert"), tmp_path, Pooling(SIZE, "mean"), Normalize(), truncate_dim=20)
    service = load_embedder(path)
    theirs = torch.nn.functional.normalize(torch.from_numpy(model.encode(TEXTS)), dim=1)
    ours, _ = await service.vectors(TEXTS, truncate_prompt_tokens=-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(RequestError, match="not trained to be cut"):
        await service.embed("a", dimensions=4)
    service.close()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [4, 8]}))
    service = load_embedder(path)
    cut, _ = await service.vectors(TEXTS, truncate_prompt_tokens=-1, dimensions=4)
    torch.testing.assert_close(cut, torch.nn.functional.normalize(theirs[:, :4], dim=1), rtol=1e-5, atol=1e-5)
    service.close()


async def test_a_plain_model_directory_is_mean_pooling_of_length_1(transformers_folder) -> None:
    folder = transformers_folder("roberta")
    model = SentenceTransformer(str(folder), device="cpu")
    service = load_embedder(folder)
    ours, _ = await service.vectors(TEXTS, truncate_prompt_tokens=-1)
    theirs = torch.from_numpy(model.encode(TEXTS, normalize_embeddings=True))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    service.close()


async def test_other_encoders_run_on_transformers_padded(transformers_folder, tmp_path) -> None:
    folder = transformers_folder("bert", hidden_act="silu")
    model, path = saved(folder, tmp_path, Pooling(SIZE, ("mean", "lasttoken")), Normalize())
    service = load_embedder(path)
    assert isinstance(service.encoder, HFEncoder)
    assert await difference(model, service) < 1e-5


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("modules.json", lambda m: m.append({"path": "x", "type": "sentence_transformers.models.LSTM"}), "LSTM is not"),
        ("modules.json", lambda m: m.append({"path": "x", "type": "my_code.Head"}), "'my_code.Head' is code of"),
        ("modules.json", lambda m: m.pop(1), "must begin with Transformer, Pooling"),
        ("1_Pooling/config.json", lambda c: c.update(pooling_mode="median"), "'median' is not supported"),
        ("2_Dense/config.json", lambda c: c.update(activation_function="os.system"), "'os.system' is not supported"),
        ("2_Dense/config.json", lambda c: c.update(module_input_name="token_embeddings"), "anything but the sentence"),
        ("2_Dense/config.json", lambda c: c.update(twist=1), "twist is not supported"),
        ("2_Dense/config.json", lambda c: c.update(out_features=5), r"'linear.weight' has shape \[16, 48\]"),
        ("sentence_bert_config.json", lambda c: c.update(query_length=3), "query_length=3 is not supported"),
        ("config_sentence_transformers.json", lambda c: c.update(default_prompt_name="x"), "'x' is none of"),
    ],
)
def test_what_would_change_a_vector_and_is_not_known_is_named(
    transformers_folder, tmp_path, file, change, says
) -> None:
    _, path = saved(transformers_folder("bert"), tmp_path, Pooling(SIZE, "mean"), Dense(SIZE, 16))
    content = json.loads((path / file).read_text())
    change(content)
    (path / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=says):
        load_embedder(path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "1_Pooling/config.json", "tokenizer.json"])
def test_files_that_are_missing_are_named(transformers_folder, tmp_path, file) -> None:
    _, path = saved(transformers_folder("bert"), tmp_path, Pooling(SIZE, "mean"))
    copy = shutil.copytree(path, tmp_path / "copy")
    (copy / file).unlink()
    with pytest.raises(ModelLoadError, match=str(copy)):
        load_embedder(copy)
