"""The docstrings below the fields of a dataclass, which are the help texts of their options."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap


@functools.cache
def field_docstrings(config: type) -> dict[str, str]:
    """The text below each field of a dataclass, by field name."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, below in zip(body.body, body.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            texts[ast.unparse(field.target)] = inspect.cleandoc(str(below.value.value))
    return texts
