"""The demo model, loaded once for all whole-engine tests: with the kernels for linear layers that are fastest here, or
with each choice of them forced in turn (`pytest tests/whole --every-kernel`, some minutes)."""

import engines
import pytest

from izh.model.source import resolve
from izh.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo_source():
    return resolve("demo", None)


def pytest_generate_tests(metafunc):
    if "kernels" in metafunc.fixturenames:
        names = list(engines.KERNELS) if metafunc.config.getoption("--every-kernel") else ["as measured"]
        metafunc.parametrize("kernels", [engines.KERNELS[name] for name in names], ids=names, scope="session")


@pytest.fixture(scope="session")
def demo(demo_source, kernels):
    return engines.load(demo_source, **kernels)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_source):
    return Tokenizer.load(demo_source.path)
