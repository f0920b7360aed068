"""Where the bytes of a store go: a folder, or any zarr store. Knows about keys and bytes, but not about rows.

A folder is written directly: files are replaced atomically by renaming, and only the file system is needed, even at
interpreter shutdown. Everything else goes through ``zarr.abc.store.Store``, many keys at a time, and every call has a
time limit.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore

T = TypeVar("T")

TIME = "{time}"  # in a path: the time of the start
PARTIAL = ".partial"  # suffix of files that were being written when their process died
AT_ONCE = 32  # concurrent requests to a remote store


class Keys(ABC):
    """Keys and their bytes. Replacing one key is atomic; replacing several is not."""

    name: str  # for people

    @abstractmethod
    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The bytes of the keys that exist."""

    @abstractmethod
    def put(self, items: Mapping[str, bytes]) -> None:
        """Write keys, in any order; when it returns, all are written."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write a key unless it exists; return True if it was written."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove keys; missing ones are ignored."""

    @abstractmethod
    def list(self) -> list[str]:
        """All keys, including files that are not keys."""

    @abstractmethod
    def is_empty(self) -> bool:
        """True if there is nothing there."""

    @abstractmethod
    def clear(self) -> None:
        """Remove everything."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Size of a key in bytes, or ``None``."""

    @abstractmethod
    def total(self) -> int:
        """Total size of all keys in bytes."""

    @abstractmethod
    def count(self, folder: str, enough: int) -> int:
        """Number of keys directly below a folder; counting may stop at ``enough``."""

    @abstractmethod
    def store(self) -> Store:
        """The same store, for reading through zarr."""

    def get_one(self, key: str) -> bytes | None:
        """The bytes of a key, or ``None``."""
        return self.get([key]).get(key)


