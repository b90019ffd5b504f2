"""The report of a check as text for a terminal."""

from __future__ import annotations

from medtokenbudget.data.check import GRID, Finding, Report

# Supplement of the paper: lesion patches of the 155 validation masks on the 16 x 16 grid, and their share as printed there.
PAPER_PREVALENCE = {
    "minimum": "6 (2.3%)",
    "25th percentile": "35 (13.7%)",
    "median": "71 (27.7%)",
    "75th percentile": "104 (40.6%)",
    "maximum": "248 (96.9%)",
    "mean": "81.1 (31.6%)",
    "standard deviation": "58.3 (22.8%)",
}


def to_text(report: Report, shown: int = 8) -> str:
    """The report as text, with at most `shown` items of each finding (0 for all)."""
    head = f"{report.name}: {report.images:,} images · {report.source} · split {report.split_rule}"
    blocks = [head, _class_table(report)]
    if report.prevalence:
        blocks.append(_prevalence_table(report))
    blocks += [_finding(finding, shown) for finding in report.findings]
    fatal = len([finding for finding in report.findings if finding.severity == "fatal"])
    warnings = len(report.findings) - fatal
    blocks.append(f"Kinds of problems: {fatal} fatal, {warnings} warnings." if report.findings else "No problems found.")
    return "\n\n".join(blocks)


def _finding(finding: Finding, shown: int) -> str:
    items = finding.items[:shown] if shown else finding.items
    more = len(finding.items) - len(items)
    lines = [f"{finding.severity.upper()} {finding.kind} ({len(finding.items):,}): {finding.message}"]
    lines += [f"  {item}" for item in items]
    return "\n".join(lines + ([f"  and {more:,} more (use --all to list them)"] if more else []))


def _class_table(report: Report) -> str:
    """Images per class in each part, and in brackets those with a mask."""
    parts = [part for part in report.classes if part == "all" or any(report.classes[part].values())]
    names = list(report.classes["all"])
    width = max(8, *(len(name) for name in names))
    lines = ["Images per class (with a mask)", " " * width + "".join(f"{part:>18}" for part in parts)]
    for name in [*names, "total"]:
        cells = []
        for part in parts:
            images, masks = report.classes[part], report.masks[part]
            n = sum(images.values()) if name == "total" else images.get(name, 0)
            m = sum(masks.values()) if name == "total" else masks.get(name, 0)
            cells.append(f"{f'{n:,} ({m:,})':>18}")
        lines.append(f"{name:<{width}}" + "".join(cells))
    return "\n".join(lines)


def _prevalence_table(report: Report) -> str:
    patches = GRID[0] * GRID[1]
    parts = list(report.prevalence)
    lines = [
        f"Lesion patches of {patches} (share of the image); paper: its 155 validation masks",
        " " * 20 + "".join(f"{f'{part}, n={report.prevalence_images[part]:,}':>20}" for part in parts) + f"{'paper':>18}",
    ]
    for name, printed in PAPER_PREVALENCE.items():
        cells = [report.prevalence[part][name]["patches"] for part in parts]
        row = "".join(f"{f'{cell:.1f} ({cell / patches:.1%})':>20}" for cell in cells)
        lines.append(f"{name:<20}{row}{printed:>18}")
    return "\n".join(lines)
