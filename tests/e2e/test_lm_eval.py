"""lm-eval's `local-completions` scores and generates; its log-likelihoods are transformers'."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.client_venvs import client_venv
from support.launching import STORIES, Launch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model"),
]

VERSION = "0.4.13"
LIMIT_S = 600
TOLERANCE = 1e-3
ROWS = [
    {"context": "Once upon a time, there was a", "continuation": " little girl named Lily."},
    {"context": "Tim and his mom went to the", "continuation": " park to play."},
    {"context": "The big dog was", "continuation": " 日本 größe 🙂"},
    {"context": "She said:", "continuation": ' "Let\'s go home"'},
]
TASKS = {
    "scored": {
        "output_type": "loglikelihood",
        "doc_to_target": "{{continuation}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "generated": {
        "output_type": "generate_until",
        "doc_to_target": "{{continuation}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_likelihoods_and_generations(tmp_path: Path, batch_size: int) -> None:
    with Launch("--model", str(STORIES), "--dtype", "float32") as launch:
        samples = evaluate(launch.wait_ready(), tmp_path, batch_size)
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    for row, sample in zip(ROWS, samples["scored"], strict=True):
        assert sample["doc"] == row
        logprob, is_greedy = sample["filtered_resps"][0]
        wanted, wanted_greedy = log_likelihood(model, tokenizer, **row)
        assert float(logprob) == pytest.approx(wanted, abs=TOLERANCE)
        assert str(is_greedy) == str(wanted_greedy)
    for row, sample in zip(ROWS, samples["generated"], strict=True):
        assert sample["filtered_resps"][0] == generation(model, tokenizer, row["context"])


def evaluate(url: str, folder: Path, batch_size: int) -> dict[str, list[Any]]:
    """What lm-eval logs of every task's samples, in the order of ROWS."""
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test",
            "doc_to_text": "{{context}}",
        }
        (folder / f"{name}.yaml").write_text(json.dumps({**common, **task}))  # JSON is YAML
    program = client_venv(f"lm-eval[api]=={VERSION}") / "lm-eval"
    arguments = {
        "model": "stories260k",
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "remote",
        "max_length": 512,
    }
    command = [
        *(program, "run", "--model", "local-completions", "--tasks", ",".join(TASKS)),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--batch_size", str(batch_size), "--include_path", folder, "--log_samples"),
        *("--output_path", folder / "out"),
    ]
    environment = {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr[-5000:]
    samples = {}
    for name in TASKS:
        (path,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        logged = [json.loads(line) for line in path.read_text().splitlines()]
        samples[name] = sorted(logged, key=lambda sample: sample["doc_id"])
    return samples


def log_likelihood(
    model: Any, tokenizer: Any, context: str, continuation: str
) -> tuple[float, bool]:
    """Of the continuation's tokens, and whether each of them is the most probable."""
    num_context = len(tokenizer.encode(context, add_special_tokens=False))
    token_ids = tokenizer.encode(context + continuation, add_special_tokens=False)
    with torch.inference_mode():
        logprobs_TV = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    targets = list(enumerate(token_ids))[num_context:]
    chosen = [logprobs_TV[position - 1, token_id].item() for position, token_id in targets]
    greedy = all(logprobs_TV[position - 1].argmax() == token_id for position, token_id in targets)
    return sum(chosen), greedy


def generation(model: Any, tokenizer: Any, context: str) -> str:
    """Greedy text up to the first full stop, as lm-eval asks for it."""
    token_ids = tokenizer.encode(context, add_special_tokens=False)
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([token_ids]), max_new_tokens=24, do_sample=False, pad_token_id=0
        )[0].tolist()
    prefix = tokenizer.decode(token_ids)
    text: str = tokenizer.decode(whole, skip_special_tokens=True)[len(prefix) :]
    return text.partition(".")[0]
