from __future__ import annotations

import importlib.metadata
import resource
from pathlib import Path

import jax
import pytest
from runs import Run

from jpets.app.commands.doctor import command as doctor
from jpets.app.commands.doctor import system_limits
from jpets.engine.kernels.choice import SUFFIX, Choice
from jpets.engine.kernels.trial import Outcome


def test_all_is_well(run: Run, tmp_path: Path) -> None:
    result = run("doctor", env={"JPETS_CACHE_DIR": str(tmp_path / "cache")})
    assert result.exit_code == 0, result.stdout
    for name in ("python", "jax", "jaxlib", "flax", "transformers", "orbax-checkpoint", "cache", "demo backbone"):
        assert any(line.startswith(name) for line in result.stdout.splitlines()), name
    assert importlib.metadata.version("jax") in result.stdout
    assert result.stdout.count("\ndevice ") == len(jax.local_devices())
    assert "not made yet" in result.stdout
    assert not (tmp_path / "cache").exists()


def test_the_cache_has_a_size(run: Run, tmp_path: Path) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "one").write_bytes(bytes(2000))
    assert "1 files, 2.0 kB" in run("doctor", env={"JPETS_CACHE_DIR": str(tmp_path)}).stdout


def test_a_cache_that_is_no_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    result = run("doctor", env={"JPETS_CACHE_DIR": str(tmp_path / "cache")})
    assert result.exit_code == 1
    assert "cannot be written" in result.stdout


def test_kernels_are_shown_with_the_reasons(run: Run, tmp_path: Path) -> None:
    choice = Choice({"device": "NVIDIA H100 (gpu)", "backbone": "bert, 12 layers of 768"})
    outcomes = {"reference": Outcome(2e-3, 1.0), "batched": Outcome(5e-4, 4.0), "mosaic": Outcome(out="it is wrong")}
    choice.found["masked_matmul", "768x768 bfloat16"] = outcomes
    choice.save(tmp_path / "costs" / f"h100-1{SUFFIX}")
    shown = " ".join(run("doctor", env={"JPETS_CACHE_DIR": str(tmp_path), "COLUMNS": "300"}).stdout.split())
    assert "kernels ok NVIDIA H100 (gpu); bert, 12 layers of 768" in shown
    assert "masked_matmul ok 768x768 bfloat16: reference: 2 ms, 1.00 x the usual speed. batched: 0.5 ms" in shown
    assert "mosaic: it is wrong" in shown


@pytest.mark.parametrize("found, wrong", [("0.10.1", True), ("0.10.2.dev1", False), ("0.13.0", True), ("0.12", False)])
def test_versions_out_of_range(run: Run, monkeypatch: pytest.MonkeyPatch, found: str, wrong: bool) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found if name == "jax" else real(name))
    result = run("doctor")
    assert result.exit_code == wrong
    assert (f"{found}; expected 0.10.2 or newer, below 0.13" in result.stdout) == wrong


def test_a_missing_package(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", {"no-such-package": ("1", None)})
    result = run("doctor")
    assert result.exit_code == 1
    assert "not installed; expected 1 or newer" in result.stdout


def test_no_device(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda'\nmore")

    monkeypatch.setattr(jax, "local_devices", fail)
    result = run("doctor")
    assert result.exit_code == 1
    assert "JAX finds none: Unable to initialize backend 'cuda'" in result.stdout


def test_a_repository_in_order(run: Run, task_file: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    run("task", "add", task_file, "--repository", repository)
    result = run("doctor", "--repository", repository)
    assert result.exit_code == 0
    assert "1 tasks" in result.stdout


@pytest.mark.parametrize("harm, told", [("damage", "is damaged"), ("remove", "cannot be read")])
def test_a_repository_with_a_bad_blob(run: Run, task_file: Path, tmp_path: Path, harm: str, told: str) -> None:
    repository = tmp_path / "repository"
    run("task", "add", task_file, "--repository", repository)
    (blob,) = (repository / "blobs").glob("*.safetensors")
    if harm == "damage":
        blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    else:
        blob.unlink()
    result = run("doctor", "--repository", repository)
    assert result.exit_code == 1
    assert "task topic version 1" in result.stdout
    assert told in result.stdout


def test_no_repository(run: Run, tmp_path: Path) -> None:
    result = run("doctor", "--repository", tmp_path / "nothing")
    assert result.exit_code == 1
    assert "is not a task repository" in result.stdout


@pytest.mark.parametrize(
    "count, status, told", [("262144", "ok", ""), ("65530", "note", "sysctl -w"), ("1000", "wrong", "sysctl -w")]
)
def test_memory_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str, status: str, told: str) -> None:
    (tmp_path / "max_map_count").write_text(f"{count}\n")
    monkeypatch.setattr(system_limits, "MOST_MAPPINGS", tmp_path / "max_map_count")
    (finding,) = system_limits._mappings()
    assert finding.status == status
    assert f"vm.max_map_count is {int(count):,}" in finding.detail and told in finding.detail


@pytest.mark.parametrize("most, status", [(1024, "note"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, most: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, most))
    finding = system_limits._descriptors()
    assert finding.status == status
    assert status == "ok" or "ulimit" in finding.detail


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system_limits, "SHARED_BYTES", 1 << 60)
    assert "--shm-size" in system_limits._shared_memory().detail
    monkeypatch.setattr(system_limits, "SHARED", tmp_path / "nothing")
    assert system_limits._shared_memory().status == "note"


def test_folders_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "programs").write_text("no folder")
    monkeypatch.setenv("JPETS_CACHE_DIR", str(tmp_path))
    cache, _ = system_limits.folders()
    assert (cache.status, "JPETS_CACHE_DIR" in cache.detail) == ("wrong", True)
    monkeypatch.setenv("JPETS_CACHE_DIR", "~no-such-user/cache")
    monkeypatch.setattr(system_limits, "FREE_BYTES", 1 << 60)
    cache, temporary = system_limits.folders()
    assert cache.status == "wrong" and "home folder" in cache.detail
    assert temporary.status == "note" and "TMPDIR" in temporary.detail
