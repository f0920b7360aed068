"""Reading runs: while they are written, resumed, or in a newer format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from stored_runs import train_at
from stores import Place
from written import Written
from zarr.storage import LocalStore, WrapperStore

from distcockpit import open_run
from distcockpit import quantities as q
from distcockpit.run import verify
from distcockpit.store.lock import KEY as LOCK
from distcockpit.store.names import plain
from distcockpit.store.reading import UnsafeStoreError


def test_what_plain_keeps() -> None:
    assert plain("layer.0.weight") == "layer.0.weight" and plain("層.weight") == "層.weight"
    assert plain("a\x1b[31m\nb\u202ec\u2028") == "a\ufffd[31m\ufffdb\ufffdc\ufffd"
    assert len(plain("x" * 500)) == 120 and plain("x" * 500).startswith("x" * 60 + "…")


# -- stores that need not be trusted -----------------------------------------------------------------------------------


def damage(document: dict[str, Any], path: str, **changes: Any) -> None:
    document["consolidated_metadata"]["metadata"][path].update(changes)


def grid(*shape: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


HARMFUL = {
    "object type": {"data_type": "object"},
    "pickle": {"codecs": [{"name": "numcodecs.pickle"}, {"name": "blosc"}]},
    "another codec": {"codecs": [{"name": "bytes"}, {"name": "gzip"}]},
    "sharding": {"codecs": [{"name": "sharding_indexed"}, {"name": "blosc"}]},
    "huge chunk": {"chunk_grid": grid(1 << 40)},
    "negative shape": {"shape": [-1]},
    "number as text": {"shape": ["7"]},
    "zarr v2": {"zarr_format": 2},
    "storage transformer": {"storage_transformers": [{"name": "evil"}]},
    "no shape": {"shape": None},
}


@pytest.mark.parametrize("case", HARMFUL)
def test_documents_that_are_not_ours_are_refused(tmp_path: Path, case: str) -> None:
    train_at(Place(tmp_path / "run"), range(2))
    root = json.loads((tmp_path / "run/zarr.json").read_text())
    damage(root, "mean_gsnr/mean_gsnr", **HARMFUL[case])
    (tmp_path / "run/zarr.json").write_text(json.dumps(root))
    with pytest.raises(UnsafeStoreError, match="not a valid distcockpit run"):
        open_run(tmp_path / "run")


def test_sizes_are_checked_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train_at(Place(path), range(2))
    good = (path / "zarr.json").read_text()

    def damaged(array: str, **changes: Any) -> None:
        root = json.loads(good)
        damage(root, array, **changes)
        (path / "zarr.json").write_text(json.dumps(root))

    damaged("mean_gsnr/step", shape=[1 << 45])  # 256 TiB that xarray would load at once
    with pytest.raises(UnsafeStoreError, match="need .* chunks, but there are only 1"):
        open_run(path)
    root = json.loads(good)
    root["consolidated_metadata"]["metadata"]["../up"] = root["consolidated_metadata"]["metadata"]["log"]
    (path / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(UnsafeStoreError, match="not a valid name"):
        open_run(path)
    (path / "zarr.json").write_text(good)
    chunk = path / "mean_gsnr/mean_gsnr/c/0"
    data = bytearray(chunk.read_bytes())
    data[4:8] = (0xFFFFFFF0).to_bytes(4, "little")  # blosc would take 4 GiB
    chunk.write_bytes(data)
    run = open_run(path)
    with pytest.raises(UnsafeStoreError, match="claims to have 4294967280 bytes"):
        run["mean_gsnr"]["mean_gsnr"].load()
    assert len(verify(path)) == 1 and "claims to have" in verify(path)[0]
    chunk.write_bytes(bytes(data)[:40])
    with pytest.raises(UnsafeStoreError):
        open_run(path)["mean_gsnr"]["mean_gsnr"].load()
    chunk.unlink()
    assert verify(path) == ["mean_gsnr/mean_gsnr/c/0 is missing"]
    for text in ("[", "[]", '{"attributes": 3}', "[" * 100_000):
        (path / "zarr.json").write_text(text)
        with pytest.raises(UnsafeStoreError, match="is not a distcockpit run"):
            open_run(path)


class Ends(WrapperStore):
    """A store whose run is closed while it is read."""

    run: ClassVar[Written]

    def with_read_only(self, read_only: bool = False) -> Ends:
        return Ends(self._store.with_read_only(read_only))  # which zarr's wrapper itself has from 3.1.6 on

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        if key == LOCK:
            self.run.close()
        return await super().get(key, *arguments, **options)


def test_a_run_that_ends_while_it_is_read_was_not_killed(tmp_path: Path) -> None:
    store = Ends(LocalStore(tmp_path / "run"))
    Ends.run = Written(tmp_path / "run", [q.Loss()]).rows(3)
    assert open_run(tmp_path / "run").attrs["state"] == "running"
    assert open_run(store).attrs["state"] == "closed"


def test_a_folder_of_runs_is_told_from_a_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Written(tmp_path / name, [q.Loss()]).rows(1).close()
    with pytest.raises(ValueError, match=f"is not a distcockpit run, but a folder of runs; open one of them: .*{'b'}'"):
        open_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="DISTCOCKPIT=off"):
        open_run("")  # as `cockpit.store` is then
