"""Ask a running server one question and print the answer as it streams.

python launch/ask.py http://127.0.0.1:8000 "What is a rank?"

OPENAI_API_KEY is sent to a server that wants a key.
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

# The server is ours: no proxy of the environment stands between.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(Exception):
    """The error object of the API, as text."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="what the server's endpoint file says")
    parser.add_argument("question")
    args = parser.parse_args()
    try:
        for piece in answer(args.url.rstrip("/"), args.question):
            print(piece, end="", flush=True)
    except urllib.error.HTTPError as error:
        print(f"error: {error.code} {error.read().decode(errors='replace')}", file=sys.stderr)
        return 1
    except (ServerError, OSError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    print()
    return 0


def answer(url: str, question: str) -> Iterator[str]:
    """The pieces of the answer's text."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    models = urllib.request.Request(f"{url}/v1/models", headers=headers)
    with OPENER.open(models, timeout=60) as response:
        model = json.load(response)["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 200,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers=headers,
    )
    with OPENER.open(request, timeout=300) as response:
        for event in events(response):
            if "error" in event:
                raise ServerError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


def events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, which must end with [DONE]."""
    for line in lines:
        data = line.decode().removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if line.startswith(b"data:"):
            yield json.loads(data)
    raise ServerError("the stream ended early")


if __name__ == "__main__":
    sys.exit(main())
