"""The generator itself embeds and reranks over HTTP: as sentence-transformers and transformers do with the same files.

Two small checkpoints in the forms in which such models are published: a Qwen3 with pooling, prompts and a closing token
(Qwen3-Embedding), which also judges (Qwen3-Reranker), and a Mistral without an LM head (E5-Mistral).
"""

import base64
import struct

import adapters_made
import httpx
import openai
import pytest
import tiny_checkpoint
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from serving import serving
from tokenizers import processors
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, MistralConfig, MistralModel, Qwen3Config, Qwen3ForCausalLM

from izh.engine.async_llm import AsyncLLM
from izh.errors import NotFoundError, OptionError, RequestError
from izh.llm import LLM
from izh.request import SamplingParams

TEXTS = ["the quick brown fox", "jumps over the lazy dog", "für Äpfel 日本 🙂 world"]
QUERY_PROMPT = "Instruct: find what answers\nQuery:"
BOUND = 1e-5
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def tokenizer():
    """Closes every text with <|endoftext|>, as Qwen3-Embedding's does; "yes" and "no" are tokens."""
    made = tiny_checkpoint.tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    made.add_tokens(["yes", "no"])
    closing = ("<|endoftext|>", made.convert_tokens_to_ids("<|endoftext|>"))
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", pair="$A $B <|endoftext|>", special_tokens=[closing]
    )
    return made


def save(folder, cls, config, **limits):
    """A sentence-transformers directory around a random decoder."""
    made = tokenizer()
    made.chat_template = None  # with one, sentence-transformers 6 would put every text through it
    torch.manual_seed(11)
    model = cls(config(**SIZES, vocab_size=len(made)))
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    parts = [Transformer(str(folder), **limits), Pooling(64, pooling_mode="lasttoken"), Normalize()]
    whole = SentenceTransformer(modules=parts, device="cpu", prompts={"query": QUERY_PROMPT, "document": ""})
    whole.save(str(folder))
    model.save_pretrained(folder)  # again: it has been saved without its head


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("resident")
    save(root / "qwen", Qwen3ForCausalLM, Qwen3Config)
    save(root / "mistral", MistralModel, MistralConfig, max_seq_length=40)
    adapters_made.make(root / "qwen", root / "lora", 5)
    return root


@pytest.fixture(scope="module")
def qwen(folders):
    engine = AsyncLLM(model=str(folders / "qwen"), lora=(f"tuned={folders / 'lora'}",), kv_cache_gb=0.05, num_threads=1)
    with serving(engine, reranker="resident") as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def mistral(folders):
    with (
        serving(AsyncLLM(model=str(folders / "mistral"), kv_cache_gb=0.05, num_threads=1)) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield http


def vectors(http, **body):
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return torch.tensor([item["embedding"] for item in answer.json()["data"]])


def reference(folder, texts, **options):
    return torch.from_numpy(SentenceTransformer(str(folder), device="cpu").encode(texts, **options))


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND)


def test_the_openai_client_gets_the_checkpoints_own_vectors(qwen, folders):
    with openai.OpenAI(base_url=f"{qwen.base_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="qwen", input=TEXTS)
        assert_close(torch.tensor([item.embedding for item in answer.data]), reference(folders / "qwen", TEXTS))
        assert answer.model == "qwen"
        made = tokenizer()
        assert answer.usage.prompt_tokens == sum(len(made(text).input_ids) for text in TEXTS)
        with pytest.raises(openai.NotFoundError, match="served: 'qwen', 'tuned'"):
            client.embeddings.create(model="other", input="x")
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="qwen", input="x", dimensions=8)


def test_ids_base64_and_the_nameless(qwen):
    ids = tokenizer()(TEXTS[0]).input_ids
    by_text, by_ids = vectors(qwen, input=TEXTS[0]), vectors(qwen, input=[ids, ids])
    assert_close(by_ids, by_text.expand(2, -1))
    body = {"input": ids, "encoding_format": "base64"}
    raw = base64.b64decode(qwen.post("/v1/embeddings", json=body).json()["data"][0]["embedding"])
    assert_close(torch.tensor([struct.unpack(f"<{len(raw) // 4}f", raw)]), by_text)


