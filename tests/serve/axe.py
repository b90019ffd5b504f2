"""The automatic accessibility check: what axe-core finds serious or critical on a page."""

from __future__ import annotations

from playwright.sync_api import Page


def serious(page: Page, axe: str) -> list[str]:
    """Faults of a page, each with the element; `axe` is the source of axe-core."""
    page.evaluate(axe)
    return [
        f"{fault['id']}: {fault['nodes'][0]['html'][:200]} {fault['nodes'][0]['failureSummary']}"
        for fault in page.evaluate("axe.run().then(result => result.violations)")
        if fault["impact"] in ("serious", "critical")
    ]
