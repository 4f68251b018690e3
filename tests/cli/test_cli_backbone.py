from __future__ import annotations

import json
from pathlib import Path

from runs import Run
from support import tiny

from checkpoints.native import is_native
from jpets.config import BackboneConfig


def test_import_writes_a_native_backbone_with_the_same_fingerprint(run: Run, fixtures: Path, tmp_path: Path) -> None:
    backbone = tiny()
    native = tmp_path / "native"
    result = run("backbone", "import", fixtures / "tiny-bert", native, "--name", "small")
    assert result.exit_code == 0
    assert is_native(native)
    assert backbone.fingerprint in result.stdout
    assert "small" in result.stdout
    shown = json.loads(run("backbone", "show", native, "--json").stdout)
    assert (shown["name"], shown["fingerprint"]) == ("small", backbone.fingerprint)
    assert BackboneConfig.from_dict(shown["config"]) == backbone.config
    assert shown["bytes"] == 4 * shown["parameters"]


def test_show_names_shape_and_fingerprint(run: Run, fixtures: Path) -> None:
    result = run("backbone", "show", fixtures / "tiny-bert")
    assert result.exit_code == 0
    assert "3 layers, hidden size 64" in result.stdout
    assert tiny().fingerprint in result.stdout


def test_import_into_something_that_exists_changes_nothing(run: Run, fixtures: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    result = run("backbone", "import", fixtures / "tiny-bert", tmp_path / "mine")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "exists already" in result.stderr
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_folder_without_a_model_is_one_line(run: Run, tmp_path: Path) -> None:
    result = run("backbone", "show", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_name_that_nothing_has(run: Run) -> None:
    result = run("backbone", "show", "no-such-model-anywhere")
    assert result.exit_code == 1
    assert "no folder and no installed package" in result.stderr


def test_backbones_of_a_server(run: Run, server: str) -> None:
    (item,) = json.loads(run("backbone", "list", "--server", server, "--json").stdout)
    tasks = json.loads(run("task", "list", "--server", server, "--json").stdout)  # other tests share the server
    assert (item["name"], item["state"], item["default"], item["tasks"]) == ("tiny-bert", "ready", True, len(tasks))
    shown = run("backbone", "list", "--server", server)
    assert shown.exit_code == 0 and "tiny-bert" in shown.stdout and "ready" in shown.stdout
    loaded = run("backbone", "load", "tiny-bert", "--server", server)
    assert loaded.stdout.strip() == f"tiny-bert is ready, with {len(tasks)} tasks"
    for command, name, part in (("load", "unheard-of", "no backbone"), ("unload", "tiny-bert", "it stays")):
        refused = run("backbone", command, name, "--server", server)
        assert refused.exit_code == 1 and part in refused.stderr
