"""Where the last percent goes: which patches took the places that the lesion lost, and how few images carry the loss.

A place is lost where a patch outside the lesion is kept although a lesion patch could have been. Patches that the mask covers by
more than a quarter, but that do not count as lesion, are ambiguous: keeping one is hardly a mistake. Patches covered by more than
three quarters are the core of a lesion: losing one is.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from medtokenbudget.metrics import ratio, reachable
from medtokenbudget.reporting.cells import seeds_note
from medtokenbudget.reporting.evidence import Evidence
from medtokenbudget.reporting.looks import look
from medtokenbudget.reporting.numbers import budget_text, percent
from medtokenbudget.reporting.patch_orders import PatchOrders
from medtokenbudget.reporting.table import Table, records

AMBIGUOUS, CORE = 0.25, 0.75
HARD = 0.9
"""An image that keeps less than this share of its ceiling is hard."""
_MOST_BUDGETS = 3
_COLUMNS = {
    "lost": "Lost (% of ceiling)",
    "to_ambiguous": "Lost to ambiguous (%)",
    "core_of_ceiling": "Core kept (% of ceiling)",
    "hard_images": "Images below 90% (%)",
    "loss_of_hard": "Their share of the loss (%)",
}


def lost_places(evidence: Evidence) -> Table | None:
    """One row per method and budget: where the lost places went, what was kept of the core, and which images carry the loss."""
    orders = evidence.orders
    if orders is None or not orders.has_mask.any():
        return None
    counts = evidence.main.drop_duplicates("budget").set_index("budget")["k"]
    found = [
        {
            "method": method,
            "seed": seed,
            "budget": budget,
            "k": int(counts[budget]),
            **split(orders, method, seed, int(counts[budget])),
        }
        for method, seed in orders.order
        for budget in evidence.budgets
        if counts[budget] < orders.lesion.shape[1]
    ]
    data = pd.DataFrame(found)
    if data.empty:
        return None
    budgets = [b for b in (0.1, 0.3, 0.5) if b in set(data["budget"])] or evidence.budgets[:_MOST_BUDGETS]
    methods = [m for m in evidence.emphasized if m in set(data["method"])]
    means = data.groupby(["method", "budget"], sort=False).mean(numeric_only=True).reset_index()
    shown = [means[(means["method"] == m) & np.isclose(means["budget"], b)] for m in methods for b in budgets]
    measured = {column: title for column, title in _COLUMNS.items() if means[column].notna().any()}
    rows = [
        [look(one.method).name, budget_text(one.budget), *(percent(getattr(one, column)) for column in measured)]
        for part in shown
        for one in records(part)
    ]
    return Table(
        "lost-places",
        "Where the lost places went, and which images carry the loss",
        ["Method", "Budget", *measured.values()],
        rows,
        data,
        f"n = {int(data['images'].max()):,} images with a lesion patch. Lost: places that went to patches outside the lesion "
        "although lesion patches were left. "
        + ("Ambiguous: the mask covers more than a quarter of such a patch. Core: patches covered by more than three quarters. ")
        * ("core_of_ceiling" in measured)
        + f"Below 90%: images that keep less than 90% of their ceiling. {seeds_note(data)}",
        labels=2,
        breaks=frozenset(range(len(budgets), len(rows), len(budgets))),
        more="all methods, budgets and seeds",
    )


def split(orders: PatchOrders, method: str, seed: int, k: int) -> dict[str, float]:
    """The loss of one method at K patches, over the images that have a lesion patch.

    Returns:
        images: Number of images.
        lost: Lost places over all reachable ones.
        to_ambiguous: Share of the lost places that went to ambiguous patches; NaN without the covered shares or without a loss.
        core_of_ceiling: Kept core patches over the core patches that fit; NaN without the covered shares.
        hard_images: Share of the images that keep less than 90 % of their ceiling.
        loss_of_hard: Share of the lost places that these images have.
    """
    lesion = orders.lesion & orders.has_mask[:, None]
    use = lesion.any(1)
    lesion, order = lesion[use], orders.order[method, seed][use]
    inside = np.take_along_axis(lesion, order, 1)  # [n, N] lesion patches, best first
    kept, most = inside[:, :k].sum(1), reachable(lesion.sum(1), k)
    lost = most - kept
    hard = kept < HARD * most
    result = {
        "images": float(len(lesion)),
        "lost": float(ratio(lost.sum(), most.sum())),
        "to_ambiguous": float("nan"),
        "core_of_ceiling": float("nan"),
        "hard_images": float(hard.mean()) if len(hard) else float("nan"),
        "loss_of_hard": float(ratio(lost[hard].sum(), lost.sum())),
    }
    if orders.covered is None:
        return result
    covered = np.take_along_axis(orders.covered[use], order, 1)
    # The places that the lesion lost are those of the best-ranked patches outside it.
    outside = ~inside[:, :k]
    taken = outside & (outside.cumsum(1) <= lost[:, None])
    core = covered > CORE
    return result | {
        "to_ambiguous": float(ratio((taken & (covered[:, :k] > AMBIGUOUS)).sum(), lost.sum())),
        "core_of_ceiling": float(ratio(core[:, :k].sum(), reachable(core.sum(1), k).sum())),
    }
