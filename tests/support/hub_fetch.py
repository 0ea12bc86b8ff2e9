"""Run by test_hub.py: one process that fetches a hub id, with a download that leaves a trace.

Arguments: directory of the cache, a word that makes the download hang or finish. Says "downloading"
when it begins, and what it got in the end.
"""

import sys
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants

from aioengine.checkpoint.hub import fetch, parse_hub_id


def main() -> None:
    cache, manner = Path(sys.argv[1]), sys.argv[2]
    snapshot = cache / "snapshots" / "c0ffee"

    def snapshot_download(repo: str, **options: Any) -> str:
        if not (snapshot / "config.json").exists():
            print("downloading", flush=True)
            if manner == "hang":
                threading.Event().wait()
            sys.stdin.readline()
            snapshot.mkdir(parents=True, exist_ok=True)
            (snapshot / "config.json").write_text("{}")
        return str(snapshot)

    constants.HF_HUB_CACHE = str(cache)
    constants.HF_HUB_OFFLINE = False
    huggingface_hub.snapshot_download = snapshot_download
    hub_id = parse_hub_id("org/name")
    assert hub_id is not None
    path, pinned = fetch(hub_id, weights=False, wait_s=60)
    print("got", path.name, pinned, flush=True)


if __name__ == "__main__":
    main()
