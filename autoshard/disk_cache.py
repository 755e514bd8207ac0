"""Answers kept on disk for the next process: a folder of the user's own, with one file for each key.

Entries are data, never code. Each begins with the digest of what follows, so that one that is cut short or changed is
found, removed and made anew. Files are written whole and then renamed: several processes may use a folder at once.
"""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from contextlib import suppress
from pathlib import Path

from .atomic_write import write_whole

VARIABLE = "AUTOSHARD_CACHE"
"""The environment variable that names the folder, or says ``off``; by default it is ``~/.cache/autoshard``."""
LARGEST_BYTES = 512 << 20
"""What a folder may hold; beyond that, what was not used for longest goes."""


class DiskCache:
    """Entries by their keys, which are texts.

    Args:
        folder: made where it is missing, for this user alone.
        largest_bytes: of all entries together.
        made_by: what makes the entries (a version, a digest of code): part of every key.
    """

    def __init__(self, folder: Path, largest_bytes: int = LARGEST_BYTES, made_by: str = "") -> None:
        self._folder, self._largest_bytes, self._made_by = folder, largest_bytes, made_by

    def get(self, key: str) -> bytes | None:
        """The entry of a key; None where there is none, or none that is whole."""
        path = self._path(key)
        try:
            digest, _, data = path.read_bytes().partition(b"\n")
        except OSError:
            return None
        if digest.decode(errors="replace") != self._digest(key, data):
            self.remove(key)
            return None
        with suppress(OSError):
            os.utime(path)  # it was used now
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keeps an entry; warns where the folder cannot be written."""
        try:
            for folder in (self._folder.parent, self._folder):  # parents would be made for all to read
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._path(key), self._digest(key, data).encode() + b"\n" + data)
            self._trim()
        except OSError as error:
            warnings.warn(
                f"cannot keep what was made in the cache folder {self._folder}: {error.strerror or error}; set "
                f"{VARIABLE} to a folder of yours, or to off",
                stacklevel=2,
            )

    def remove(self, key: str) -> None:
        """Forgets the entry of a key."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._folder / self._digest(key, b"")

    def _digest(self, key: str, data: bytes) -> str:
        return hashlib.sha256(f"{self._made_by}\n{key}\n".encode() + data).hexdigest()

    def _trim(self) -> None:
        entries = []
        for path in self._folder.iterdir():
            with suppress(OSError):  # another process has removed it
                entries.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        left = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if left <= self._largest_bytes:
                return
            with suppress(OSError):
                path.unlink()
            left -= size


def disk_cache(kind: str, made_by: str) -> DiskCache | None:
    """The user's cache of one kind of entries; None where it is off, or its folder is not the user's alone.

    Args:
        made_by: as for :class:`DiskCache`.

    Warns:
        UserWarning: others may write into the folder.
    """
    said = os.environ.get(VARIABLE)
    if said is not None and said.strip().lower() in ("", "0", "off"):
        return None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(said or os.path.join(base, "autoshard"))
    if not _is_own(folder):
        warnings.warn(
            f"the cache folder {folder} is not used, as others may write into it: chmod 700 {folder}, or set "
            f"{VARIABLE} to a folder of yours, or to off",
            stacklevel=2,
        )
        return None
    return DiskCache(folder / kind, made_by=made_by)


def _is_own(folder: Path) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return True  # it is made when something is kept, or that says why it cannot be
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
