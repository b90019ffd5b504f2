"""All benchmarks, one after the other: `make bench`. Figures are ratios within one run; absolute times are this machine's."""

from __future__ import annotations

import importlib

ALL = ("routing", "statistics", "reading", "extraction", "overhead", "embedded", "paper_flow")

if __name__ == "__main__":
    for name in ALL:
        print(f"\n== {name}", flush=True)
        importlib.import_module(f"benchmarks.{name}").main()
