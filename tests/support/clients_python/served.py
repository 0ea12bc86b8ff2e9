"""The launch that a suite talks to, and plain HTTP to compare with."""

import json
import os
import urllib.request
from typing import Any

URL = os.environ["SUITE_URL"]
KEY = os.environ["SUITE_KEY"]
V1 = f"{URL}/v1"
QUESTION = [{"role": "user", "content": "What is gravity?"}]
PROMPT = "The capital of France is"


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


MODEL: str = ask("/v1/models")["data"][0]["id"]


def chat(**fields: Any) -> Any:
    return ask("/v1/chat/completions", {"messages": QUESTION, "temperature": 0, **fields})


def completion(**fields: Any) -> Any:
    return ask("/v1/completions", {"prompt": PROMPT, "temperature": 0, **fields})
