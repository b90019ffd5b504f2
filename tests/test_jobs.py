"""Jobs: a worker process that dies and a Ray cluster that cannot be reached are a message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medtokenbudget.cli import main
from medtokenbudget.errors import WorkError
from medtokenbudget.jobs import process_pool
from tests.drawn import Drawn
from tests.small_model import small_backbone


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


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "127.0.0.1:99999"])
@pytest.mark.parametrize("command", ["extract", "sweep", "route"])
def test_a_wrong_address_is_a_message_and_not_a_traceback(
    command: str, address: str, drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    backbone = small_backbone(drawn.store_path.parent)
    manifest, out = str(drawn.manifest_path), str(tmp_path / "out")
    arguments = {
        "extract": ["--store", out, "--backbone", backbone.name, "--weights", str(backbone.weights), "--image-size", "160"],
        "sweep": ["--store", str(drawn.store_path), "--out", out, "--methods", "center"],
        "route": ["--out", out],
    }
    code = main([command, manifest, *arguments[command], "--engine", "ray", "--address", address, "--device", "cpu"])
    assert code == 1
    message = capsys.readouterr().err
    assert f"No Ray cluster answers at '{address}'" in message
    assert "Check --address, or run on this machine with --engine local." in message
