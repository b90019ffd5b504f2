"""Worker processes: one that dies is a message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medtokenbudget.errors import WorkError
from medtokenbudget.workers import process_pool


def test_a_worker_that_dies_is_a_message_that_says_what_to_do() -> None:
    with (
        pytest.raises(WorkError, match=r"A worker process died.*`if __name__ == \"__main__\":`.*use fewer"),
        process_pool(1) as pool,
    ):
        pool.submit(os._exit, 1).result()


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from medtokenbudget.data.synthetic import Drawings, synthetic_manifest\n"
        f"synthetic_manifest({str(tmp_path / 'data')!r}, Drawings(n=20, size=32), workers=2)\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert 'only below `if __name__ == "__main__":`, or one (jobs=1, workers=1)' in ended.stderr
