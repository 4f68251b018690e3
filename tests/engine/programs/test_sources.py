"""Programs are named by the code that they depend on: after an edit of it no earlier program is used."""

from __future__ import annotations

import importlib
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from support import make_head, make_task, shallow

from jpets.config import EngineSettings
from jpets.deltas import METHODS
from jpets.deltas.protocol import Method
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.programs.sources import PROGRAM, digest_of_code
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.types import Classification, Query

ROOTS = (PROGRAM, EncoderNetwork.__module__)
"""The code that decides the program of an encoder, without methods of other packages."""
ROOT = pathlib.Path(__file__).parents[3]
FILES = {
    "bent/__init__.py": "from bent.method import Bent\n",
    "bent/method.py": "import beside\nfrom .inner import angle\nclass Bent: ...\n",
    "bent/inner.py": "def angle():\n    import late\n    return late.ANGLE\n",
    "bent/table.txt": "1 2 3\n",
    "beside.py": "from package_of_bases.base import Base\n",
    "late.py": "ANGLE = 3\n",
    "package_of_bases/__init__.py": "",
    "package_of_bases/base.py": "class Base: ...\n",
    "unrelated.py": "import bent\n",
}


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def digest(*roots: str) -> str:
    importlib.invalidate_caches()
    return digest_of_code.__wrapped__(*roots)


@pytest.mark.parametrize("name", [name for name in FILES if name != "unrelated.py"])
def test_every_file_that_a_method_reaches_counts(folder: pathlib.Path, name: str) -> None:
    before = digest("bent.method")
    assert digest("bent.method") == before
    (folder / name).write_text(FILES[name] + "# edited\n")
    assert digest("bent.method") != before


def test_what_no_method_reaches_does_not(folder: pathlib.Path) -> None:
    before = digest("bent.method")
    (folder / "unrelated.py").write_text("import late\n")
    (folder / "bent" / "__pycache__").mkdir()
    (folder / "bent" / "__pycache__" / "inner.pyc").write_bytes(b"compiled")
    assert digest("bent.method") == before


def test_what_was_typed_in_is_never_the_same_in_two_processes() -> None:
    assert digest("typed_in_a_session") != digest("typed_in_a_session")


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("jpets/model/forward.py", True),
        ("jpets/deltas/lora.py", True),
        ("jpets/scheduling/costs/operators.py", True),
        ("pallas_kernels/packed_attention/reference.py", True),
        ("jpets/engine/queue/pending.py", False),
        ("jpets/engine/loop/host_loop.py", False),
        ("jpets/engine/workloads/encoder_network.py", True),
        ("jpets/engine/workloads/encoder.py", False),
        ("jpets/engine/results/results.py", False),
        ("jpets/scheduling/order/fairness.py", False),
        ("jpets/__init__.py", False),
    ],
)
def test_an_edit_recompiles_what_depends_on_it(tmp_path: pathlib.Path, unedited: str, file: str, counts: bool) -> None:
    """The queue of waiting queries is not a part of a program; the delta operators are."""
    copy_packages(tmp_path)
    (tmp_path / file).write_text((tmp_path / file).read_text() + "\n# edited\n")
    assert (digest_in(tmp_path) != unedited) is counts


def copy_packages(root: pathlib.Path) -> None:
    for package in ("jpets", "pallas_kernels"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))


def digest_in(root: pathlib.Path) -> str:
    """What a process says that has its packages from ``root``."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import jpets.engine.programs.sources as s; "
        f"sys.path.insert(0, {str(root)!r}); sys.modules.pop('jpets'); print(s.digest_of_code(*{ROOTS!r}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def unedited(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("unedited")
    copy_packages(root)
    return digest_in(root)


BUCKETS = [Bucket(16, ((1, 16),))]
SETTINGS = EngineSettings(dtype="float32", max_length=16, max_batch_rows=1, background_compile=False)


@pytest.fixture
def shift(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A file with a method of its own, installed as ``shift``."""
    file = tmp_path / "shift_method.py"
    file.write_text((ROOT / "examples" / "own_method.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    yield file
    sys.modules.pop("shift_method", None)


def answered(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    sys.modules.pop("shift_method", None)
    importlib.invalidate_caches()
    method: Method = importlib.import_module("shift_method").Shift()
    monkeypatch.setitem(METHODS._own, "shift", method)  # type: ignore[attr-defined]
    backbone, rng = shallow(), np.random.default_rng(0)
    delta = method.init(rng, {"sites": ["value"]}, backbone.config, 0.5)
    task = make_task(backbone, "shift", [delta], make_head(rng, backbone.config.hidden_size, 3))
    digest_of_code.cache_clear()
    with Engine(backbone, [task], SETTINGS, cache_dir=folder, buckets=BUCKETS).start() as engine:
        (result,) = engine.infer([Query("shift", "some text")])
    assert isinstance(result, Classification)
    return result.logits


def test_an_edited_method_is_not_served_by_its_old_program(
    shift: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answered(tmp_path / "kept", monkeypatch)
    stored = len(list((tmp_path / "kept" / "programs").iterdir()))
    assert np.array_equal(answered(tmp_path / "kept", monkeypatch), first)
    assert len(list((tmp_path / "kept" / "programs").iterdir())) == stored
    edited = shift.read_text().replace("bound.view.slots, at)[:, None])", "bound.view.slots, at)[:, None] * -2)")
    assert edited != shift.read_text()
    shift.write_text(edited)
    second = answered(tmp_path / "kept", monkeypatch)
    assert not np.allclose(second, first)
    assert np.array_equal(second, answered(tmp_path / "fresh", monkeypatch))
