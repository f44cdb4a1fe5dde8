import bz2
import codecs
import gzip
import json
import lzma
from types import SimpleNamespace

import datasets
import pytest

from flame.data.loading import HUB_ATTEMPTS, load_rows, local_leader_first, with_retries
from flame.data.sources import SourceSpec
from flame.errors import UserError

ROWS = [{"text": "a b"}, {"text": "c"}]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(dataset, **options) -> list[str]:
    return list(load_rows(SourceSpec(str(dataset), **options))["text"])


def write_file(path, suffix: str):
    """The two rows in the format that ``suffix`` names."""
    table = datasets.Dataset.from_list(ROWS)
    if suffix == "parquet":
        table.to_parquet(path)
    elif suffix == "csv":
        path.write_text("text,n\na b,1\nc,2\n")
    elif suffix == "tsv":
        path.write_text("text\tn\na b\t1\nc\t2\n")
    elif suffix == "txt":
        path.write_text("a b\nc\n")
    elif suffix == "json":
        path.write_text(json.dumps(ROWS))
    elif suffix == "arrow":
        table.save_to_disk(path.parent / "saved")
        next((path.parent / "saved").glob("*.arrow")).rename(path)
    else:
        write_jsonl(path)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "ndjson", "json", "csv", "tsv", "txt", "arrow"])
