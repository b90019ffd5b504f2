"""`mtb demo`: a tour of the product on drawn images, offline and on a CPU."""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.config import Count, Seed


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "demo",
        "A tour in three steps: route drawn samples with the ready-made router; draw dermoscopic images, extract their tokens with "
        "the embedded backbone, train routers and the heads of the other methods and evaluate them at ten budgets; write a report. "
        "Works offline and on a CPU. If it is stopped, the same command resumes.",
        "mtb demo --out runs/demo",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="Run directory to write.")
    parser.add_argument("--n", type=Count, default=1000, help="Number of images to draw.")
    parser.add_argument("--seed", type=Seed, default=0, help="Random seed of the drawings.")
    parser.add_argument(
        "--epochs", type=Count | None, default=None, help="Train for this many epochs, for a quick look. Default: the paper's 50."
    )
    options = parser.parse_args(arguments)

    from medtokenbudget.api import demo
    from medtokenbudget.progress import say
    from medtokenbudget.runs.run import RunInfo, headline

    page = demo(options.out, options.n, options.seed, options.epochs)
    print(headline(RunInfo.read(options.out).results()))
    say(
        f"Report: {page}. Next:\n"
        f"  open {page} in a browser: what was kept, at every budget, beside the controls\n"
        "  mtb route YOUR_IMAGES --overlay --out routed: the ready-made router on your own images\n"
        f"  mtb explore {options.out / 'model'}: look at patches, scores and budgets in the browser\n"
        "  docs/getting-started.md: train a router on your own images and masks"
    )
    return 0
