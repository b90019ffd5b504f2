"""`mtb demo`: the whole story on drawn images, offline, on a CPU."""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.cli.parsing import command_parser


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "demo",
        "Draw dermoscopic images, extract them with the embedded backbone, train LATS for the paper's 50 epochs and every other "
        "method's head, evaluate all of them at ten budgets, write a report. Needs no network; stopped, the same command goes on.",
        "mtb demo --out runs/demo",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="The run directory.")
    parser.add_argument("--n", type=int, default=1000, help="Number of drawn images.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the drawings.")
    parser.add_argument("--epochs", type=int | None, default=None, help="Fewer epochs, for a quick look; default: the paper's.")
    options = parser.parse_args(arguments)

    from medtokenbudget.api.tour import demo
    from medtokenbudget.experiments.results import read_results
    from medtokenbudget.experiments.summary import headline
    from medtokenbudget.progress import say

    page = demo(options.out, options.n, options.seed, options.epochs)
    print(headline(read_results(options.out / "results.csv")))
    say(f"report: {page}. Next: open it, or run mtb explore {options.out / 'model'}")
    return 0
