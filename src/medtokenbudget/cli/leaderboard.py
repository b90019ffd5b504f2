"""`mtb leaderboard RUN [RUN ...]`: one ranked table of the methods of several runs on the same images."""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.cli.values import budget


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "leaderboard",
        "Rank the methods of several runs on the same manifest and split in one table. Runs that are not comparable are rejected.",
        "mtb leaderboard runs/mine runs/theirs --out runs/board",
    )
    parser.add_argument("runs", nargs="+", type=str, metavar="RUN", help="Run directories written by `mtb sweep` or `reproduce`.")
    parser.add_argument("--out", type=str, required=True, metavar="DIR", help="Where the table is written as .md, .csv and .html.")
    parser.add_argument("--metric", type=str, default="balanced_accuracy", help="Column of results.csv to order by.")
    parser.add_argument("--budget", type=budget, default=0.3, help="Token budget of the numbers.")
    parser.add_argument("--view", type=str, default="as-is", choices=["as-is", "off-center"], help="Which view of the images.")
    options = parser.parse_args(arguments)

    from medtokenbudget.progress import say
    from medtokenbudget.reporting.leaderboard import leaderboard

    board = leaderboard(options.runs, options.metric, options.budget, options.view)
    page = board.write(Path(options.out))
    print(board.table.markdown())
    say(f"Open {page} in a browser. The numbers are in {page.with_suffix('.csv')}.")
    return 0
