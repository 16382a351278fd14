"""The demo embedder against sentence-transformers: every kind of text, batch and single."""

import random

import pytest
import torch
from sentence_transformers import SentenceTransformer

from izh.model.demo_embedder import demo_embedder_directory
from izh.pooling import load_embedder

TEXT = "The quick brown fox, embedding 42 searches; naïve café größer 東京 🙂 कुछ don't http://x.y/z?q=1 __init__"
CODE = "def f(xs):\n    return {x: [i ** 2 for i in range(x)] for x in xs if x % 3 == 0}  # comment\n"


def texts() -> list[str]:
    """200 of them: near-empty, words of many scripts at every length, code, and some far beyond 512 tokens."""
    generator = random.Random(0)
    made = ["", " ", ".", "a", "\n\t", "🙂", "日本", "\u0000", "[SEP]", "ﬁ"]
    made += [" ".join(generator.choices(TEXT.split(), k=k)) for k in range(1, 151)]
    made += [CODE * k for k in range(1, 21)]
    made += [" ".join(generator.choices(TEXT.split(), k=400)) for _ in range(20)]
    return made


@pytest.fixture(scope="module")
def service():
    made = load_embedder("demo", max_model_len=512)
    yield made
    made.close()


async def test_vectors_are_those_of_sentence_transformers(service) -> None:
    model = SentenceTransformer(str(demo_embedder_directory()), device="cpu")
    model.max_seq_length = 512
    given = texts()
    assert len(given) == 200
    theirs = torch.from_numpy(model.encode(given, batch_size=16))
    ours, num_tokens = await service.vectors(given, truncate_prompt_tokens=-1)
    cosines = torch.nn.functional.cosine_similarity(ours.double(), theirs.double())
    assert cosines.min() >= 1 - 1e-6
    torch.testing.assert_close(ours.norm(dim=1), torch.ones(200))
    cut = model.tokenizer(given, truncation=True, max_length=512)["input_ids"]
    assert num_tokens == sum(map(len, cut))
    assert max(map(len, cut)) == 512


async def test_a_text_alone_has_the_same_vector_to_the_last_bit(service) -> None:
    given = texts()[::9]
    together, _ = await service.vectors(given, truncate_prompt_tokens=-1)
    for text, vector in zip(given, together, strict=True):
        alone, _ = await service.vectors(text, truncate_prompt_tokens=-1)
        assert torch.equal(alone[0], vector)


async def test_the_checkpoints_own_limit_is_256(service) -> None:
    own = load_embedder("demo")
    assert own.max_model_len == 256
    own.close()


async def test_meanings(service) -> None:
    query = "How do I feed a kitten?"
    documents = ["Raising a young cat at home", "The price of copper futures", "What to give a baby cat to eat"]
    vectors, _ = await service.vectors([query, *documents])
    scores = vectors[1:] @ vectors[0]
    assert scores.argsort(descending=True).tolist() == [2, 0, 1]
    assert scores[2] > scores[1] + 0.4
