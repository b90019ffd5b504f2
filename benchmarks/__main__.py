"""All benchmarks, one after the other: `make bench`. Figures are ratios within one run; absolute times are this machine's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

ALL = ("routing", "reading", "extraction", "selectors", "embedded", "paper_flow", "web")
ARGUMENTS = {"embedded": ["speed"]}


def run(names: Sequence[str] = ALL) -> None:
    for name in names:
        print(f"\n== {name}", flush=True)
        importlib.import_module(f"benchmarks.{name}").main(ARGUMENTS.get(name, []))


if __name__ == "__main__":
    run()
