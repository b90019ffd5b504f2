"""The automatic accessibility check: what axe-core finds serious or critical on a page."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

RUN = "axe.run().then(result => result.violations)"


def serious(page: Page, axe: str) -> list[str]:
    """Faults of a page, each with the element; `axe` is the source of axe-core."""
    page.evaluate(axe)
    return told(page.evaluate(RUN))


def told(found: list[dict[str, Any]]) -> list[str]:
    """The serious ones of axe's findings, as text."""
    return [
        f"{fault['id']}: {fault['nodes'][0]['html'][:200]} {fault['nodes'][0]['failureSummary']}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]
