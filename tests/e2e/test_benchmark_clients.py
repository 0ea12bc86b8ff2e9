"""aiperf and evalscope measure tp2·pp2 with the default model: no errors, every token counted.

Not guidellm: it needs a torch of its own with all of CUDA; evalscope comes to 1.2 GB without.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.client_venvs import client_venv
from support.launching import Launch
from transformers import AutoTokenizer

from aioengine.checkpoint.source import resolve_model

pytestmark = pytest.mark.clients

AIPERF = "aiperf==0.13.0"
EVALSCOPE = "evalscope[perf]==1.14.1"
KEY = "sesame"
MODEL = "served"
LIMIT_S = 300
NUM_REQUESTS = 12
INPUT_LEN = 64
OUTPUT_LEN = 16
LOAD = {"concurrency": 4, "request-count": NUM_REQUESTS, "isl": INPUT_LEN, "osl": OUTPUT_LEN}
EXACTLY = {"ignore_eos": True, "min_tokens": OUTPUT_LEN, "temperature": 0}
"""Asks for answers of full length."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    flags = ("-tp", "2", "-pp", "2", "--api-key", KEY, "--served-model-name", MODEL)
    with Launch(*flags, num_ranks=4) as launch:
        yield launch.wait_ready()
        assert "Traceback" not in launch.log
        assert "ignoring request fields" not in launch.log


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the default model's, as tools want it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    model = resolve_model(None).path
    AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(folder)
    return folder


def run(command: list[Any], home: Path) -> None:
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=home,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-10_000:]


# --- aiperf --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "flags"),
    [
        ("chat", ["--streaming", "--use-server-token-count"]),
        ("chat", ["--streaming", "--use-server-token-count", "--per-chunk-usage"]),
        ("chat", ["--use-legacy-max-tokens"]),
        ("completions", ["--streaming"]),
    ],
)
def test_aiperf(url: str, tokenizer: Path, tmp_path: Path, endpoint: str, flags: list[str]) -> None:
    found, server = profile(url, tokenizer, tmp_path, endpoint, *flags)
    assert found["error_summary"] == []
    assert found["request_error_rate"]["avg"] == 0
    assert found["completed_request_count"]["avg"] == NUM_REQUESTS
    lengths = found["output_sequence_length"]
    if "--use-server-token-count" in flags:
        assert (lengths["min"], lengths["max"]) == (OUTPUT_LEN, OUTPUT_LEN)
    else:  # the client makes tokens of the text again: these may be others
        assert lengths["avg"] == pytest.approx(OUTPUT_LEN, abs=1)
    prompt_lengths = found["input_sequence_length"]
    if endpoint == "completions":
        assert (prompt_lengths["min"], prompt_lengths["max"]) == (INPUT_LEN, INPUT_LEN)
    assert found["total_usage_completion_tokens"]["avg"] == NUM_REQUESTS * OUTPUT_LEN
    assert found["http_req_connection_reused"]["avg"] > 0
    if "--streaming" in flags:
        assert found["inter_token_latency"]["avg"] > 0
        assert found["http_req_chunks_received"]["avg"] > OUTPUT_LEN / 2
    assert total(server, "aioengine:generation_tokens") == NUM_REQUESTS * OUTPUT_LEN
    assert total(server, "aioengine:prompt_tokens") == found["total_usage_prompt_tokens"]["avg"]
    assert total(server, "aioengine:request_success", finished_reason="length") == NUM_REQUESTS
    assert total(server, "aioengine:request_success", finished_reason="error") == 0


def test_aiperf_hangs_up(url: str, tokenizer: Path, tmp_path: Path) -> None:
    """Half of the requests are cancelled on their way; the server stops computing them."""
    hang_up = ["--request-cancellation-rate", "50", "--request-cancellation-delay", "0.5"]
    found, server = profile(
        url, tokenizer, tmp_path, "chat", "--streaming", *hang_up, osl=1000, concurrency=2
    )
    kinds = {entry["error_details"]["type"]: entry["count"] for entry in found["error_summary"]}
    num_cancelled = kinds.pop("RequestCancellationError")
    assert kinds == {}
    assert 0 < num_cancelled < NUM_REQUESTS
    assert total(server, "aioengine:request_success", finished_reason="abort") == num_cancelled


def profile(
    url: str, tokenizer: Path, folder: Path, endpoint: str, *flags: str, **load: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What aiperf exports, and what it read at /metrics.

    No HF_HUB_OFFLINE: with it aiperf takes a folder's path for a hub id.
    """
    asked = {**LOAD, **load}
    extra = {**EXACTLY, "min_tokens": asked["osl"]}
    command: list[Any] = [
        *(client_venv(AIPERF) / "aiperf", "profile", "--url", url, "--api-key", KEY),
        *("--model", MODEL, "--tokenizer", tokenizer),
        *("--endpoint-type", endpoint, *flags, "--extra-inputs", json.dumps(extra)),
        *("--random-seed", "1", "--ui", "none", "--artifact-dir", folder / "out"),
    ]
    for name, value in asked.items():
        command += [f"--{name}", value]
    run(command, folder)
    exported, server = (
        json.loads((folder / "out" / name).read_text())
        for name in ("profile_export_aiperf.json", "server_metrics_export.json")
    )
    return exported, server["metrics"]


def total(metrics: dict[str, Any], name: str, **labels: str) -> float:
    """What a counter grew by while aiperf measured."""
    (found,) = (
        series for series in metrics[name]["series"] if labels.items() <= series["labels"].items()
    )
    grown: float = found["stats"]["total"]
    return grown


# --- evalscope -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "flags"),
    [
        ("chat/completions", ["--stream"]),
        ("chat/completions", ["--no-stream", "--logprobs", "--frequency-penalty", "0.1"]),
        ("completions", ["--stream", "--tokenize-prompt"]),
    ],
)
def test_evalscope(url: str, tokenizer: Path, tmp_path: Path, route: str, flags: list[str]) -> None:
    """`--tokenize-prompt` sends token ids."""
    command = [
        *(client_venv(EVALSCOPE) / "evalscope", "perf", "--api", "openai", "--api-key", KEY),
        *("--url", f"{url}/v1/{route}", "--model", MODEL),
        *("--tokenizer-path", tokenizer, "--dataset", "random"),
        *("--min-prompt-length", INPUT_LEN, "--max-prompt-length", INPUT_LEN),
        *("--min-tokens", OUTPUT_LEN, "--max-tokens", OUTPUT_LEN, "--temperature", 0),
        *("--extra-args", json.dumps({"ignore_eos": True}), "--seed", 1, *flags),
        *("--parallel", 4, "--number", NUM_REQUESTS, "--num-workers", 1),
        *("--outputs-dir", tmp_path / "out", "--no-timestamp"),
    ]
    run(command, tmp_path)
    (summary,) = (tmp_path / "out").rglob("benchmark_summary.json")
    found = json.loads(summary.read_text())
    assert (found["Success Requests"], found["Failed Requests"]) == (NUM_REQUESTS, 0)
    assert found["Stream Requests"] == (NUM_REQUESTS if "--stream" in flags else 0)
    assert (found["Avg Input Tokens"], found["Avg Output Tokens"]) == (INPUT_LEN, OUTPUT_LEN)
