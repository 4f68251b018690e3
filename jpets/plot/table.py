"""Tables of n-gram vectors (HMI's PLOT, section 3.2.1): immutable files that are mapped into memory.

A file holds a header, the vectors in the order of their keys, the sorted keys, and the digest of each block of vectors.
Its name is the digest of its header, which names the digests of all else. Opening reads the keys alone; a block of
vectors is compared with its digest when it is first looked into, so gigabytes open at once and a damaged vector is
never given.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Float, Int, Shaped

from jpets.config import TableFormat, stored_dtype, stored_width
from jpets.errors import Conflict, InvalidTable
from jpets.files import space_errors, sync_folder
from jpets.plot.ngrams import Window
from jpets.plot.values import row_bytes, stored

FORMAT = 1
SUFFIX = ".plot"
BUILDING = ".building-"
"""Prefix of files that are not finished; one may go on with them days later."""
HEADER_BYTES = PAGE = 1 << 16
"""Where vectors begin, and the step at which keys do: the largest page of any machine."""
BLOCK_BYTES = 1 << 18
"""Bytes of vectors under one digest: a hundred n-grams of MiniLM, hashed in a sixth of a millisecond."""
DIGEST_BYTES = hashlib.sha256().digest_size
SYNC_BYTES = 1 << 26
"""Bytes of vectors after which a writer makes sure of them."""
COUNT = struct.Struct("<8sq")
"""At the begin of an unfinished file: ``UNFINISHED``, and the entries that are sure."""
UNFINISHED = b"building"


@dataclasses.dataclass(frozen=True)
class TableInfo:
    """What the entries of a table are: ``layers`` is the digest of the n-gram layers that computed them, ``width`` the
    numbers of a vector, and ``kept_as`` says how they are stored."""

    layers: str
    window: Window
    width: int
    kept_as: TableFormat = "bfloat16"

    @property
    def vectors(self) -> int:
        """Vectors of an entry."""
        return len(self.window.places)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.kept_as, self.vectors, self.width)

    @property
    def row_shape(self) -> tuple[int, int]:
        """Of an entry: vectors, and elements of one."""
        return self.vectors, stored_width(self.kept_as, self.width)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Where the parts of a file with so many entries begin, and where it ends."""

    info: TableInfo
    entries: int

    @property
    def keys(self) -> int:
        return -(-(HEADER_BYTES + self.entries * self.info.row_bytes) // PAGE) * PAGE

    @property
    def digests(self) -> int:
        return self.keys + self.entries * self.info.window.key_dtype.itemsize

    @property
    def blocks(self) -> int:
        return -(-self.entries * self.info.row_bytes // BLOCK_BYTES)

    @property
    def end(self) -> int:
        return self.digests + self.blocks * DIGEST_BYTES


class Table:
    """An open table. The vectors of an entry are ``values[row]`` [p, e], one for each of ``Window.places``, zero for
    a place without a token, as ``jpets.plot.values`` stores them; ``keys`` are sorted. Thread-safe.

    The file may be deleted or replaced while it is open.
    """

    def __init__(self, path: Path, info: TableInfo) -> None:
        """Raises ``InvalidTable`` where the file is damaged, or of other layers, another window or width than
        ``info``."""
        self.info, self.name, self._path = info, path.stem, path
        with path.open("rb") as file:
            header = Header.read(file.read(HEADER_BYTES), path.stem)
            if (found := header.info) != info:
                raise InvalidTable(f"a table must be of {info}, found one of {found}; build it for this backbone")
            parts = Parts(info, header.entries)
            self._stamp = found_size, _ = _stamp(file.fileno())
            if found_size != parts.end:
                raise InvalidTable(f"the table must have {parts.end:,} bytes, found {found_size:,}; build it again")
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            self.file, self.offset = os.dup(file.fileno()), HEADER_BYTES
            """A descriptor of the file, for as long as the table is open, and where its vectors begin."""
            weakref.finalize(self, os.close, self.file)
        self.entries, self.size = header.entries, parts.end
        view = memoryview(mapped)
        self._content = view[HEADER_BYTES : HEADER_BYTES + header.entries * info.row_bytes]
        kept = np.frombuffer(self._content, stored_dtype(info.kept_as))
        self.values: Shaped[np.ndarray, "entries p e"] = kept.reshape(header.entries, *info.row_shape)
        keys, self._digests = view[parts.keys : parts.digests], view[parts.digests : parts.end]
        self.keys: Shaped[np.ndarray, " entries"] = np.frombuffer(keys, info.window.key_dtype)
        for what, own, expected in (("keys", keys, header.keys), ("digests", self._digests, header.blocks)):
            if hashlib.sha256(own).hexdigest() != expected:
                raise InvalidTable(f"the table's {what} are damaged; build it again")
        self._sound = np.zeros(parts.blocks, np.bool_)
        """Blocks that were compared with their digests."""
        self._damaged = set[int]()
        """Blocks that are not what their digests say: each query that needs one is told so at once."""

    @property
    def is_overwritten(self) -> bool:
        """Whether the file was truncated or written to since it was opened: a process that reads past its end is
        killed, and vectors that were found to be sound may be others now."""
        return _stamp(self.file) != self._stamp

    @property
    def is_damaged(self) -> bool:
        """Whether a block was found to be another than was written."""
        return bool(self._damaged)

    @property
    def is_replaced(self) -> bool:
        """Whether it was found damaged, and another file is in its place, which may be whole."""
        try:
            return self.is_damaged and not os.path.samestat(self._path.stat(), os.fstat(self.file))
        except OSError:
            return False

    def find(self, keys: Shaped[np.ndarray, " k"]) -> Int[np.ndarray, " k"]:
        """The row of each key, -1 where there is none. Sorted keys are found ten times as fast."""
        if not self.entries:
            return np.full(len(keys), -1)
        rows = np.minimum(np.searchsorted(self.keys, keys), self.entries - 1)
        return np.where(self.keys[rows] == keys, rows, -1)

    def check(self, rows: Int[np.ndarray, " k"]) -> None:
        """Raises ``InvalidTable`` where the vectors of these rows are not those that were written, and for a token that
        the table should have and has not (-1)."""
        if (rows < 0).any():
            raise InvalidTable("the table lacks a token that it was written with; build it again")
        start = rows.astype(np.int64) * self.info.row_bytes
        first, last = start // BLOCK_BYTES, (start + self.info.row_bytes - 1) // BLOCK_BYTES
        if not (self._sound[first].all() and self._sound[last].all()):
            self._check_blocks(np.unique(np.concatenate([first, last])))

    def check_all(self) -> None:
        """Compares every block. Raises ``InvalidTable``."""
        self._check_blocks(np.arange(len(self._sound)))

    def _check_blocks(self, blocks: Int[np.ndarray, " b"]) -> None:
        for block in blocks[~self._sound[blocks]].tolist():
            if block not in self._damaged:
                own = self._content[block * BLOCK_BYTES :][:BLOCK_BYTES]
                if hashlib.sha256(own).digest() == self._digests[block * DIGEST_BYTES :][:DIGEST_BYTES]:
                    self._sound[block] = True
                    continue
                self._damaged.add(block)
            raise InvalidTable(f"block {block} of the table is damaged; build it again")


def _stamp(file: int) -> tuple[int, int]:
    """Size, and when something was last written."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def finished(folder: Path, info: TableInfo, keys: Shaped[np.ndarray, " entries"]) -> Path | None:
    """The file in ``folder`` that a ``TableWriter`` of these keys has finished already, if it is whole."""
    digest = hashlib.sha256(keys.tobytes()).hexdigest()
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            with path.open("rb") as file:
                header = Header.read(file.read(HEADER_BYTES), path.stem)
            if (header.info, header.keys) == (info, digest):
                Table(path, info).check_all()
                return path
        except (InvalidTable, OSError):  # another one, damaged or removed meanwhile: this one is written
            continue
    return None


class TableWriter:
    """Writes the table of ``keys``, sorted and each once, into ``folder``; vectors come in the order of the keys.

    A writer of the same keys and layers goes on where one that was killed had last made sure of its work. Raises
    ``Conflict`` while that one still runs, and ``OutOfSpace``; what was written stays.
    """

    def __init__(self, folder: Path, info: TableInfo, keys: Shaped[np.ndarray, " entries"]) -> None:
        assert keys.dtype == info.window.key_dtype and (keys[1:] > keys[:-1]).all()
        self._folder, self._info, self._keys = folder, info, keys
        self._parts = Parts(info, len(keys))
        self._keys_digest = hashlib.sha256(keys.tobytes()).hexdigest()
        name = hashlib.sha256(f"{info} {self._keys_digest}".encode()).hexdigest()
        self._path = folder / f"{BUILDING}{name}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        self._claim()
        self.written = self._sure()
        """Entries whose vectors are there."""
        self._synced = self.written

    def append(self, values: Float[np.ndarray, "k p d"]) -> None:
        """Writes the vectors of the next ``k`` entries."""
        assert values.shape[1:] == (self._info.vectors, self._info.width)
        assert self.written + len(values) <= len(self._keys)
        self._write(stored(values, self._info.kept_as).tobytes(), self._at(self.written))
        self.written += len(values)
        if (self.written - self._synced) * self._info.row_bytes >= SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """Makes sure that what was written is there after a crash."""
        with space_errors():
            os.fsync(self._file)
            self._write(COUNT.pack(UNFINISHED, self.written), 0)
            os.fsync(self._file)
        self._synced = self.written

    def finish(self) -> Path:
        """The path of the finished file; all vectors must have been written."""
        assert self.written == len(self._keys)
        digests = b"".join(self._block_digests())
        header = Header(self._info, len(self._keys), self._keys_digest, hashlib.sha256(digests).hexdigest()).to_bytes()
        with space_errors():
            os.ftruncate(self._file, self._parts.keys)
            self._write(self._keys.tobytes(), self._parts.keys)
            self._write(digests, self._parts.digests)
            os.fsync(self._file)  # a file with a header is whole
            self._write(header, 0)
            os.fsync(self._file)
        path = self._folder / f"{hashlib.sha256(header).hexdigest()}{SUFFIX}"
        os.replace(self._path, path)
        os.fchmod(self._file, 0o444)
        sync_folder(self._folder)
        self.close()
        return path

    def close(self) -> None:
        """What was not made sure of is written again by the next writer."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _claim(self) -> None:
        """Raises ``Conflict`` while another writer has the file: it may be one that servers map already."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            own = os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except OSError:
            own = False
        if not own:
            self.close()
            raise Conflict("another process is writing this table; wait until it has ended")

    def _sure(self) -> int:
        """Entries that an earlier writer made sure of. It may have been killed when all but the name was there."""
        start = os.pread(self._file, COUNT.size, 0)
        if len(start) == COUNT.size and start.startswith(UNFINISHED):
            return int(COUNT.unpack(start)[1])
        whole = start.startswith(b"{") and os.fstat(self._file).st_size == self._parts.end  # a header comes last
        return len(self._keys) if whole else 0

    def _at(self, entry: int) -> int:
        return HEADER_BYTES + entry * self._info.row_bytes

    def _write(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        with space_errors():
            while view:
                count = os.pwrite(self._file, view, at)
                view, at = view[count:], at + count

    def _block_digests(self) -> Iterator[bytes]:
        end = self._at(len(self._keys))
        for at in range(HEADER_BYTES, end, BLOCK_BYTES):
            yield hashlib.sha256(os.pread(self._file, min(BLOCK_BYTES, end - at), at)).digest()


@dataclasses.dataclass(frozen=True)
class Header:
    """The begin of a file. ``keys`` and ``blocks`` are the digests of the keys and of the blocks' digests."""

    info: TableInfo
    entries: int
    keys: str
    blocks: str

    def to_bytes(self) -> bytes:
        document = {"format": FORMAT, "block_bytes": BLOCK_BYTES, **dataclasses.asdict(self)}
        return json.dumps(document, sort_keys=True).encode().ljust(HEADER_BYTES)

    @classmethod
    def read(cls, content: bytes, name: str) -> Self:
        """Raises ``InvalidTable`` where ``content`` is not the header of the file of this name."""
        if hashlib.sha256(content).hexdigest() != name:
            raise InvalidTable("the table's header is damaged, or the file was renamed; build it again")
        document = json.loads(content)
        if (found := (document.get("format"), document.get("block_bytes"))) != (FORMAT, BLOCK_BYTES):
            raise InvalidTable(f"a table must have format {FORMAT} with blocks of {BLOCK_BYTES} bytes, found {found}")
        try:
            info = document["info"]
            own = TableInfo(info["layers"], Window(**info["window"]), info["width"], info.get("kept_as", "bfloat16"))
            return cls(own, document["entries"], document["keys"], document["blocks"])
        except (KeyError, TypeError) as error:
            raise InvalidTable("the table's header is of another release of jpets; build it again") from error
