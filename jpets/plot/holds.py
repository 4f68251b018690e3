"""Files beside a tree that stay although it does not name them: whoever made them will have it do so, even days later.

A hold names the files, and the path of something that is there for as long as they are wanted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set
from pathlib import Path

from jpets.files import write_atomic

HOLDS = "holds"
SUFFIX = ".json"


def hold(folder: Path, files: Set[str], wanted_by: Path) -> None:
    """Has ``Tree.change`` leave these files of a tree's ``folder`` until ``wanted_by`` is gone. Raises
    ``OutOfSpace``."""
    path = str(wanted_by.resolve())
    name = hashlib.sha256(path.encode()).hexdigest()
    document = json.dumps({"files": sorted(files), "wanted_by": path})
    (folder / HOLDS).mkdir(exist_ok=True)
    write_atomic(folder / HOLDS / f"{name}{SUFFIX}", document.encode())


def held(folder: Path) -> set[str]:
    """The files that are still wanted. Other holds are removed."""
    found = set[str]()
    for path in (folder / HOLDS).glob(f"*{SUFFIX}"):
        document = json.loads(path.read_bytes())
        if _is_there(Path(document["wanted_by"])):
            found.update(document["files"])
        else:
            path.unlink()
    return found


def _is_there(path: Path) -> bool:
    """Also where it may not be looked at."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError:
        pass
    return True
