"""Where the numbers of a training go while it runs: `metrics.jsonl`, and TensorBoard where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from medtokenbudget.files import append_line


class Tracker:
    """Writes one row per epoch."""

    def __init__(self, out: Path) -> None:
        self.path = Path(out) / "metrics.jsonl"
        self.board: Any = None
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(Path(out) / "tensorboard"))

    def write(self, row: dict[str, Any]) -> None:
        append_line(self.path, row)
        if self.board is not None:
            for name, value in row.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, row["epoch"])
