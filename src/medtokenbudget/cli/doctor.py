"""`mtb doctor`: checks this machine."""

from __future__ import annotations

import json

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.config import Positive

MARKS = {"ok": "ok", "note": "note", "missing": "MISSING"}


def main(arguments: list[str]) -> int:
    parser = command_parser("doctor", "Check what this machine has, and what to do about what is missing.", "mtb doctor --json")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("--timeout", type=Positive, default=2.0, help="Seconds to wait for the Hugging Face Hub.")
    options = parser.parse_args(arguments)

    from medtokenbudget.app.doctor import as_dicts, examine, healthy

    checks = examine(timeout=options.timeout)
    if options.json:
        print(json.dumps({"healthy": healthy(checks), "checks": as_dicts(checks)}, indent=2))
        return 0 if healthy(checks) else 1
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{MARKS[check.state]:<8} {check.name:<{width}}  {check.found}")
        if check.advice:
            print(f"{'':<8} {'':<{width}}  -> {check.advice}")
    print("Ready." if healthy(checks) else "Not ready: install what is marked MISSING.")
    return 0 if healthy(checks) else 1
