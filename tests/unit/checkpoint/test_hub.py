"""Hub ids. The network is never touched: a fake download, or a cache directory written here."""

import fcntl
import fnmatch
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from support.ranks import TESTS

from aioengine.checkpoint.hub import HubId, fetch, parse_hub_id
from aioengine.checkpoint.source import read_model_config, resolve_model, resolve_tokenizer
from aioengine.errors import StartupTimeoutError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 4,
}
TEXTS = {"config.json": json.dumps(CONFIG), "tokenizer.json": "{}", "README.md": "", "a.bin": ""}


class FakeHub:
    """snapshot_download over repositories that are dicts of file name to content."""

    def __init__(self, cache: Path, files: dict[str, str]) -> None:
        self.folder = cache / "snapshots" / COMMIT
        self.files = files
        self.revisions: list[str | None] = []

    @property
    def downloaded(self) -> set[str]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix() for path in found}

    def download(
        self,
        repo: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str] | None = None,
    ) -> str:
        if repo != "org/name":
            raise RuntimeError(f"401: {repo} does not exist")
        self.revisions.append(revision)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns or ()):
                continue
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
        return str(self.folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


def serve(monkeypatch: pytest.MonkeyPatch, cache: Path, files: dict[str, str]) -> FakeHub:
    hub = FakeHub(cache, TEXTS | files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.download)
    return hub


def test_what_an_id_looks_like() -> None:
    assert parse_hub_id("org/name") == HubId("org/name", None, None)
    assert parse_hub_id("o-r.g/n_a.me@v1.0") == HubId("o-r.g/n_a.me", "v1.0", None)
    whole = HubId("org/name", "refs/pr/1", "sub/m-Q4_0.gguf")
    assert parse_hub_id("org/name@refs/pr/1:sub/m-Q4_0.gguf") == whole
    assert (str(whole), whole.name) == (
        "org/name@refs/pr/1:sub/m-Q4_0.gguf",
        "org/name:sub/m-Q4_0.gguf",
    )
    for text in ("name", "/org/name", "./name", "a/b/c", "org/name@", "org/name:x.bin", "~/name"):
        assert parse_hub_id(text) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["model.safetensors", "consolidated.safetensors"], {"model.safetensors"}),
        (["weights.safetensors", "onnx/model.safetensors"], {"weights.safetensors"}),
    ],
)
def test_only_what_is_read_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, cache: Path, files: list[str], expected: set[str]
) -> None:
    hub = serve(monkeypatch, cache, dict.fromkeys(files, ""))
    source = resolve_model("org/name@main")
    assert (source.path, source.kind) == (hub.folder, "hf")
    assert str(source.hub_id) == f"org/name@{COMMIT}"
    assert hub.downloaded == {"config.json", "tokenizer.json", *expected}
    assert hub.revisions[0] == "main"
    assert set(hub.revisions[1:]) == {COMMIT}, "the first answer decides for the rest"
    assert read_model_config(source).name == "org/name"


