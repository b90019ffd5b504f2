"""Set up the virtual environment that the make targets use, and show what is happening: `python .ci/install.py .venv`.

Only the standard library, because nothing else is installed yet. The exit code is pip's.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINIMUM = (3, 11)
QUIET_SECONDS = 20.0


def main(folder: Path) -> int:
    if sys.version_info < MINIMUM:
        print(
            f"MedTokenBudget needs Python {MINIMUM[0]}.{MINIMUM[1]} or newer, but {sys.executable} is {sys.version.split()[0]}.\n"
            "Choose another one with `make setup PYTHON=python3.12`.",
            file=sys.stderr,
        )
        return 2
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"Creating a virtual environment in {folder} with Python {sys.version.split()[0]} ...", flush=True)
        venv.create(folder, with_pip=True)
    packages = sum(1 for line in (ROOT / "constraints.txt").read_text().splitlines() if line.strip())
    print(
        f"Installing MedTokenBudget and its pinned dependencies into {folder}: about {packages} packages, 7 GB on disk with\n"
        "PyTorch's GPU libraries. This happens once and takes about 5 minutes on a fast connection.",
        flush=True,
    )
    options = ["--disable-pip-version-check", "--progress-bar", "off", "-c", "constraints.txt", "-e", ".[dev]"]
    return follow([str(python), "-m", "pip", "install", *options])


def follow(command: list[str]) -> int:
    """Run pip, show the lines that tell what it is doing, and a sign of life when there are none for a while."""
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace")
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=QUIET_SECONDS)
        except queue.Empty:
            print(f"  still working, {time.monotonic() - started:.0f} s so far ...", flush=True)
            continue
        if line is None:
            break
        if text := shown(line):
            print(text, flush=True)
    code = process.wait()
    if code == 0:
        print(f"Installed in {time.monotonic() - started:.0f} s.", flush=True)
    else:
        print(f"pip failed with exit code {code}; see its message above. Run the same command to try again.", file=sys.stderr)
    return code


def shown(line: str) -> str | None:
    """What a person sees of a line of pip's output; None for lines that tell nothing new."""
    if found := re.match(r"\s*(Downloading|Using cached) (\S+)(?: (\(.*\)))?", line):
        if found[2].endswith(".metadata"):
            return None
        name = "-".join(found[2].rsplit("/", 1)[-1].split("-")[:2])
        return f"  {found[1].lower()} {name} {found[3] or ''}".rstrip()
    if line.startswith("Installing collected packages: "):
        return f"  unpacking {line.count(',') + 1} packages: the longest step, a few minutes ..."
    return line.rstrip() if line.startswith(("ERROR", "WARNING")) else None


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