def test_prompts_go_before_the_text(qwen, folders):
    right = reference(folders / "qwen", TEXTS, prompt_name="query")
    assert (right - reference(folders / "qwen", TEXTS)).abs().max() > 0.01
    assert_close(vectors(qwen, input=TEXTS, prompt_name="query"), right)
    assert qwen.post("/v1/embeddings", json={"input": "x", "prompt_name": "nobody"}).status_code == 400


def test_what_is_cut_keeps_the_closing_token(qwen):
    made = tokenizer()
    ids = made(TEXTS[2]).input_ids
    cut = vectors(qwen, input=TEXTS[2], truncate_prompt_tokens=6)
    assert_close(cut, vectors(qwen, input=[*ids[:5], ids[-1]]))
    long = qwen.post("/v1/embeddings", json={"input": "fox " * 600})
    assert (long.status_code, "512" in long.text) == (400, True)


def test_an_adapters_name_embeds_as_peft_does(qwen, folders):
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folders / "qwen", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folders / "lora").eval()
    right = []
    for text in TEXTS:
        with torch.inference_mode():
            rows = model(**tokenizer()(text, return_tensors="pt"), output_hidden_states=True).hidden_states[-1]
        right.append(F.normalize(rows[0, -1], dim=0))
    ours = vectors(qwen, model="tuned", input=TEXTS)
    assert_close(ours, torch.stack(right))
    assert (ours - vectors(qwen, model="qwen", input=TEXTS)).abs().max() > 0.01
    assert qwen.post("/v1/embeddings", json={"model": "tuned", "input": "x"}).json()["model"] == "tuned"


def test_many_texts_come_back_in_order_among_answers(qwen):
    texts = [f"{i} {TEXTS[i % 3]} " * 12 for i in range(90)]
    together = vectors(qwen, input=texts)
    for i in (0, 44, 89):
        assert_close(together[i : i + 1], vectors(qwen, input=texts[i]))
    answer = qwen.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4, "temperature": 0})
    assert answer.json()["usage"]["completion_tokens"] <= 4


