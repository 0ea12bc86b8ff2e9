"""How `aioengine trace` reaches the server: which URL, which key, and what went wrong."""

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TextIO

from aioengine.flags import CommandParser

DEFAULT_URL: Final = "http://127.0.0.1:8000"
KEY_VARIABLE: Final = "AIOENGINE_ADMIN_API_KEY"
ANSWER_S: Final = 15.0
"""The server waits a few seconds for ranks that do not answer."""


class UnreachableError(Exception):
    """No answer that could be shown, and why."""


def configure(parser: CommandParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help=f"Of the server, its --root-path included [{DEFAULT_URL}].")
    where.add_argument("--endpoint-file", help="The file that the server wrote its URL to.")
    parser.add_argument("--admin-api-key", help=f"That of the server [{KEY_VARIABLE}].")
    parser.add_argument("--json", action="store_true", help="What the server says, as it is.")


def show(
    args: argparse.Namespace, what: str, print_answer: Callable[[dict[str, Any], TextIO], None]
) -> int:
    """One of the two commands, `stacks` or `state`; its exit status."""
    try:
        answer = fetch(args, f"/trace/{what}")
    except (ValueError, UnreachableError) as error:
        print(f"aioengine trace {what}: error: {error}", file=sys.stderr)
        return 1
    if getattr(args, "json", False):
        print(json.dumps(answer, indent=2))
    else:
        print_answer(answer, sys.stdout)
    return 0


def fetch(args: argparse.Namespace, path: str, works_s: float = 0.0) -> Any:
    """The server's answer, which may take it `works_s` to make. Raises UnreachableError and, for
    what was typed, ValueError."""
    given = vars(args)
    url = given.get("url", DEFAULT_URL)
    if "endpoint_file" in given:
        try:
            url = Path(given["endpoint_file"]).read_text().strip()
        except OSError as error:
            raise ValueError(
                f"--endpoint-file {given['endpoint_file']}: {error.strerror}"
            ) from None
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url must begin with http:// or https://, found {url!r}")
    key = given.get("admin_api_key") or os.environ.get(KEY_VARIABLE)
    if not key:
        raise ValueError(f"the server's admin key is needed: --admin-api-key, or {KEY_VARIABLE}")
    request = urllib.request.Request(
        url.rstrip("/") + path, headers={"Authorization": f"Bearer {key}"}
    )
    limit_s = ANSWER_S + works_s
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=limit_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise UnreachableError(f"{url} answers {error.code}: {_message(error)}") from None
    except TimeoutError:
        raise UnreachableError(
            f"{url} does not answer within {limit_s:g} s: the event loop of the rank that serves "
            "it is blocked, or its process is stopped; its log has the stacks, and every front end "
            "can be asked (--api-ranks leaders)"
        ) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise UnreachableError(f"no answer from {url}: {reason}") from None


def _message(error: urllib.error.HTTPError) -> str:
    """What the server's error object says, where there is one."""
    try:
        message: str = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        return error.reason
    return message
