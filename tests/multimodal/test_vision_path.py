"""A VisionEncoder as eyes of a text model: where its rows go, and what names them."""

import json

import pytest
import seeing
import tiny_checkpoint
import torch
from PIL import Image
from seeing import NUM_ROWS, PLACEHOLDER, SECTIONS, image, picture, text, user

from izh.errors import ModelLoadError, RequestError
from izh.llm import LLM
from izh.multimodal import VisionConfig, VisionPath, VisionProcessor
from izh.multimodal.prompt import expand_images
from izh.multimodal.seam import MultimodalProcessor
from izh.request import SamplingParams
from izh.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint.save_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def path(folder):
    made: MultimodalProcessor = seeing.path(folder)
    return made


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), kv_cache_gb=0.02, num_threads=1, quiet=True, max_num_batched_tokens=64)


def prompt(path, messages, *pictures):
    prepared = path.prepare(pictures)
    layout = path.lay_out(messages, prepared)
    made = layout.prompt(path.encode(prepared))
    assert made.token_ids == layout.token_ids
    return made


ASKED = [user(text("a"), image("x"), text("b")), {"role": "assistant", "content": "c"}, user(image("y"))]


def test_each_image_part_becomes_its_rows_in_place(path, folder):
    made = prompt(path, ASKED, picture(1), picture(2))
    ids = Tokenizer.load(folder).chat(ASKED, image_id=-1)
    rows = path.encode(path.prepare([picture(1), picture(2)]))
    wanted = expand_images(ids, -1, rows, [(1, 4, 4)] * 2, SECTIONS)
    assert made.token_ids == [PLACEHOLDER if token == -1 else token for token in wanted.token_ids]
    assert torch.equal(made.positions, wanted.positions)
    assert made.image_rows.keys() == wanted.image_rows.keys()
    assert len(made.image_rows) == 2 * NUM_ROWS
    assert all(torch.equal(row, wanted.image_rows[place]) for place, row in made.image_rows.items())


def test_an_image_alone_and_in_a_batch_has_the_same_rows(path):
    prepared = path.prepare([picture(i) for i in range(5)])
    for one, together in zip(prepared, path.encode(prepared), strict=True):
        torch.testing.assert_close(path.encode([one])[0], together, atol=1e-5, rtol=1e-5)
    assert path.encode([]) == []


def test_the_digest_names_pixels_size_preparation_and_weights(path, folder):
    def digest(of=path, made=None):
        return of.prepare([made or picture(1)])[0].digest

    same, other_size = seeing.path(folder), picture(1).resize((19, 16))
    pixel = picture(1)
    pixel.putpixel((3, 3), (0, 1, 2))
    reloaded = seeing.path(folder, seed=1)
    larger = VisionConfig(**(vars(path.encoder.config) | {"image_size": 32}))
    torch.manual_seed(0)
    resized = VisionPath(Tokenizer.load(folder), type(path.encoder)(larger), PLACEHOLDER, SECTIONS)
    names = [
        digest(),
        digest(made=pixel),
        digest(made=other_size),
        digest(made=picture(1).rotate(180)),
        digest(made=Image.new("RGB", (20, 16))),
        digest(reloaded),
        digest(resized),
    ]
    assert digest(same) == names[0]
    assert len(set(names)) == len(names)


def test_what_does_not_fit_together_is_refused(folder):
    tokenizer, made = Tokenizer.load(folder), seeing.encoder()
    with pytest.raises(ValueError, match="placeholder_id must be within"):
        VisionPath(tokenizer, made, tokenizer.vocab_size, SECTIONS)
    other = VisionProcessor(VisionConfig(**(vars(made.config) | {"image_size": 32})))
    with pytest.raises(ValueError, match="images of 32 pixels, the encoder takes 16"):
        VisionPath(tokenizer, made, PLACEHOLDER, SECTIONS, other)


def test_a_saved_path_is_the_same_path(path, folder, tmp_path):
    path.save(tmp_path / "eyes")
    loaded = VisionPath.load(tmp_path / "eyes", Tokenizer.load(folder))
    one, other = (prompt(each, ASKED, picture(1), picture(2)) for each in (path, loaded))
    assert one.token_ids == other.token_ids
    assert one.sections == other.sections == SECTIONS
    assert all(torch.equal(row, other.image_rows[place]) for place, row in one.image_rows.items())
    assert path.prepare([picture(3)])[0].digest == loaded.prepare([picture(3)])[0].digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"placeholder": "hello world and more"}, "placeholder must be one token of this model, .* is "),
        ({"placeholder": 0}, "placeholder must be one token of this model, 0 is 0"),
        ({"sections": [2, 3]}, r"sections must be three counts of frequency pairs, got \[2, 3\]"),
        ({"sections": [-2, 3, 7]}, "sections must be three counts"),
        ({"sections": [True, 3, 3]}, "sections must be three counts"),
        ({"pixels": "gray, 0..1"}, "pixels are 'gray, 0..1', but images are prepared as 'rgb on white, bicubic to 16"),
        ({"pixels": None, "scale": 3}, "must be an object with placeholder, sections and pixels, and no more"),
    ],
)
def test_a_directory_that_says_something_else_is_refused(path, folder, tmp_path, change, message):
    path.save(tmp_path)
    file = tmp_path / "path.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelLoadError, match=f"path.json: {message}"):
        VisionPath.load(tmp_path, Tokenizer.load(folder))