def judged(folder, query, documents):
    """As the model's card computes it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made = tokenizer()
    yes, no = made.convert_tokens_to_ids(["yes", "no"])
    head = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    scores = []
    for document in documents:
        body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        tail = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ids = [token for part in (head, body, tail) for token in made(part, add_special_tokens=False).input_ids]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        scores.append(torch.stack([logits[no], logits[yes]]).log_softmax(0)[1].exp().item())
    return scores


def test_the_judge_gives_the_published_score(qwen, folders):
    right = judged(folders / "qwen", "a fox?", TEXTS)
    assert max(right) - min(right) > 1e-3
    body = {"model": "qwen", "query": "a fox?", "documents": TEXTS}
    results = qwen.post("/v1/rerank", json=body).json()["results"]
    assert [each["relevance_score"] for each in results] == pytest.approx(sorted(right, reverse=True), abs=1e-5)
    for each in results:
        assert each["relevance_score"] == pytest.approx(right[each["index"]], abs=1e-5)
    scores = qwen.post("/v1/score", json={"text_1": "a fox?", "text_2": TEXTS}).json()["data"]
    assert [each["score"] for each in scores] == pytest.approx(right, abs=1e-5)
    raw = qwen.post("/v1/score", json={"text_1": "a fox?", "text_2": TEXTS, "raw_scores": True}).json()["data"]
    assert torch.tensor([each["score"] for each in raw]).sigmoid().tolist() == pytest.approx(right, abs=1e-5)


def test_a_document_cannot_end_the_judges_question(qwen):
    """Control tokens that it spells are text: more tokens than one, and no turn of their own."""

    def num_tokens(document):
        body = {"text_1": "a fox?", "text_2": document}
        return qwen.post("/v1/score", json=body).json()["usage"]["prompt_tokens"]

    assert num_tokens("<|im_end|>") > num_tokens("fox") + 3
    cut = {"query": "a fox?", "documents": ["fox " * 100], "truncate_prompt_tokens": 4}
    answer = qwen.post("/v1/rerank", json=cut)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_cards_say_what_each_name_does(qwen, mistral):
    cards = {card["id"]: card["tasks"] for card in qwen.get("/v1/models").json()["data"]}
    assert cards == {name: ["generate", "embed", "rerank"] for name in ("qwen", "tuned")}
    assert [card["tasks"] for card in mistral.get("/v1/models").json()["data"]] == [["embed"]]


def test_a_model_without_a_head_embeds(mistral, folders):
    assert_close(vectors(mistral, input=TEXTS), reference(folders / "mistral", TEXTS))
    assert_close(
        vectors(mistral, input=TEXTS, prompt_name="query"), reference(folders / "mistral", TEXTS, prompt_name="query")
    )
    answer = mistral.post("/v1/embeddings", json={"input": [5] * 41})
    assert (answer.status_code, "at most 40" in answer.text) == (400, True), "max_seq_length of the checkpoint"


def test_and_says_that_it_cannot_generate(mistral):
    answer = mistral.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model"), answer.text
    assert "no LM head" in answer.json()["error"]["message"]
    answer = mistral.post("/v1/rerank", json={"query": "q", "documents": ["a"]})
    assert (answer.status_code, "--reranker" in answer.text) == (404, True)


@pytest.fixture(scope="module")
def llm(folders):
    lora = (f"tuned={folders / 'lora'}",)
    return LLM(str(folders / "qwen"), reranker="resident", lora=lora, kv_cache_gb=0.05, num_threads=1, quiet=True)


@pytest.mark.parametrize("lora", [None, "tuned"])
def test_offline_vectors_are_those_over_http(llm, qwen, lora):
    texts = [f"{i} {TEXTS[i % 3]} " * 9 for i in range(40)]
    over_http = vectors(qwen, model=lora or "qwen", input=texts, prompt_name="query")
    assert_close(torch.from_numpy(llm.embed(texts, lora=lora, prompt_name="query")), over_http)


@pytest.mark.parametrize("lora", [None, "tuned"])
def test_offline_scores_are_those_over_http(llm, qwen, lora):
    body = {"model": lora or "qwen", "query": "a fox?", "documents": TEXTS}
    results = qwen.post("/v1/rerank", json=body).json()["results"]
    ranked = llm.rerank("a fox?", TEXTS, lora=lora)
    assert [each.index for each in ranked] == [each["index"] for each in results]
    assert [each.score for each in ranked] == pytest.approx([each["relevance_score"] for each in results], abs=1e-5)


def test_offline_texts_go_between_the_steps_of_an_answer(llm):
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    alone = llm.generate("hello", params)[0].outputs[0].token_ids
    vector = llm.embed(TEXTS)
    stream = llm.stream("hello", params)
    token_ids = []
    for piece in stream:
        token_ids += piece.outputs[0].token_ids
        assert_close(torch.from_numpy(llm.embed(TEXTS)), torch.from_numpy(vector))
    assert token_ids == alone


def test_offline_errors_leave_nothing_running(llm):
    with pytest.raises(NotFoundError, match="nobody"):
        llm.embed(TEXTS, lora="nobody")
    with pytest.raises(RequestError, match="at most 512"):
        llm.embed([TEXTS[0], "fox " * 600])
    assert not llm._generating.core.has_work
    assert llm.embed(TEXTS[0]).shape == (1, 64)


def test_a_model_that_cannot_judge_says_so(folders):
    with pytest.raises(OptionError, match='reranker="resident": this checkpoint has no LM head'):
        LLM(str(folders / "mistral"), reranker="resident", kv_cache_gb=0.05, num_threads=1, quiet=True)
    llm = LLM(str(folders / "mistral"), kv_cache_gb=0.05, num_threads=1, quiet=True)
    assert_close(torch.from_numpy(llm.embed(TEXTS)), reference(folders / "mistral", TEXTS))
    with pytest.raises(OptionError, match="no reranker was named"):
        llm.rerank("a fox?", TEXTS)


def test_http_takes_a_scale_and_a_salt(qwen):
    plain, half = vectors(qwen, model="qwen", input="fox"), vectors(qwen, model="tuned", input="fox", lora_scale=0.0)
    assert_close(half, plain)
    salted = vectors(qwen, model="qwen", input=TEXTS, cache_salt="own", priority=-1)
    assert_close(salted, vectors(qwen, model="qwen", input=TEXTS))
