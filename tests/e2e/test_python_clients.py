"""Released Python clients against tp2·pp2 with the default model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.client_suites import run_suite
from support.launching import Launch

pytestmark = pytest.mark.clients

LANGCHAIN = "langchain-openai==1.7.4"
LITELLM = "litellm==1.110.2"
KEY = "sesame"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Launch("-tp", "2", "-pp", "2", "--api-key", KEY, num_ranks=4) as launch:
        yield launch.wait_ready()
        assert "Traceback" not in launch.log
        assert "ignoring request fields" not in launch.log


def test_langchain_openai(url: str, tmp_path: Path) -> None:
    run_suite("langchain_suite.py", LANGCHAIN, url, KEY, tmp_path, LANGSMITH_TRACING="false")


def test_litellm(url: str, tmp_path: Path) -> None:
    run_suite("litellm_suite.py", LITELLM, url, KEY, tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
