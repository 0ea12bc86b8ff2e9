"""Every line says whose it is; what cannot be tagged is in the rank's own file."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from support import noisy_rank

TAG = r"^\d\d:\d\d:\d\d\.\d{3} (INFO|WARNING|ERROR|CRITICAL) +\[rank 1 dp0 pp0 tp1\] "
TAGGED = ("a line", ".*UserWarning: a warning", "thread worker ended by an exception", ".*__del__")
RAW = ("from C++", "Fatal Python error: Segmentation fault")


def stderr_of_noisy_rank(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, noisy_rank.__file__, *args], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGSEGV
    return done.stderr


def check_tagged(text: str) -> None:
    for line in TAGGED:
        assert re.search(TAG + line, text, re.MULTILINE), line
    assert "RuntimeError: in a thread" in text


def test_without_a_log_dir_all_goes_to_stderr() -> None:
    text = stderr_of_noisy_rank()
    check_tagged(text)
    assert all(line in text for line in (*RAW, "to stderr"))


def test_with_a_log_dir_raw_output_goes_to_the_ranks_file(tmp_path: Path) -> None:
    text = stderr_of_noisy_rank(str(tmp_path / "new"))
    own = (tmp_path / "new" / "rank1.log").read_text()
    check_tagged(text)
    check_tagged(own)
    assert "to stderr" in text
    assert all(line in own and line not in text for line in RAW)