def test_file_formats(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    write_file(path, suffix)
    assert texts(path) == ["a b", "c"]


@pytest.mark.parametrize("module, suffix", [(gzip, "gz"), (bz2, "bz2"), (lzma, "xz")])
def test_compressed_files(tmp_path, module, suffix):
    path = tmp_path / f"rows.jsonl.{suffix}"
    with module.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    assert texts(path) == ["a b", "c"]


def test_a_compression_whose_package_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(b"x")
    with pytest.raises(UserError, match="pip install zstandard"):
        load_rows(SourceSpec(str(path)))


def test_globs_are_read_in_sorted_order(tmp_path):
    write_jsonl(tmp_path / "2.jsonl", [{"text": "second"}])
    write_jsonl(tmp_path / "1.jsonl", [{"text": "first"}])
    assert texts(tmp_path / "*.jsonl") == ["first", "second"]


def test_folders_of_files_and_data_files_inside_them(tmp_path):
    write_jsonl(tmp_path / "1.jsonl", [{"text": "first"}])
    write_jsonl(tmp_path / "2.jsonl", [{"text": "second"}])
    assert texts(tmp_path) == ["first", "second"]
    assert texts(tmp_path, data_files=("2.jsonl",)) == ["second"]


def test_a_folder_of_several_formats_is_named(tmp_path, caplog):
    write_jsonl(tmp_path / "1.jsonl", [{"text": "first"}])
    write_jsonl(tmp_path / "2.jsonl", [{"text": "second"}])
    (tmp_path / "notes.txt").write_text("third\n")
    with caplog.at_level("WARNING"):
        assert texts(tmp_path) == ["first", "second"]
    assert f"{tmp_path} mixes files of several formats (2 json, 1 text)" in caplog.text
    assert f"{tmp_path}/**/*.jsonl or {tmp_path}/**/*.txt" in caplog.text
    caplog.clear()
    assert texts(tmp_path, data_files=("2.jsonl",)) == ["second"]
    assert "mixes" not in caplog.text


def test_saved_datasets(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(tmp_path / "many")
    assert texts(tmp_path / "one") == texts(tmp_path / "many") == ["a b", "c"]


def test_split_can_be_a_slice(tmp_path):
    assert texts(write_jsonl(tmp_path / "rows.jsonl"), split="train[:50%]") == ["a b"]


def test_spaces_in_folder_names(tmp_path):
    (tmp_path / "my data").mkdir()
    assert texts(write_jsonl(tmp_path / "my data" / "my rows.jsonl")) == ["a b", "c"]


@pytest.mark.parametrize(
    "dataset, options, message",
    [
        ("{dir}/none.jsonl", {}, "no such file or folder"),
        ("{dir}/none", {}, "no such file or folder"),
        ("{dir}/none*.txt", {}, "matches no file"),
        ("{dir}/empty.jsonl", {}, "it is empty"),
        ("{dir}/*.js*", {}, "mixes|unknown ending"),
        ("{dir}/broken.jsonl", {}, "JSON parse error"),
        ("{dir}/rows.jsonl", {"split": "dev"}, r"dev.*train"),
        ("{dir}/many", {"split": "dev"}, r"dev.*train, validation"),
        ("{dir}/one", {"split": "dev"}, r"holds one dataset, train"),
        ("{dir}/configs", {}, r"Config name is missing.*one.*two"),
        ("{dir}/configs", {"name": "three"}, r"three.*one.*two"),
        ("no-such/dataset", {}, "no-such/dataset: .*no such file or folder here either"),
    ],
)
def test_faults_say_what_there_is(tmp_path, dataset, options, message):
    write_jsonl(tmp_path / "rows.jsonl")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "script.js").touch()
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"te\n')
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows, validation=rows).save_to_disk(tmp_path / "many")
    (tmp_path / "configs").mkdir()
    for name in ("one", "two"):
        write_jsonl(tmp_path / "configs" / f"{name}.jsonl")
    entries = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("one", "two"))
    (tmp_path / "configs" / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    with pytest.raises(UserError, match=message):
        load_rows(SourceSpec(dataset.format(dir=tmp_path), **options))


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def test_network_faults_are_retried_with_growing_waits(online):
    answers, waits = [ConnectionError("down"), TimeoutError("slow"), None], []

    def action():
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return "rows"

    assert with_retries(action, "some/dataset", waits.append) == "rows"
    assert waits == [2, 4]


def test_lasting_network_faults_end(online):
    waits = []

    def action():
        raise RuntimeError("wrapped") from ConnectionError("down")

    with pytest.raises(RuntimeError):
        with_retries(action, "some/dataset", waits.append)
    assert len(waits) == HUB_ATTEMPTS - 1


@pytest.mark.parametrize(("status", "num_waits"), [(503, 4), (429, 4), (404, 0)])
def test_servers_that_are_down_or_busy_are_asked_again(online, status, num_waits):
    error, waits = OSError("the hub's answer"), []
    error.response = SimpleNamespace(status_code=status)

    def action():
        raise error

    with pytest.raises(OSError, match="the hub's answer"):
        with_retries(action, "some/dataset", waits.append)
    assert waits == [2, 4, 8, 16][:num_waits]


def test_users_faults_are_not_retried(online):
    waits = []

    def action():
        raise datasets.exceptions.DatasetNotFoundError("no such dataset")

    with pytest.raises(FileNotFoundError):
        with_retries(action, "some/dataset", waits.append)
    assert waits == []


def test_the_nodes_leader_goes_first_and_releases_the_others_when_it_fails():
    events = []
    with local_leader_first(False, lambda: events.append("barrier")):
        events.append("follower")
    with pytest.raises(UserError), local_leader_first(True, lambda: events.append("barrier")):
        events.append("leader")
        raise UserError("no data")
    assert events == ["barrier", "follower", "leader", "barrier"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "txt", "jsonl.gz"])
@pytest.mark.parametrize("given", ["file", "folder", "data_files"])
def test_a_byte_order_mark_is_no_text(tmp_path, suffix, given, streaming):
    folder = tmp_path / "rows"
    folder.mkdir()
    path = folder / f"rows.{suffix}"
    plain = path.with_suffix("") if suffix.endswith(".gz") else path
    write_file(plain, suffix.removesuffix(".gz"))
    content = codecs.BOM_UTF8 + plain.read_bytes()
    plain.unlink()
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    if given == "data_files" and suffix in ("csv", "txt"):
        spec = SourceSpec({"csv": "csv", "txt": "text"}[suffix], data_files=(str(path),))
    else:
        spec = SourceSpec(str(path if given == "file" or suffix == "tsv" else folder))
    rows = load_rows(spec, streaming)
    assert [row["text"] for row in (rows.dataset if streaming else rows)] == ["a b", "c"]
