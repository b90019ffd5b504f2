"""`mtb report RUN [RUN ...]`: tables, figures and one page from a run, or a comparison of several runs."""

from __future__ import annotations

import json
from pathlib import Path

from medtokenbudget.cli.parsing import command_parser


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "report",
        "Write tables, figures and report.html for a finished run. With several runs, compare them: the same tables with one row "
        "per run, and paired differences where the runs evaluated the same images.",
        "mtb report runs/a runs/b --out runs/a-vs-b",
    )
    parser.add_argument(
        "runs", nargs="+", type=str, metavar="RUN", help="Run directories written by `mtb train`, `sweep`, `reproduce` or `demo`."
    )
    parser.add_argument(
        "--out",
        type=str,
        default=None,
        metavar="DIR",
        help="Output directory. Defaults to the run directory; required for several runs.",
    )
    parser.add_argument("--json", action="store_true", help="Print the headline and comparison numbers as JSON on standard output.")
    parser.add_argument("--pictures", type=bool, default=True, help="'false' leaves images of the data set out of the page.")
    options = parser.parse_args(arguments)

    from medtokenbudget.progress import say
    from medtokenbudget.reporting.page import build

    built = build(options.runs, None if options.out is None else Path(options.out), pictures=options.pictures)
    if options.json:
        print(json.dumps({"page": str(built.page), **built.numbers}, indent=2, ensure_ascii=False))
    else:
        print(built.page)
        say(
            f"Open {built.page} in a browser. Tables are in {built.page.parent / 'tables'}, figures in "
            f"{built.page.parent / 'figures'}."
        )
    return 0
