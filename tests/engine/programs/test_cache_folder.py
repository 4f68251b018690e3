"""The folder of compiled programs: made, refused by name, or replaced by a temporary one."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from jpets.engine.programs import cache_folder
from jpets.engine.programs.cache_folder import default_cache_dir, open_cache
from jpets.errors import InvalidInput

UNMAKABLE = Path("/proc/no-such-process/jpets")
"""A folder that not even root can make."""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JPETS_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's random user: no HOME, no entry in the password database."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_a_folder_that_can_be_written_is_taken_as_it_is(tmp_path: Path) -> None:
    assert open_cache(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["costs", "programs"]


@pytest.mark.parametrize("by", ["option", "variable"])
@pytest.mark.parametrize("place", ["file", "below a file", "no folder can be made"])
def test_a_folder_that_was_asked_for_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, place: str
) -> None:
    (tmp_path / "file").write_text("")
    folder = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "cache"}.get(place, UNMAKABLE)
    if by == "variable":
        monkeypatch.setenv("JPETS_CACHE_DIR", str(folder))
    with pytest.raises(InvalidInput, match="--cache-dir") as refused:
        open_cache(folder if by == "option" else None)
    assert repr(str(folder)) in refused.value.message


@pytest.mark.parametrize("home", ["/proc/no-such-process", None])
def test_without_a_default_folder_programs_are_kept_for_the_process(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, home: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if home is None:
        request.getfixturevalue("no_home")
    else:
        monkeypatch.setenv("HOME", home)
    folder = open_cache()
    (folder / "programs" / "one").write_bytes(b"1")
    assert open_cache() == folder
    assert "--cache-dir" in caplog.text


def test_a_folder_that_may_only_be_read_still_gives_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "old.program").write_bytes(b"old")
    monkeypatch.setattr(cache_folder, "why_not", lambda folder: "Read-only file system")
    folder = open_cache(tmp_path)
    assert folder != tmp_path
    assert (folder / "programs" / "old.program").read_bytes() == b"old"
    assert "Read-only file system" in caplog.text


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"JPETS_CACHE_DIR": "~/mine"}, "mine"),
        ({"XDG_CACHE_HOME": "~/own"}, ".cache/jpets"),  # the specification ignores what is not absolute
        ({}, ".cache/jpets"),
    ],
)
def test_a_tilde_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_cache_dir() == tmp_path / expected


@pytest.mark.usefixtures("no_home")
def test_a_tilde_without_a_home_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for asked in ("~/programs", "~no-such-user/programs"):
        with pytest.raises(InvalidInput, match="home folder"):
            open_cache(Path(asked))
    monkeypatch.setenv("JPETS_CACHE_DIR", "~/programs")
    with pytest.raises(InvalidInput, match=r"--cache-dir.*home folder"):
        open_cache()
    assert os.listdir(tmp_path) == []