def test_the_index_names_the_files(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.dumps({"weight_map": {"a": parts[0], "b": parts[1], "c": parts[1]}})
    files = {"model.safetensors.index.json": index, "model.safetensors": "", "x.safetensors": ""}
    hub = serve(monkeypatch, cache, files | dict.fromkeys(parts, ""))
    resolve_model("org/name")
    texts = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert hub.downloaded == {*texts, *parts}


def test_gguf_files(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    parts = [f"big-0000{n}-of-00002.gguf" for n in (1, 2)]
    hub = serve(monkeypatch, cache, dict.fromkeys(["one.gguf", "two.gguf", *parts], "GGUF"))
    source = resolve_model("org/name:one.gguf")
    assert (source.path, source.kind) == (hub.folder / "one.gguf", "gguf")
    assert hub.downloaded == {"one.gguf"}
    assert resolve_model(f"org/name:{parts[1]}").path.name == parts[0]
    assert hub.downloaded == {"one.gguf", *parts}
    with pytest.raises(ValueError, match=r"org/name:three\.gguf: no file three\.gguf"):
        resolve_model("org/name:three.gguf")


def test_a_tokenizer_needs_no_weights(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    hub = serve(monkeypatch, cache, {"model.safetensors": ""})
    model = resolve_model(str(hub_directory(cache.parent / "local")))
    assert resolve_tokenizer("org/name", model).path == hub.folder
    assert hub.downloaded == {"config.json", "tokenizer.json"}


def hub_directory(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_what_is_here_never_touches_the_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub_directory(tmp_path / "org")
    (tmp_path / "org" / "name").mkdir()
    hub_directory(tmp_path / "org" / "name" / "deep")
    monkeypatch.chdir(tmp_path / "org")
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    assert resolve_model("name/deep").hub_id is None


def test_errors_say_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    serve(monkeypatch, cache, {})
    with pytest.raises(ValueError, match=r"--model: 'a/b' is neither .*hub id a/b: 401: a/b does"):
        resolve_model("a/b")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"needs huggingface_hub: pip install 'aioengine\[hub\]'"):
        resolve_model("org/name")


def test_a_cache_that_cannot_be_locked(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ValueError, match=r"org--name\.lock: cannot be locked: .*set HF_HOME"):
        resolve_model("org/name")


# --- offline, through the real library ----------------------------------------------------------


def write_cache(cache: Path, *names: str) -> Path:
    """The layout of huggingface_hub: refs, blobs, snapshots of links."""
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    for directory in (repo / "refs", repo / "blobs", snapshot):
        directory.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for name in names:
        (repo / "blobs" / name).write_text(TEXTS.get(name, ""))
        (snapshot / name).symlink_to(repo / "blobs" / name)
    return snapshot


@pytest.mark.parametrize("model", ["org/name", "org/name@main", f"org/name@{COMMIT}"])
def test_offline_uses_the_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, model: str) -> None:
    snapshot = write_cache(cache, "config.json", "tokenizer.json", "model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = resolve_model(model)
    assert source.path == snapshot
    assert str(source.hub_id) == f"org/name@{COMMIT}"
    assert not (cache / ".locks").exists(), "nothing is written: the cache may be read-only"


def test_offline_without_it_says_so(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"hub id org/name: .*HF_HUB_OFFLINE is set, the cache is"):
        resolve_model("org/name")
    write_cache(cache, "tokenizer.json")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model("org/name")


# --- taking turns --------------------------------------------------------------------------------


def test_waiting_has_a_limit(cache: Path) -> None:
    lock = cache / ".locks" / "aioengine--org--name.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(StartupTimeoutError, match=r"0\.05 s .*--startup-timeout-seconds"):
            fetch(HubId("org/name", None, None), weights=False, wait_s=0.05)


def start(cache: Path, manner: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "support.hub_fetch", str(cache), manner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
    )


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_of_two_processes_downloads(tmp_path: Path) -> None:
    with start(tmp_path, "finish") as first:
        assert line(first) == "downloading"
        with start(tmp_path, "finish") as second:
            first.communicate("go\n")
            assert second.communicate()[0].split() == ["got", "c0ffee", "org/name@c0ffee"]


def test_a_downloader_that_dies_is_replaced(tmp_path: Path) -> None:
    with start(tmp_path, "hang") as first:
        assert line(first) == "downloading"
        with start(tmp_path, "finish") as second:
            first.kill()
            assert line(second) == "downloading"
            assert second.communicate("go\n")[0].strip() == "got c0ffee org/name@c0ffee"


def test_weights_are_left_out_where_nobody_reads_them(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    hub = serve(monkeypatch, cache, {"model.safetensors": ""})
    source = resolve_model("org/name", weights=False)
    assert read_model_config(source).num_layers == 1
    assert hub.downloaded == {"config.json", "tokenizer.json"}
