"""Options: the names in messages about them, variables that are not options, and the command made of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jpets.cli import app
from jpets.errors import InvalidInput
from serving.options.options import Options, read_options
from serving.options.sources import read_sources

KUBERNETES = {
    "JPETS_PORT": "tcp://10.0.0.1:8000",
    "JPETS_SERVICE_HOST": "10.0.0.1",
    "JPETS_SERVICE_PORT": "8000",
    "JPETS_SERVICE_PORT_HTTP": "8000",
    "JPETS_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "JPETS_PORT_8000_TCP_PROTO": "tcp",
    "JPETS_PORT_8000_TCP_PORT": "8000",
    "JPETS_PORT_8000_TCP_ADDR": "10.0.0.1",
    "JPETS_GRPC_PORT": "udp://[fd00::1]:8001",
    "JPETS_GRPC_SERVICE_HOST": "fd00::1",
    "JPETS_SERVER_PORT_8080_UDP_ADDR": "10.0.0.2",
}
"""Variables of a pod next to services that are called jpets, jpets-grpc and jpets-server."""
DEMO = {"demo": True}


def test_variables_of_kubernetes_are_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KUBERNETES.items():
        monkeypatch.setenv(name, value)
    sources = read_sources(DEMO)
    assert sources.options.port == 8080
    assert sources.options.grpc_port is None
    for note, parts in zip(sources.notes, (("JPETS_PORT", "--port"), ("JPETS_GRPC_PORT", "--grpc-port")), strict=True):
        assert all(part in note for part in (*parts, "Kubernetes"))
    assert read_options(DEMO | {"port": 1}).port == 1


@pytest.mark.parametrize(
    "variable, value, told",
    [
        ("JPETS_PORT", "http", "JPETS_PORT: .*integer.*'http'"),
        ("JPETS_PORT", "tcp:", "JPETS_PORT: "),
        ("JPETS_POLICY", "best", "JPETS_POLICY: .*'alpha'.*'best'"),
        ("jpets_slots", "0", "jpets_slots: .*'0'"),
        ("JPETS_BUCKET", "8x32 no", "JPETS_BUCKET: a bucket is like"),
        ("JPETS_BALANCE_START", "0.1", "JPETS_BALANCE_START"),
        ("JPETS_GRACE", "inf", "JPETS_GRACE: .*finite"),
        ("JPETS_REPOSITORY", "~no-such-user/x", "JPETS_REPOSITORY: .*home folder"),
        ("JPETS_MAX_LENGHT", "3", "JPETS_MAX_LENGHT: .*did you mean JPETS_MAX_LENGTH"),
        ("JPETS_REPO", "x", "JPETS_REPO: there is no such variable"),
        ("JPETS_SERVIC_HOST", "10.0.0.1", "JPETS_SERVIC_HOST: there is no such variable"),
    ],
)
def test_a_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidInput, match=told):
        read_options(DEMO)


@pytest.mark.parametrize(
    "text, told",
    [
        ("slots = 1\nport = 70000", r"jpets\.toml line 2: port: .*65535.*70000"),
        ("port = true", "line 1: port: .*true"),
        ("[server]\nport = 1", "line 1: server: there is no such option"),
        ("\nmax-length = 9", "line 2: max-length: .*did you mean max_length"),
        ("balance_start = 0.1", "line 1: balance_start"),
        ("cache_dir = '~no-such-user/x'", "line 1: cache_dir: .*home folder"),
        ("slots = \nport = 1", "jpets.toml is not valid TOML.*line 1"),
    ],
)
def test_a_key_is_named_with_its_file_and_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "jpets.toml").write_text(text)
    with pytest.raises(InvalidInput, match=told):
        read_options(DEMO, tmp_path / "jpets.toml")


def test_an_option_is_named_however_late_its_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"--port: .*70000"):
        read_options(DEMO | {"port": 70000})
    monkeypatch.setenv("JPETS_REPOSITORY", "x")
    assert read_sources(DEMO).told("--repository cannot be opened") == "JPETS_REPOSITORY cannot be opened"
    assert read_sources(DEMO | {"repository": "y"}).told("--repository: no") == "--repository: no"


def test_paths_of_every_source_know_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JPETS_REPOSITORY", "~/tasks")
    (tmp_path / "jpets.toml").write_text('cache_dir = "~/cache"\n')
    options = read_options({"backbone": "~/model"}, Path("~/jpets.toml"))
    assert (options.repository, options.cache_dir) == (tmp_path / "tasks", tmp_path / "cache")
    assert options.backbone == str(tmp_path / "model")


@pytest.mark.parametrize("text", ["8x32,1024:32x32+8x128", '["8x32", "1024:32x32+8x128"]', " 8x32  1024:32x32+8x128"])
def test_a_variable_holds_a_list(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("JPETS_BUCKETS", text)
    assert read_options(DEMO).buckets == ["8x32", "1024:32x32+8x128"]


def test_every_setting_is_an_option_of_the_command() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], terminal_width=200, env={"COLUMNS": "200"}).stdout
    flags = set(re.findall(r"--[a-z][a-z-]+", shown))
    for name in Options.model_fields:
        assert {"buckets": "--bucket"}.get(name, f"--{name.replace('_', '-')}") in flags
    assert {"--no-migrate", "--config", "--version"} <= flags
    assert "longest text in tokens (default 512)" in shown


def test_an_option_that_cannot_be_ends_the_command_in_one_line() -> None:
    result = CliRunner().invoke(app, ["serve", "--demo", "--slots", "0"])
    assert result.exit_code == 1
    assert re.fullmatch(r"jpets: --slots: .*\n", result.stderr)
