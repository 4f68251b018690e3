"""Where a server finds its tasks: ``--repository``, ``--catalogue`` and ``--blobs``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from postgresql import PASSWORD

from checkpoints.backbone import Backbone
from jpets.app.hosting import opened_repository
from jpets.errors import JpetsError
from serving.options.options import Options
from serving.options.sources import read_sources

SECRET = "not-to-be-told"


def options(tmp_path: Path, **given: Any) -> Options:
    return Options(demo=True, cache_dir=tmp_path / "cache", **given)


def test_parts_may_lie_elsewhere(
    tmp_path: Path, backbone: Backbone, upload: Any, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Tasks stored by one server are on the other too; jobs belong to the server with a folder of its own."""
    data = upload("a", seed=1)
    shared = {"catalogue": schema, "blobs": f"file://{tmp_path}/blobs"}
    alone = options(tmp_path, repository=tmp_path / "own", **shared)
    with (
        caplog.at_level(logging.DEBUG),
        opened_repository(options(tmp_path, **shared), backbone) as first,
        opened_repository(alone, backbone) as second,
    ):
        first.put("a", data)
        assert second.read(second.get("a")) == data
        assert second.folder == tmp_path / "own" and first.folder != second.folder
    assert [record.message for record in caplog.records] == [
        "jobs are gone when the server ends; give --repository DIR to keep them"
    ]
    assert PASSWORD not in f"{caplog.text} {alone!r} {alone}"


def test_copies_are_in_the_cache_folder(tmp_path: Path, backbone: Backbone, upload: Any) -> None:
    told = options(tmp_path, repository=tmp_path / "own", blobs="memory://copied/tasks")
    with opened_repository(told, backbone) as repository:
        stored = repository.put("a", upload("a", seed=1))
    assert (tmp_path / "cache" / "task-files" / f"{stored.digest}.safetensors").is_file()
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["catalog.sqlite"]


def test_a_new_catalogue_beside_old_blobs_is_refused(tmp_path: Path, backbone: Backbone, upload: Any) -> None:
    """Otherwise a server would, at its start, remove the blobs that the catalogue does not name."""
    data, blobs = upload("a", seed=1), "memory://kept/tasks"
    first, second = (options(tmp_path / name, repository=tmp_path / name, blobs=blobs) for name in ("old", "new"))
    with opened_repository(first, backbone) as old:
        stored = old.put("a", data)
        with (
            pytest.raises(JpetsError, match="--blobs: the storage of task files belongs to another catalogue"),
            opened_repository(second, backbone),
        ):
            pass
        assert old._blobs.exists(stored.digest)


@pytest.mark.parametrize("given", [{"catalogue": "sqlite:////x/y"}, {"blobs": "memory://x"}])
def test_half_a_place_is_refused(tmp_path: Path, backbone: Backbone, given: dict[str, str]) -> None:
    """A catalogue that ends with the server would remove or lose the blobs that are kept elsewhere."""
    with (
        pytest.raises(JpetsError, match="--catalogue, --blobs"),
        opened_repository(options(tmp_path, **given), backbone),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"catalogue": f"mysql://me:{SECRET}@host/x"}, "--catalogue: a catalogue's URL is like"),
        ({"catalogue": f"postgresql://me:{SECRET}@127.0.0.1:1/x"}, "--catalogue: .*cannot be reached.*refused"),
        ({"catalogue": "sqlite:////no-such-folder/catalog"}, "--catalogue cannot be opened: unable to open"),
        ({"blobs": f"nosuch://me:{SECRET}@host/x"}, "--blobs: there are no task files"),
        ({"blobs": "file:///dev/null/x"}, "--blobs cannot be opened: "),
    ],
)
def test_what_cannot_be_opened_is_named(tmp_path: Path, backbone: Backbone, given: dict[str, str], named: str) -> None:
    if "postgresql" in str(given):
        pytest.importorskip("psycopg")
    told = options(tmp_path, repository=tmp_path / "own", **given)
    with pytest.raises((JpetsError, OSError), match=named) as caught, opened_repository(told, backbone):
        pass
    assert SECRET not in str(caught.value)


def test_a_wrong_password_is_not_told(tmp_path: Path, backbone: Backbone, postgresql: sa.URL) -> None:
    url = postgresql.set(password=SECRET).render_as_string(hide_password=False)
    told = options(tmp_path, repository=tmp_path, catalogue=url)
    with pytest.raises(JpetsError, match="password authentication failed") as caught, opened_repository(told, backbone):
        pass
    assert SECRET not in str(caught.value)


def test_a_url_of_the_wrong_kind_keeps_its_password(tmp_path: Path) -> None:
    file = tmp_path / "jpets.toml"
    file.write_text(f'catalogue = ["postgresql://me:{SECRET}@host/x"]')
    with pytest.raises(JpetsError, match="catalogue") as caught:
        read_sources({"demo": True}, file)
    assert SECRET not in str(caught.value)
