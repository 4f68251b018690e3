"""A PostgreSQL of the tests' own, where its programs are installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString

import pytest
import sqlalchemy as sa

PASSWORD = "not-to-be-shown"
DEBIAN = Path("/usr/lib/postgresql")
"""Where programs of the server are that are on nobody's path."""


def program(name: str) -> str:
    """Skips the test where it is not there."""
    pytest.importorskip("psycopg")
    beside = sorted(DEBIAN.glob(f"*/bin/{name}"))
    found = shutil.which(name) or (str(beside[-1]) if beside else None)
    if found is None:
        pytest.skip(f"PostgreSQL is not installed: there is no {name}")
    return found


@contextlib.contextmanager
def running_postgresql() -> Iterator[sa.URL]:
    """A server that listens on a socket in a folder, and goes with the block."""
    initdb, postgres = program("initdb"), program("postgres")
    with tempfile.TemporaryDirectory(prefix="jpets-pg-") as name:
        folder = Path(name)
        how: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL}
        if os.geteuid() == 0:  # the server does not run as root
            how["user"] = "nobody"
            shutil.chown(folder, "nobody")
        (folder / "password").write_text(PASSWORD)
        where = ["-D", name + "/data"]
        as_user = ["-U", "jpets", "--auth=scram-sha-256", f"--pwfile={name}/password"]
        subprocess.run([initdb, *where, *as_user, "--no-sync", "-E", "UTF8", "--locale=C.UTF-8"], check=True, **how)
        quick = ["-c", "fsync=off", "-c", "listen_addresses=", "-c", "log_min_messages=log"]
        with subprocess.Popen(
            [postgres, *where, "-k", name, *quick], stderr=subprocess.PIPE, text=True, **how
        ) as server:
            try:
                assert server.stderr is not None
                line = next((line for line in server.stderr if "ready to accept connections" in line), None)
                assert line is not None, "the server ended"
                yield sa.URL.create("postgresql", "jpets", PASSWORD, database="postgres", query={"host": name})
            finally:
                server.send_signal(signal.SIGINT)  # at once, whoever is still connected
                server.communicate()


@contextlib.contextmanager
def fresh_schema(server: sa.URL, name: str) -> Iterator[str]:
    """The URL of an empty schema, which goes with the block."""
    import psycopg

    def execute(statement: LiteralString) -> None:
        with psycopg.connect(server.render_as_string(hide_password=False), autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL(statement).format(psycopg.sql.Identifier(name)))

    execute("CREATE SCHEMA {}")
    yield server.update_query_dict({"options": f"-csearch_path={name}"}).render_as_string(hide_password=False)
    execute("DROP SCHEMA {} CASCADE")
