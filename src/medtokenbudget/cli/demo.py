"""`mtb demo`: everything on drawn images, offline and on a CPU."""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.cli.parsing import command_parser


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "demo",
        "Draw dermoscopic images, route some with the router of the package, extract their tokens with the embedded backbone, "
        "train the learned routers and the heads of the other methods, evaluate them at ten budgets and write a report. Works "
        "offline and on a CPU. If it is stopped, the same command resumes.",
        "mtb demo --out runs/demo",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="Run directory to write.")
    parser.add_argument("--n", type=int, default=1000, help="Number of images to draw.")
    parser.add_argument("--seed", type=int, default=0, help="Random seed of the drawings.")
    parser.add_argument(
        "--epochs", type=int | None, default=None, help="Train for this many epochs, for a quick look. Default: the paper's 50."
    )
    options = parser.parse_args(arguments)

    from medtokenbudget.api.tour import demo
    from medtokenbudget.experiments.results import read_results
    from medtokenbudget.experiments.summary import headline
    from medtokenbudget.progress import say

    page = demo(options.out, options.n, options.seed, options.epochs)
    print(headline(read_results(options.out / "results.csv")))
    say(f"Report: {page}. Next: open it in a browser, or run mtb explore {options.out / 'model'}")
    say("On your own dermoscopic images, without training: mtb route PHOTOS --overlay --out routed, or mtb explore")
    return 0
