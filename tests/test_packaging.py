"""The wheel and the source distribution: what is in them, and that the wheel works with its base dependencies alone.

Installing PyTorch anew would take minutes. The clean environment here is a real virtual environment without system packages, in
which the installed wheel finds exactly the base dependencies and what these need themselves, as links to the files of this one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import REPOSITORY
from tests.drawn import drawn_folder

COMMANDS = """
from medtokenbudget.cli import main
for line in (
    "data folder photos --masks masks --out photos.parquet",
    "extract photos.parquet --store tokens --backbone embedded",
    "train photos.parquet --store tokens --out runs/first --epochs 1 --min-steps 1 --head-epochs 1",
    "predict photos --model runs/first/model --budget 0.3 --out predictions.csv",
):
    assert main(line.split()) == 0, line
"""
"""In one process, which imports torch once."""
pytestmark = pytest.mark.slow
pytest.importorskip("hatchling", reason="needs hatchling of the extra 'dev'")


def build(source: Path, out: Path, *targets: str) -> None:
    """Build offline, with the hatchling of this environment."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), *targets]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build(REPOSITORY, out)
    return out


def wheel_of(folder: Path) -> Path:
    return next(folder.glob("*.whl"))


def dependencies(requirement: str, known: dict[str, metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """The distribution that a requirement asks for, with all that it needs itself."""
    wanted = Requirement(requirement)
    name = re.sub(r"[-_.]+", "-", wanted.name).lower()
    if name not in known:
        known[name] = metadata.distribution(wanted.name)
        for further in known[name].requires or []:
            marker = Requirement(further).marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                dependencies(further, known)
    return known


def base_requirements(wheel: Path) -> Iterator[str]:
    """The requirements in the metadata of the wheel that belong to no extra."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().split("\n\n")[0].splitlines()
    for line in lines:
        if line.startswith("Requires-Dist: ") and "extra ==" not in line:
            yield line.removeprefix("Requires-Dist: ")


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean virtual environment with the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("clean") / "env"
    venv.create(folder, with_pip=False)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    found: dict[str, metadata.Distribution] = {}
    for requirement in base_requirements(wheel_of(dist)):
        dependencies(requirement, found)
    assert {"torch", "timm", "pandas"} <= set(found)
    assert not {"fastapi", "ray", "onnx", "pytest", "medtokenbudget"} & set(found)
    for distribution in found.values():
        tops = {Path(str(file)).parts[0] for file in distribution.files or [] if ".." not in str(file)}
        for top in tops - {"__pycache__", "bin"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*pip, str(wheel_of(dist))], check=True, capture_output=True)
    return folder


@pytest.fixture
def run(environment: Path, tmp_path: Path):
    """Run a program of the clean environment in an empty folder with an empty home, and give what it printed."""
    home = tmp_path / "home"
    home.mkdir()
    path = f"{environment / 'bin'}:/usr/bin:/bin"
    variables = {"HOME": str(home), "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def call(*words: str, code: int = 0) -> str:
        program = [str(environment / "bin" / words[0]), *words[1:]]
        done = subprocess.run(program, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


def test_the_wheel_has_everything_that_the_package_reads_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(wheel_of(dist)) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    root = REPOSITORY / "src"
    command = ["git", "-C", str(REPOSITORY), "ls-files", "--cached", "--others", "--exclude-standard", "src/medtokenbudget"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    wanted = {str((REPOSITORY / name).relative_to(root)) for name in listed.stdout.splitlines() if (REPOSITORY / name).exists()}
    assert inside == wanted
    assert {"medtokenbudget/py.typed", "medtokenbudget/reporting/templates/page.html"} <= inside
    assert wheel_of(dist).stat().st_size < 10_000_000, "an index takes wheels up to 100 MB; ours should stay small"


def test_the_source_distribution_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    source = next(tmp_path.iterdir())
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "tests/test_packaging.py", "docs/index.md", "constraints.txt"):
        assert (source / name).exists(), name
    build(source, tmp_path / "again", "-t", "wheel")
    with zipfile.ZipFile(wheel_of(dist)) as first, zipfile.ZipFile(wheel_of(tmp_path / "again")) as second:
        assert {i.filename: i.CRC for i in first.infolist()} == {i.filename: i.CRC for i in second.infolist()}


def test_the_wheel_trains_and_predicts_with_base_dependencies_alone(run, tmp_path: Path) -> None:
    drawn_folder(tmp_path, 12, classes=("MEL", "NV"))
    where = run("python", "-c", "import medtokenbudget; print(medtokenbudget.__file__)")
    assert str(REPOSITORY) not in where
    assert "No module named 'fastapi'" in run("python", "-c", "import fastapi", code=1)
    run("python", "-c", COMMANDS)
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 1 + 12


def test_what_needs_an_extra_names_it_without_a_traceback(run) -> None:
    told = run("mtb", "serve", code=2)
    assert "medtokenbudget[serve]" in told
    assert "Traceback" not in told
    version = run("mtb", "--version")
    assert "not installed: pip install 'medtokenbudget[ray]'" in version
    assert "Traceback" not in version
