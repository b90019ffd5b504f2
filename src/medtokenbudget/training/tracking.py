"""Where the numbers of a training go while it runs: `metrics.jsonl`, and TensorBoard where it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from medtokenbudget.files import append_line, sha256_json

CLOCK = "seconds"
"""What differs between two equal trainings."""


def log_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    """Hash of the rows of a `metrics.jsonl`, without the clock: equal trainings have equal hashes.

    In any order and however often: ablations that run at the same time write the same rows to the log of their training.
    """
    plain = ({name: value for name, value in row.items() if name != CLOCK} for row in rows)
    return sha256_json(sorted({json.dumps(row, sort_keys=True) for row in plain}))


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
