"""`python -m medtokenbudget`: the command `mtb`, where its script is not on the path."""

from __future__ import annotations

import sys

from medtokenbudget.cli import main

if __name__ == "__main__":
    sys.exit(main())