def test_a_directory_with_an_encoder_only_is_refused(path, folder, tmp_path):
    path.encoder.save(tmp_path)
    with pytest.raises(ModelLoadError, match=r"path\.json"):
        VisionPath.load(tmp_path, Tokenizer.load(folder))
    (tmp_path / "path.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"path\.json"):
        VisionPath.load(tmp_path, Tokenizer.load(folder))


def test_one_batch_of_everything_is_each_alone(path, llm):
    prompts = [prompt(path, [user(image("x"), text(f"say {i}"))], picture(i)) for i in range(4)]
    texts = [llm.tokenizer.chat([{"role": "user", "content": f"hello {i}"}]) for i in range(4)]
    ids = [each for pair in zip([p.token_ids for p in prompts], texts, strict=True) for each in pair]
    features = [each for p in prompts for each in (p.features(), None)]
    together = llm.generate(ids, GREEDY, features=features)
    for one, own, answer in zip(ids, features, together, strict=True):
        llm.reset_prefix_cache()
        alone = llm.generate(one, GREEDY, features=None if own is None else own)[0]
        assert alone.outputs[0].token_ids == answer.outputs[0].token_ids


@pytest.mark.parametrize("tokens", [1, 3, 16, 64])
def test_every_chunk_size_and_few_blocks_give_the_same(path, folder, llm, tokens):
    made = [prompt(path, ASKED, picture(2 * i), picture(2 * i + 1)) for i in range(3)]
    # So long that they meet, though each joins when a thread has looked at its images.
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    llm.reset_prefix_cache()
    wanted = llm.generate([m.token_ids for m in made], params, features=[m.features() for m in made])
    # 17 blocks of 8: two are admitted and do not fit to their end, so one is preempted and computed again.
    block = 2 * 2 * 2 * 16 * 8 * 4
    few = LLM(
        str(folder),
        kv_cache_gb=17 * block / 2**30,
        block_size=8,
        num_threads=1,
        quiet=True,
        max_num_seqs=1 if tokens == 1 else 3,
        max_num_batched_tokens=max(tokens, 1),
        max_model_len=128,
    )
    got = few.generate([m.token_ids for m in made], params, features=[m.features() for m in made])
    assert [a.outputs[0].token_ids for a in got] == [a.outputs[0].token_ids for a in wanted]
    assert few._generating.core.stats.num_preempted > 0 or tokens == 1


def test_the_same_tokens_with_other_pixels_or_another_encoder_share_no_block(path, folder, llm):
    asked = [user(text("the quick brown fox jumps over the lazy dog " * 2), image("x"), text("hello world " * 6))]
    first = prompt(path, asked, picture(1))
    llm.reset_prefix_cache()
    cold = llm.generate(first.token_ids, GREEDY, features=first.features())[0]
    warm = llm.generate(first.token_ids, GREEDY, features=first.features())[0]
    start = min(first.image_rows)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens > max(first.image_rows)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    for other in (prompt(path, asked, picture(2)), prompt(seeing.path(folder, seed=1), asked, picture(1))):
        assert other.token_ids == first.token_ids
        answer = llm.generate(other.token_ids, GREEDY, features=other.features())[0]
        assert answer.num_cached_tokens == start // 16 * 16
        assert answer.outputs[0].token_ids != cold.outputs[0].token_ids
    plain = llm.generate(first.token_ids, GREEDY)[0]
    assert plain.num_cached_tokens == start // 16 * 16


def test_what_cannot_be_is_refused_before_anything_runs(path, llm):
    made = prompt(path, ASKED, picture(1), picture(2))
    with pytest.raises(RequestError, match="features"):
        llm.generate([made.token_ids[:-1]], GREEDY, features=made.features())
    with pytest.raises(RequestError, match="sections"):
        llm.generate(made.token_ids, GREEDY, features=made.features() | {"sections": (1, 1, 1)})
    with pytest.raises(RequestError, match="exactly the fields"):
        llm.generate(made.token_ids, GREEDY, features={})
    with pytest.raises(ValueError, match="2 prompts but 1 features"):
        llm.generate([made.token_ids, [5]], GREEDY, features=[made.features()])
    long = prompt(path, [user(text("x " * 130), image("x"))], picture(1))
    with pytest.raises(RequestError, match="exceeds the context of 256"):
        llm.generate(long.token_ids, GREEDY, features=long.features())
    assert llm.generate(made.token_ids, GREEDY, features=made.features())[0].outputs[0].finish_reason == "length"