class FolderKeys(Keys):
    """Files in a folder.

    Args:
        path: The folder; it is created when the first key is written.
        durable: Sync each file to disk, so that it survives a power loss.
    """

    def __init__(self, path: Path, durable: bool = False) -> None:
        self.path, self.name, self._durable = path, str(path), durable

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Read files."""
        found = {}
        for key in keys:
            try:
                found[key] = (self.path / key).read_bytes()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
        return found

    def put(self, items: Mapping[str, bytes]) -> None:
        """Write each file under a temporary name, then rename it."""
        for key, data in items.items():
            target, temporary = self._written_beside(key, data)
            try:
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        if self._durable:
            for folder in {(self.path / key).parent for key in items}:
                _flush_folder(folder)

    def create(self, key: str, data: bytes) -> bool:
        """Create a hard link, which only one process can do."""
        target, temporary = self._written_beside(key, data)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            if target.exists():
                return False
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _written_beside(self, key: str, data: bytes) -> tuple[Path, Path]:
        target = self.path / key
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{os.getpid()}{PARTIAL}")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                if self._durable:
                    file.flush()
                    os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return target, temporary

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files."""
        for key in keys:
            (self.path / key).unlink(missing_ok=True)

    def list(self) -> list[str]:
        """All files below the folder."""
        return [
            os.path.relpath(os.path.join(folder, file), self.path).replace(os.sep, "/")
            for folder, _, files in os.walk(self.path)
            for file in files
        ]

    def is_empty(self) -> bool:
        """Nothing there, or an empty folder."""
        return not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir()))

    def clear(self) -> None:
        """Remove everything at once, so that no reader sees half a run."""
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}.old")
        self.path.rename(aside)
        shutil.rmtree(aside)

    def size(self, key: str) -> int | None:
        """Size of the file."""
        try:
            return (self.path / key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def total(self) -> int:
        """Total size; files may disappear while they are counted."""
        return sum(self.size(key) or 0 for key in self.list())

    def count(self, folder: str, enough: int) -> int:
        """Number of files, not counting unfinished ones."""
        try:
            names = os.scandir(self.path / folder)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        with names:
            whole = (name for name in names if not name.name.endswith(PARTIAL))
            return sum(1 for _ in itertools.islice(whole, enough))

    def store(self) -> Store:
        """The folder as zarr sees it."""
        return LocalStore(self.path, read_only=True)


class StoreKeys(Keys):
    """A zarr store: memory, S3, anything.

    Args:
        store: The store.
        name: Name shown to users.
        seconds: Maximum time that a call may take.
    """

    def __init__(self, store: Store, name: str, seconds: float) -> None:
        self._store, self.name, self._seconds = store, name, seconds

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on zarr's own event loop, which the store's connections belong to.

        Raises:
            TimeoutError: If it takes too long.
        """

        async def limited() -> T:
            async with asyncio.timeout(self._seconds):
                return await work

        try:
            return sync(limited(), timeout=self._seconds + 5)  # the extra time is for a store that blocks the loop
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {self._seconds:g} s") from error

    def _each(self, make: Any, items: Iterable[Any]) -> list[Any]:
        async def all_of_them() -> list[Any]:
            gate = asyncio.Semaphore(AT_ONCE)

            async def one(item: Any) -> Any:
                async with gate:
                    return await make(item)

            return await asyncio.gather(*(one(item) for item in items))

        return self._run(all_of_them())

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Several at a time."""
        keys, prototype = list(keys), default_buffer_prototype()
        found = self._each(lambda key: self._store.get(key, prototype), keys)
        return {key: buffer.to_bytes() for key, buffer in zip(keys, found, strict=True) if buffer is not None}

    def put(self, items: Mapping[str, bytes]) -> None:
        """Several at a time."""
        make = default_buffer_prototype().buffer.from_bytes
        self._each(lambda item: self._store.set(item[0], make(item[1])), items.items())

    def create(self, key: str, data: bytes) -> bool:
        """As exclusive as the store allows; reading the key afterwards shows which writer won."""
        self._run(self._store.set_if_not_exists(key, default_buffer_prototype().buffer.from_bytes(data)))
        return self.get_one(key) == data

    def delete(self, keys: Iterable[str]) -> None:
        """Several at a time."""
        self._each(self._store.delete, keys)

    def list(self) -> list[str]:
        """All keys."""

        async def collected() -> list[str]:
            return [key async for key in self._store.list()]

        return self._run(collected())

    def is_empty(self) -> bool:
        """True if there is no key."""
        return self._run(self._store.is_empty(""))

    def clear(self) -> None:
        """Remove the root first, so that no reader mistakes the rest for a run."""
        self.delete(["zarr.json"])
        self.delete(self.list())

    def size(self, key: str) -> int | None:
        """Size of the value."""

        async def asked() -> int | None:
            try:
                return await self._store.getsize(key)
            except FileNotFoundError:
                return None

        return self._run(asked())

    def total(self) -> int:
        """Ask the store."""
        return self._run(self._store.getsize_prefix(""))

    def count(self, folder: str, enough: int) -> int:
        """Count keys until there are enough."""

        async def counted() -> int:
            n = 0
            async for _ in self._store.list_dir(folder):
                n += 1
                if n >= enough:
                    break
            return n

        return self._run(counted())

    def store(self) -> Store:
        """The store itself."""
        return self._store


def check_store(store: object, mode: str = "") -> str:
    """Check a store and return its name for users.

    Args:
        store: What was passed.
        mode: How it will be opened, if that matters.

    Raises:
        TypeError: If it is not a store.
        ValueError: If it is read-only, or named by the time and to be resumed.
    """
    if mode == "a" and isinstance(store, str | os.PathLike) and TIME in os.fspath(store):
        raise ValueError(
            f"store={os.fspath(store)!r}, mode='a': a store named by the time is always new, so there is nothing to "
            "resume. Pass the path of the run to resume."
        )
    if isinstance(store, Store):
        return _folder(store).name if isinstance(store, LocalStore) else str(store)
    if not isinstance(store, str | os.PathLike):
        raise TypeError(f"store={store!r}: must be a path, a URL such as 's3://bucket/run.zarr', or a zarr store.")
    if not os.fspath(store):
        raise ValueError("store='': must be a path, a URL such as 's3://bucket/run.zarr', or a zarr store.")
    return os.fspath(store)


def named_by_time(store: str | os.PathLike[str] | Store) -> str | os.PathLike[str] | Store:
    """Put the current time into a path, where it asks for it."""
    if isinstance(store, Store) or TIME not in os.fspath(store):
        return store
    return os.fspath(store).replace(TIME, time.strftime("%Y%m%d-%H%M%S"))


def keys_of(
    store: str | os.PathLike[str] | Store,
    storage_options: Mapping[str, Any] | None = None,
    seconds: float = 30.0,
    durable: bool = False,
) -> Keys:
    """The keys of a path, a URL or a store.

    Args:
        store: A path, a URL that fsspec knows, or a zarr store.
        storage_options: fsspec options, for a URL.
        seconds: Maximum time that a call to a store other than a folder may take.
        durable: As for `FolderKeys`.

    Raises:
        TypeError: If it is not a store.
        ValueError: If the protocol is unknown, or options are given that do not apply.
        ImportError: If the protocol needs a package that is not installed.
    """
    name = check_store(store)
    url = isinstance(store, str) and "://" in store and not store.startswith("file://")
    if storage_options and not url:
        raise ValueError(
            f"storage_options={dict(storage_options)!r}: only apply to a URL such as 's3://bucket/run.zarr', not to "
            f"store={name!r}."
        )
    if isinstance(store, LocalStore):
        return FolderKeys(store.root.absolute(), durable)
    if isinstance(store, Store):
        return StoreKeys(store, name, seconds)
    if not url:
        # The training script may change its working directory.
        return FolderKeys(Path(name.removeprefix("file://")).absolute(), durable)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return StoreKeys(FsspecStore.from_url(name, dict(storage_options or {})), name, seconds)
    except ImportError as error:
        raise ImportError(f"store={name!r}: {error}. For S3: pip install 'distcockpit[remote]'.") from error
    except ValueError as error:
        raise ValueError(f"store={name!r}: {error}") from error


def _folder(store: LocalStore) -> FolderKeys:
    return FolderKeys(store.root.absolute())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
