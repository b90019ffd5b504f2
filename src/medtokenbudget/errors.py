"""Errors that users see.

Each message says what is wrong, where, and what to do next. The command line prints it without a traceback and exits with its code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class MedTokenBudgetError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1


class MedTokenBudgetWarning(UserWarning):
    """Something that users should know but that does not stop the work."""


class WorkError(MedTokenBudgetError, RuntimeError):
    """The request was valid but the work failed (disk full, hub unreachable, a loss that is not finite)."""


class RequestError(MedTokenBudgetError, ValueError):
    """The request was wrong: an invalid argument, file or combination of options."""

    exit_code = 2


class ShapeError(RequestError):
    """A tensor does not have the documented shape."""


class GridError(ShapeError):
    """A grid does not multiply to the number of patches."""


class NonFiniteError(RequestError):
    """A tensor contains NaN or infinity."""


class BudgetError(RequestError):
    """A token budget is outside (0, 1]."""


class CountError(RequestError):
    """A number of tokens to keep is outside 1..N."""


class MissingSignalError(RequestError):
    """A selector needs something that the batch does not contain (masks, luminance, attention)."""


class NoHeadError(RequestError):
    """Classes were asked of a router that was trained without class labels."""


class UnknownNameError(RequestError):
    """A name that is not registered; the message suggests the closest one."""

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str], where: str = "") -> UnknownNameError:
        """Return the error for `name`; `where` is text such as 'in this model'."""
        names = sorted(known)
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        return cls(f"Unknown {kind} '{name}'{where and ' ' + where}.{hint} Available: {', '.join(names)}.")


class MismatchError(RequestError):
    """Two things that must agree do not, such as a model and its backbone; the message shows the difference."""

    @classmethod
    def between(cls, what: str, expected: Mapping[str, object], found: Mapping[str, object], advice: str) -> MismatchError:
        keys = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
        rows = "\n".join(f"  {key}: expected {expected.get(key)!r}, found {found.get(key)!r}" for key in keys)
        return cls(f"{what} does not match:\n{rows}\n{advice}")
