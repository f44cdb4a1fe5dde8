import pytest

from flame.checkpoint.folders import (
    choose_step,
    clean,
    list_steps,
    publish,
    purge,
    set_aside,
    start_writing,
    step_folder,
)
from flame.checkpoint.manifest import FileEntry, Manifest, reading, write_manifest
from flame.errors import UserError


def write(root, step, text="weights"):
    folder = start_writing(root, step)
    (folder / "a.distcp").write_text(text)
    write_manifest(folder, Manifest(step, 1, ("model",), {"a.distcp": FileEntry(len(text))}))
    return folder


def make(root, *steps):
    for step in steps:
        write(root, step)
        publish(root, step)


def test_only_published_steps_are_listed(tmp_path):
    make(tmp_path, 1, 20, 3)
    write(tmp_path, 4)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-007").mkdir()
    assert sorted(list_steps(tmp_path).complete) == [1, 3, 20]
    assert not list_steps(tmp_path / "nowhere").complete


def test_broken_steps_are_listed_with_the_reason(tmp_path):
    make(tmp_path, 1, 2, 3)
    (step_folder(tmp_path, 2) / "a.distcp").unlink()
    (step_folder(tmp_path, 3) / "manifest.json").unlink()
    step_folder(tmp_path, 1).rename(step_folder(tmp_path, 9))
    listing = list_steps(tmp_path)
    assert not listing.complete
    assert "0 of 1 shard files found" in listing.broken[2]
    assert listing.broken[3] == "no manifest.json"
    assert "manifest says step 1" in listing.broken[9]


def test_choose_step(tmp_path):
    assert choose_step(tmp_path, -1, list_steps(tmp_path)) is None
    make(tmp_path, 10, 20)
    assert choose_step(tmp_path, -1, list_steps(tmp_path)) == 20
    assert choose_step(tmp_path, 10, list_steps(tmp_path)) == 10


def test_bad_step(tmp_path):
    """A step that is not there is an error with the list of those that are, never a fresh start."""
    make(tmp_path, 10, 20, 30)
    (step_folder(tmp_path, 30) / "a.distcp").unlink()
    with pytest.raises(UserError, match=r"load_step = 999.*steps there are: 10, 20 \(broken: step-30: 0 of 1 shard"):
        choose_step(tmp_path, 999, list_steps(tmp_path))
    with pytest.raises(UserError, match="step-30 is broken: 0 of 1 shard files found"):
        choose_step(tmp_path, 30, list_steps(tmp_path))


def test_all_broken_is_no_fresh_start(tmp_path):
    make(tmp_path, 10)
    (step_folder(tmp_path, 10) / "a.distcp").unlink()
    with pytest.raises(UserError, match="to start from the beginning, move these folders away"):
        choose_step(tmp_path, -1, list_steps(tmp_path))


def test_publish_replaces_a_step(tmp_path):
    make(tmp_path, 1)
    write(tmp_path, 1, "newer")
    publish(tmp_path, 1)
    assert (step_folder(tmp_path, 1) / "a.distcp").read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_purge_keeps_the_newest_and_what_it_does_not_know(tmp_path):
    make(tmp_path, 1, 2, 3, 4)
    (step_folder(tmp_path, 1) / "a.distcp").unlink()
    (tmp_path / "notes.txt").write_text("mine")
    assert purge(tmp_path, keep=0) == []
    assert purge(tmp_path, keep=2) == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-1", "step-3", "step-4"]


def test_purge_spares_what_is_read_and_what_was_just_saved(tmp_path):
    make(tmp_path, 1, 2, 3, 4)
    with reading(step_folder(tmp_path, 1)):
        assert purge(tmp_path, keep=1, protect=[2]) == [3]
    assert sorted(list_steps(tmp_path).complete) == [1, 2, 4]


def test_clean_removes_leftovers_only(tmp_path):
    make(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / ".step-0.del").mkdir()
    (tmp_path / ".hidden").mkdir()
    assert clean(tmp_path) == [".step-0.del", ".step-2.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "step-1"]


def test_clean_puts_back_a_step_whose_successor_was_not_published(tmp_path):
    make(tmp_path, 1)
    write(tmp_path, 1, "newer")
    step_folder(tmp_path, 1).rename(tmp_path / ".step-1.old")
    assert clean(tmp_path) == [".step-1.tmp"]
    assert (step_folder(tmp_path, 1) / "a.distcp").read_text() == "weights"


def test_steps_of_a_course_that_was_left_are_set_aside(tmp_path):
    make(tmp_path, 2, 4, 6)
    assert set_aside(tmp_path, 2) == [4, 6]
    assert sorted(list_steps(tmp_path).complete) == [2]
    assert (tmp_path / "step-6.replaced" / "manifest.json").exists()
