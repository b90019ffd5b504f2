"""A griffe extension: the docstrings say `Example:`, which griffe shows as text; as `Examples:` it is shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section before docstrings are parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:\s*$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
