import json

import pytest

from flame.checkpoint.manifest import (
    MANIFEST,
    BrokenCheckpoint,
    FileEntry,
    Manifest,
    check_complete,
    check_contents,
    is_being_read,
    read_manifest,
    reading,
    sha256,
    write_manifest,
)


def make(folder, names=("__0_0_0.distcp", "__1_0_0.distcp", ".metadata")):
    for name in names:
        (folder / name).write_bytes(name.encode() * 3)
    files = {name: FileEntry((folder / name).stat().st_size, sha256(folder / name)) for name in names}
    manifest = Manifest(step=5, world_size=2, contents=("model",), files=files)
    write_manifest(folder, manifest)
    return manifest


def test_round_trip(tmp_path):
    manifest = make(tmp_path)
    assert read_manifest(tmp_path) == manifest
    check_complete(tmp_path, manifest)
    check_contents(tmp_path, manifest.files)
    assert manifest.num_bytes == 3 * (14 + 14 + 9)


def test_half_files(tmp_path):
    manifest = make(tmp_path)
    (tmp_path / "__1_0_0.distcp").unlink()
    with pytest.raises(BrokenCheckpoint, match=r"1 of 2 shard files found; missing: __1_0_0.distcp"):
        check_complete(tmp_path, manifest)


def test_truncated_file(tmp_path):
    manifest = make(tmp_path)
    (tmp_path / "__1_0_0.distcp").write_bytes(b"x")
    with pytest.raises(BrokenCheckpoint, match="has 1 bytes instead of 42"):
        check_complete(tmp_path, manifest)


def test_flipped_bit(tmp_path):
    manifest = make(tmp_path)
    data = bytearray((tmp_path / ".metadata").read_bytes())
    data[4] ^= 1
    (tmp_path / ".metadata").write_bytes(data)
    check_complete(tmp_path, manifest)
    with pytest.raises(BrokenCheckpoint, match=r"\.metadata is damaged"):
        check_contents(tmp_path, manifest.files)


def test_any_flipped_bit_of_the_manifest_is_found(tmp_path):
    make(tmp_path)
    good = (tmp_path / MANIFEST).read_bytes()
    for position, byte in enumerate(good):
        if chr(byte) in " \n":
            continue  # white space between the entries means nothing
        (tmp_path / MANIFEST).write_bytes(good[:position] + bytes([byte ^ 4]) + good[position + 1 :])
        with pytest.raises(BrokenCheckpoint, match=r"damaged|leads out|later flame"):
            read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/b", "", "a\\b"])
def test_names_cannot_leave_the_folder(tmp_path, name):
    make(tmp_path)
    body = json.loads((tmp_path / MANIFEST).read_text())
    body["files"][name] = {"bytes": 1, "sha256": None}
    (tmp_path / MANIFEST).write_text(json.dumps(body))
    with pytest.raises(BrokenCheckpoint, match="leads out of the checkpoint folder"):
        read_manifest(tmp_path)


def test_links_are_refused(tmp_path):
    folder = tmp_path / "step-5"
    folder.mkdir()
    manifest = make(folder)
    shard = folder / "__0_0_0.distcp"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BrokenCheckpoint, match="is a link"):
        check_complete(folder, manifest)


def test_a_later_format_is_named(tmp_path):
    manifest = make(tmp_path)
    write_manifest(tmp_path, Manifest(**{**vars(manifest), "format": 99, "flame": "9.9"}))
    with pytest.raises(BrokenCheckpoint, match=r"format 99 was written by a later flame \(9.9\)"):
        read_manifest(tmp_path)


def test_reading_holds_a_lock(tmp_path):
    make(tmp_path)
    with reading(tmp_path):
        assert is_being_read(tmp_path)
    assert not is_being_read(tmp_path)
