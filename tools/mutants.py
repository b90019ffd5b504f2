"""Break the package on purpose, one small edit at a time, and see whether the quick tests notice.

`make mutants` applies each edit of `mutant_list.py` to a copy of the package and runs the tests that must notice it. Every edit
starts pytest anew, so all of them take a while; `make mutants ARGS="curriculum"` runs those with a word in name, file or tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "medtokenbudget"
FAILED_TESTS = 1
"""What pytest exits with if a test failed; everything above is about pytest, the files or the imports."""
SECONDS = 900


class EditError(Exception):
    """An edit that cannot be made."""


@dataclass(frozen=True)
class Edit:
    """One edit: in the file of the package that has `old` exactly once, `old` becomes `new`, and one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def place(self, package: Path) -> Path:
        """The file to edit: the one that is named, or the only other one with the text if that moved.

        Raises:
            EditError: The text is not there, or more than once.
        """
        named = package / self.file
        if named.is_file() and self.old in (text := named.read_text(encoding="utf-8")):
            counts = {named: text.count(self.old)}
        else:
            texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
            counts = {path: text.count(self.old) for path, text in texts.items() if self.old in text}
        if sum(counts.values()) != 1:
            where = ", ".join(f"{path.relative_to(package)} ({count})" for path, count in counts.items()) or "no file"
            raise EditError(f"'{self.name}': the text must occur once, but it is in {where}. Correct it in the list:\n{self.old}")
        return next(iter(counts))


def read_list() -> list[Edit]:
    """The edits of the list.

    Raises:
        EditError: Two edits have the same name.
    """
    sys.path.insert(0, str(Path(__file__).parent))
    from mutant_list import EDITS

    edits = [Edit(name, file, old, new, tuple(tests.split())) for tests, room in EDITS.items() for name, file, old, new in room]
    names = [edit.name for edit in edits]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EditError(f"These names are used twice: {', '.join(sorted(twice))}.")
    return edits


def run_tests(package: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the quick tests of some files against the package in a folder."""
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "-x", "-q", "-p", "no:cacheprovider", *tests]
    path = os.pathsep.join([str(package.parent), str(REPOSITORY)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=SECONDS)


def verdict(edit: Edit) -> str:
    """'killed', 'SURVIVED' or 'BROKEN' (the tests could not run, which tells nothing about them)."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__")))
        path = edit.place(package)
        path.write_text(path.read_text(encoding="utf-8").replace(edit.old, edit.new), encoding="utf-8")
        try:
            code = run_tests(package, edit.tests).returncode
        except subprocess.TimeoutExpired:
            return "killed"  # an endless loop would be noticed
    return {0: "SURVIVED", FAILED_TESTS: "killed"}.get(code, "BROKEN")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the edits and return 0 if every one was killed, 1 if not, 2 for a list that does not fit the package."""
    parser = argparse.ArgumentParser(description="Break the package on purpose and see whether the quick tests notice.")
    parser.add_argument("words", nargs="*", help="Run edits with one of these words in their name, file or tests. Default: all.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Edits to test at a time. Default: one per core.")
    options = parser.parse_args(arguments)
    try:
        edits = read_list()
        for edit in edits:
            edit.place(PACKAGE)
    except EditError as error:
        print(error, file=sys.stderr)
        return 2
    if options.words:
        edits = [edit for edit in edits if any(word in " ".join([edit.name, edit.file, *edit.tests]) for word in options.words)]
    if not edits or options.jobs < 1:
        print("No edit has these words. Leave them out to run all." if not edits else "--jobs must be 1 or more.", file=sys.stderr)
        return 2
    # Tests that fail anyway would kill every edit.
    whole = run_tests(PACKAGE, sorted({test for edit in edits for test in edit.tests}))
    if whole.returncode:
        print(f"{whole.stdout}{whole.stderr}\nThe tests fail without any edit. Repair them first.", file=sys.stderr)
        return 1
    alive = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for edit, found in zip(edits, pool.map(verdict, edits)):
            print(f"{found:8}  {edit.name}  ({edit.file})", flush=True)
            alive += [edit] if found != "killed" else []
    print(f"{len(edits) - len(alive)} of {len(edits)} edits were killed.")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
