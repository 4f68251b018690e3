"""The examples run, on a tiny backbone, and print what they promise."""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import subprocess
import sys
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NUMBER = r"([-\d.e+]+)"


@pytest.fixture
def run(
    shallow_folder: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """What an example prints."""

    def printed(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, str(shallow_folder)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return printed


def test_each_is_short() -> None:
    assert all(len(path.read_text().splitlines()) < 80 for path in EXAMPLES.glob("*.py"))


def test_hidden_states(run: Callable[[str], str]) -> None:
    printed = run("hidden_states.py")
    assert re.search(r"hidden states \(3, \d+, 64\) float32", printed)
    (difference,) = re.findall(f"alone differs by {NUMBER}", printed)
    assert float(difference) < 1e-4


def test_mixed_gradients(run: Callable[[str], str]) -> None:
    printed = run("mixed_gradients.py")
    found = re.findall(f"(\\w+): slope up to {NUMBER}, of other tasks {NUMBER}, alone it differs by {NUMBER}", printed)
    assert [name for name, *_ in found] == ["adapter", "lora", "bitfit", "ia3"]
    for _, size, other, difference in found:
        assert float(size) > 1e-3
        assert float(other) == 0
        assert float(difference) < 1e-5


def test_sharded_backbone(run: Callable[[str], str]) -> None:
    printed = run("sharded_backbone.py")
    assert "4 devices; ffn_in (64, 128), on each (64, 32)" in printed
    differences = [float(each) for each in re.findall(f"(?:square:|differs by) {NUMBER}", printed)]
    assert len(differences) == 2
    assert max(differences) < 1e-5


def test_own_method(run: Callable[[str], str]) -> None:
    printed = run("own_method.py")
    row = f"row without it differs by {NUMBER}, row with it by {NUMBER} and from its merged form {NUMBER}"
    ((none, moved, difference),) = re.findall(row, printed)
    assert float(none) == 0
    assert float(moved) > 0.05
    assert float(difference) < 1e-5
    assert "slopes of its slot: [True, True], of slot 0: [False, False]\n" in printed


def test_an_installed_package_brings_a_method(tmp_path: pathlib.Path) -> None:
    """Found by its entry point, by name only when it is asked for, in a process of its own as a compiler's is."""
    package = tmp_path / "shift-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: shift\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[jpets.methods]\nshift = own_method:Shift\n")
    code = (
        "import sys\nfrom jpets.deltas import class_method, method_named\n"
        "assert method_named('lora').name == 'lora' and 'own_method' not in sys.modules\n"
        "print(class_method('shift').step, method_named('shift').name)\n"
    )
    paths = os.pathsep.join(map(str, (ROOT, EXAMPLES, tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.stdout == "sums shift\n", done.stderr
