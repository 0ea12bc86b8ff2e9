"""Models of the Hugging Face hub: `org/name[@revision]`, `org/name[@revision]:file.gguf`.

The library is the extra `[hub]` and is imported only when a hub id is asked for. It reads HF_HOME,
HF_TOKEN and HF_HUB_OFFLINE itself.
"""

import fcntl
import importlib
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from aioengine.checkpoint.gguf_model import PART_NAME
from aioengine.checkpoint.json_object import read_json_object
from aioengine.errors import StartupTimeoutError

INSTALL: Final = "pip install 'aioengine[hub]'"
PATTERN: Final = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./-]+\.gguf))?"
)
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONFIG_FILES: Final = ("config.json", "generation_config.json")
INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"


@dataclass(frozen=True, slots=True)
class HubId:
    """What a person writes. `file` is a GGUF file of the repository, or any part of a split one."""

    repo: str
    revision: str | None
    file: str | None

    @property
    def name(self) -> str:
        """Without the revision."""
        return str(replace(self, revision=None))

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo}{revision}" + ("" if self.file is None else f":{self.file}")


def parse_hub_id(text: str) -> HubId | None:
    """None for what cannot be one."""
    match = PATTERN.fullmatch(text)
    return None if match is None else HubId(match["repo"], match["revision"], match["file"])


def fetch(hub_id: HubId, *, weights: bool, wait_s: float | None) -> tuple[Path, HubId]:
    """The snapshot's directory or GGUF file, and the id with the commit for its revision.

    Downloads what is read and not cached; `weights` False leaves the tensors out. Processes that
    share the cache take turns: the first downloads, the others find the files, or what it left when
    it died; each waits `wait_s` at most (None: for ever). With HF_HUB_OFFLINE only the cache is
    looked at. Raises ValueError for what cannot be had, StartupTimeoutError.
    """
    try:
        library: Any = importlib.import_module("huggingface_hub")
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        raise ValueError(f"{hub_id} is a hub id, which needs huggingface_hub: {INSTALL}") from None
    if constants.HF_HUB_OFFLINE:
        turn: Any = nullcontext()
    else:
        lock = f"aioengine--{hub_id.repo.replace('/', '--')}.lock"
        turn = _turn(Path(constants.HF_HUB_CACHE) / ".locks" / lock, wait_s)
    with turn:
        try:
            return _download(library.snapshot_download, hub_id, weights=weights)
        except Exception as error:  # the library lets those of its HTTP client through
            reason = str(error) or type(error).__name__
            if constants.HF_HUB_OFFLINE:
                reason += f" (HF_HUB_OFFLINE is set, the cache is {constants.HF_HUB_CACHE})"
            raise ValueError(f"hub id {hub_id}: {reason}") from error


def _download(snapshot: Any, hub_id: HubId, *, weights: bool) -> tuple[Path, HubId]:
    """`snapshot` is huggingface_hub.snapshot_download: it gives the snapshot's directory, whose
    name is the commit."""
    if hub_id.file is not None:
        parts = PART_NAME.fullmatch(hub_id.file)
        pattern = f"{parts['stem']}-*-of-{parts['count']}.gguf" if parts else hub_id.file
        folder = Path(snapshot(hub_id.repo, revision=hub_id.revision, allow_patterns=[pattern]))
        if not (folder / hub_id.file).is_file():
            raise FileNotFoundError(f"no file {hub_id.file} in {folder}")
        return folder / hub_id.file, replace(hub_id, revision=folder.name)

    texts = [*TOKENIZER_FILES, *CONFIG_FILES, INDEX_FILE]
    folder = Path(snapshot(hub_id.repo, revision=hub_id.revision, allow_patterns=texts))
    commit = folder.name
    if weights and (folder / INDEX_FILE).is_file():
        listed = read_json_object(folder / INDEX_FILE).get("weight_map") or {}
        files = sorted({str(file) for file in listed.values()})
        snapshot(hub_id.repo, revision=commit, allow_patterns=files)
    elif weights:
        snapshot(hub_id.repo, revision=commit, allow_patterns=[SINGLE_FILE])
        if not (folder / SINGLE_FILE).is_file():
            snapshot(
                hub_id.repo,
                revision=commit,
                allow_patterns=["*.safetensors"],
                ignore_patterns=["*/*"],
            )
    return folder, replace(hub_id, revision=commit)


@contextmanager
def _turn(lock: Path, wait_s: float | None) -> Iterator[None]:
    """Hold the lock file. The kernel frees it when its holder ends, however that happens."""
    taken: Future[None] = Future()

    def take() -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            taken.set_exception(error)
        else:
            taken.set_result(None)

    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as file:
            threading.Thread(target=take, name="hub lock", daemon=True).start()
            taken.result(wait_s)
            yield
    except TimeoutError:
        raise StartupTimeoutError(
            f"another process has been downloading for {wait_s:g} s and holds {lock}; "
            "--startup-timeout-seconds is the limit"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{lock}: cannot be locked: {error.strerror}; set HF_HOME to a directory where that "
            "works, or HF_HUB_OFFLINE=1 to use what is cached"
        ) from error
