"""`mtb explore`: `mtb serve`, plus the browser."""

from __future__ import annotations

from medtokenbudget.cli import serve


def main(arguments: list[str]) -> int:
    return serve.main(arguments, name="explore", open_browser=True)
