"""The demo model, loaded once for all whole-engine tests."""

import engines
import pytest

from izh.model.source import resolve
from izh.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo_source():
    return resolve("demo", None)


@pytest.fixture(scope="session")
def demo(demo_source):
    return engines.load(demo_source)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_source):
    return Tokenizer.load(demo_source.path)
