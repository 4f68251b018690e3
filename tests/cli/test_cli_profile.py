from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import Run

from checkpoints.backbone import Backbone
from checkpoints.task_file import read_task
from jpets.app.commands.profile.command import is_stream
from jpets.config import EngineSettings
from jpets.engine.compilation import core
from jpets.engine.costs import bench, profile_measurement
from jpets.engine.engine import Engine
from jpets.engine.programs.program import ProgramKey


@pytest.fixture(autouse=True)
def one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket instead of five, a small cost profile: compiling is not what these tests are about."""
    monkeypatch.setattr(profile_measurement, "ROWS", (1, 2))
    monkeypatch.setattr(profile_measurement, "LENGTHS", (8, 16))
    monkeypatch.setattr(bench, "LIGHT_SHAPES", ("2x8",))
    monkeypatch.setattr(bench, "LOOP_SHAPES", ("2x8",))
    monkeypatch.setattr(bench, "HEAVY_CASES", {32: ((1, 1, 8), (2, 1, 8)), 128: ((1, 1, 8),)})
    monkeypatch.setattr(core, "core_programs", lambda menu, light, heavy: [(menu[0], light)])


def test_costs_and_the_cost_profile_are_what_the_next_engine_reads(
    run: Run, shallow_folder: Path, task_file: Path, backbone: Backbone, tmp_path: Path
) -> None:
    cache, out, picture = tmp_path / "cache", tmp_path / "costs.json", tmp_path / "profile.png"
    arguments = ("profile", "--backbone", shallow_folder, task_file, "--repeats", 2)
    result = run(*arguments, "--cache-dir", cache, "--json", out, "--plot", picture)
    assert result.exit_code == 0, result.stderr
    report = json.loads(out.read_text())
    assert (report["fingerprint"], report["repeats"]) == (backbone.fingerprint, 2)
    assert len(report["programs"]) == 1
    for program in report["programs"]:
        assert program["bucket"] in result.stdout
        assert program["tokens_per_second"] == pytest.approx(program["tokens"] / program["seconds"])

    engine = Engine(backbone, [read_task(task_file)], EngineSettings(), cache_dir=cache)
    variant = engine.core[0].variant
    known = {str(bucket): engine.costs.get(ProgramKey(bucket, variant)) for bucket in engine.menu.buckets}
    assert {name: seconds for name, seconds in known.items() if seconds is not None} == {
        program["bucket"]: program["seconds"] for program in report["programs"]
    }
    assert picture.read_bytes().startswith(b"\x89PNG")
    expected = {str(key) for key, _ in engine.family.slots if key.method != "head"}
    assert engine.profile.measured == expected and all(name in result.stdout for name in expected)

    (path,) = (cache / "costs").glob("*.profile.json")
    path.write_text(path.read_text()[:100])
    again = Engine(backbone, [read_task(task_file)], EngineSettings(), cache_dir=cache)
    assert again.profile.coarse == expected and not path.exists()


def test_a_task_of_another_backbone(run: Run, fixtures: Path, task_file: Path, tmp_path: Path) -> None:
    result = run("profile", "--backbone", fixtures / "tiny-distilbert", task_file, "--cache-dir", tmp_path / "cache")
    assert result.exit_code == 1
    assert "was made for backbone" in result.stderr


def test_two_files_of_one_name(run: Run, shallow_folder: Path, task_file: Path, tmp_path: Path) -> None:
    result = run("profile", "--backbone", shallow_folder, task_file, task_file, "--cache-dir", tmp_path)
    assert result.exit_code == 1
    assert "must differ" in result.stderr


def test_a_stream_is_no_file() -> None:
    assert is_stream(Path("/dev/stdout")) and is_stream(Path("/dev/null"))
    assert not is_stream(Path(__file__)) and not is_stream(Path("nowhere.json"))


@pytest.mark.parametrize(
    ("option", "name", "told"),
    [
        ("--plot", "costs.txt", "must be a file that ends in .png"),
        ("--plot", "nowhere/costs.png", "there is no folder"),
        ("--json", "nowhere/costs.json", "there is no folder"),
    ],
)
def test_outputs_are_looked_at_before_anything_is_measured(
    run: Run, tmp_path: Path, option: str, name: str, told: str
) -> None:
    result = run("profile", "--backbone", "nowhere", option, tmp_path / name)
    assert result.exit_code == 2 and told in " ".join(result.stderr.replace("│", " ").split())


def test_an_unknown_dtype_is_a_usage_error(run: Run) -> None:
    assert run("profile", "--backbone", "any", "--dtype", "int8").exit_code == 2


def test_a_limit_smaller_than_every_shape_that_light_classes_are_measured_in(
    run: Run, shallow_folder: Path, task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "LIGHT_SHAPES", ("8x32",))
    monkeypatch.setattr(bench, "LOOP_SHAPES", ("8x32",))
    arguments = ("profile", "--backbone", shallow_folder, task_file, "--repeats", 1, "--max-tokens", 32)
    result = run(*arguments, "--cache-dir", tmp_path / "cache")
    assert result.exit_code == 0, result.stderr
