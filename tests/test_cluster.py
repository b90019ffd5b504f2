"""A Ray cluster that cannot be reached: one clear message, in an extraction, a sweep and a routing."""

from __future__ import annotations

from pathlib import Path

import pytest

from medtokenbudget.cli import main
from tests.drawn import Drawn
from tests.small_model import small_backbone


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
