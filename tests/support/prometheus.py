"""A real Prometheus, from Debian's package, unpacked where nothing is installed."""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit


def prometheus_programs() -> Path:
    """The folder with `prometheus` and `promtool`; fetched once, kept for later."""
    root = Path(tempfile.gettempdir()) / "aioengine-clients" / "prometheus"
    programs, mark = root / "usr" / "bin", root / "complete"
    if not mark.exists():
        root.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "prometheus"], cwd=root, check=True)
        (package,) = root.glob("prometheus_*.deb")
        subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
        mark.touch()
    return programs


@contextmanager
def scraping(urls: Sequence[str], folder: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes these servers every second."""
    targets = [urlsplit(url).netloc for url in urls]
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        f"  - {{job_name: aioengine, static_configs: [{{targets: {targets}}}]}}\n"
    )
    process = subprocess.Popen(
        [
            prometheus_programs() / "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        log = ""
        for line in process.stderr:
            log += line
            if found := re.search(r"msg=.?Listening on.* address=(\S+)", line):
                break
        else:
            raise AssertionError(log)
        yield f"http://{found[1]}"
    finally:
        process.terminate()
        process.communicate()
