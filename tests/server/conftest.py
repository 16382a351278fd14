"""One real server with a tiny random model for the tests of the HTTP face."""

import httpx
import openai
import pytest
import tiny_checkpoint
from serving import serving

from izh.engine.async_llm import AsyncLLM


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    folder = tiny_checkpoint.save_llama(tmp_path_factory.mktemp("model") / "tiny")
    llm = AsyncLLM(model=str(folder), kv_cache_gb=0.02, num_threads=1)
    with serving(llm, max_body_mb=0.25) as url:
        yield url


@pytest.fixture(scope="session")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def http(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
