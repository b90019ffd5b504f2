"""Everything that commands import, for the fork server of `tests.processes`."""

from __future__ import annotations

import importlib

for _module in (
    "api.predict",
    "api.train",
    "experiments.paper",
    "model.onnx",
    "reporting",
    "data",
):
    importlib.import_module(f"medtokenbudget.{_module}")
