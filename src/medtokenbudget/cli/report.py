"""`mtb report RUN`: tables, figures and one page from the results of a run."""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.cli.parsing import command_parser


def main(arguments: list[str]) -> int:
    parser = command_parser("report", "Write the tables, the figures and report.html of a finished run.", "mtb report runs/demo")
    parser.add_argument(
        "run", type=str, help="The run directory that `mtb train`, `mtb sweep`, `mtb reproduce` or `mtb demo` wrote."
    )
    parser.add_argument("--pictures", type=bool, default=True, help="'false' leaves images of the data set out of the page.")
    options = parser.parse_args(arguments)

    from medtokenbudget.progress import say
    from medtokenbudget.report import report

    page = report(Path(options.run), pictures=options.pictures)
    print(page)
    say(f"Open {page} in a browser; tables are in {page.parent / 'tables'}, figures in {page.parent / 'figures'}.")
    return 0
