import pickle
from types import SimpleNamespace

import datasets
import pytest

from flame.data.sources import DatasetSource, SourceSpec, open_source, open_sources, source_specs
from flame.errors import UserError


def training(**values):
    defaults = {"dataset": [], "dataset_name": [], "dataset_split": ["train"], "data_dir": [], "data_files": []}
    return SimpleNamespace(**{**defaults, **values})


def test_one_dataset_takes_all_data_files():
    (spec,) = source_specs(training(dataset=["json"], data_files=["a.json", "b.json"]))
    assert spec == SourceSpec("json", data_files=("a.json", "b.json"))


def test_single_values_serve_every_dataset():
    specs = source_specs(training(dataset=["a", "b"], dataset_split=["dev"], dataset_name=["x", "y"]))
    assert specs == [SourceSpec("a", "x", "dev"), SourceSpec("b", "y", "dev")]


def test_several_datasets_have_their_own_files_or_the_same():
    one, other = source_specs(training(dataset=["a", "b"], data_files=["x.json", ""], data_dir=["d"]))
    assert (one.data_files, other.data_files, one.data_dir, other.data_dir) == (("x.json",), (), "d", "d")
    assert source_specs(training(dataset=["a", "b"], data_files=["*.gz"]))[1].data_files == ("*.gz",)


def test_sources_of_one_dataset_get_names_of_their_own(tmp_path):
    (tmp_path / "1.txt").write_text("a\n")
    (tmp_path / "2.txt").write_text("b\n")
    folder = str(tmp_path)
    values = {"dataset": [folder] * 3, "data_files": ["1.txt", "2.txt", "2.txt"], "text_column": "", "streaming": False}
    names = [source.name for source in open_sources(training(**values))]
    assert names == [f"{folder}:1.txt", f"{folder}:2.txt (2)", f"{folder}:2.txt (3)"]


def test_split_defaults_to_train():
    (spec,) = source_specs(training(dataset=["a"], dataset_split=[]))
    assert spec.split == "train"


@pytest.mark.parametrize(
    "columns, text_column, chosen",
    [
        (["text", "content", "input_ids"], "", "text"),
        (["content", "id"], "", "content"),
        (["text", "body"], "body", "body"),
    ],
)
def test_text_column(columns, text_column, chosen):
    dataset = datasets.Dataset.from_dict({column: [column] for column in columns})
    source = DatasetSource("rows", dataset, text_column)
    assert source.column == chosen and source.read([0]) == [chosen]


def test_rows_come_in_the_order_asked_for():
    source = DatasetSource("rows", datasets.Dataset.from_dict({"text": list("abcdef")}).select([5, 4, 3, 0]))
    assert source.read([2, 0, 3, 0]) == ["d", "f", "a", "f"]


def test_sources_can_be_sent_to_another_process():
    source = DatasetSource("rows", datasets.Dataset.from_dict({"text": ["a", "b"]}))
    source.read([0])
    assert pickle.loads(pickle.dumps(source)).read([1]) == ["b"]


def test_many_record_batches_are_read_as_one(tmp_path):
    parts = [
        datasets.Dataset.from_dict({"text": [str(row) for row in range(start, start + 7)]}) for start in (0, 7, 14)
    ]
    source = DatasetSource("rows", datasets.concatenate_datasets(parts))
    assert source.read([20, 0, 7, 6]) == ["20", "0", "7", "6"]


def test_tokenised_rows():
    source = DatasetSource("rows", datasets.Dataset.from_dict({"input_ids": [[1, 2], [], None, [3, None]]}))
    assert source.is_tokenized
    values = source.read([0, 1, 2, 3])
    assert values[0].tolist() == [1, 2] and values[1].tolist() == [] and values[2] is values[3] is None


def test_faults_name_the_columns():
    dataset = datasets.Dataset.from_dict({"body": ["a"], "score": [1]})
    with pytest.raises(UserError, match=r"body, score.*text_column"):
        DatasetSource("rows", dataset)
    with pytest.raises(UserError, match=r"no such column.*body, score"):
        DatasetSource("rows", dataset, "txt")
    with pytest.raises(UserError, match="score holds int64"):
        DatasetSource("rows", dataset, "score")


def test_a_split_without_rows_is_refused(tmp_path):
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="no rows"):
        open_source(SourceSpec(str(tmp_path / "saved")))


def test_unknown_embedded_corpus():
    with pytest.raises(UserError, match="builtin:stdlib"):
        open_source(SourceSpec("builtin:books"))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"split": "test"}, "--training.dataset_split test: builtin:stdlib has train alone"),
        ({"data_dir": "x"}, "--training.data_dir x: builtin:stdlib is the embedded corpus, which has none"),
        ({"data_files": ("*.py",)}, "--training.data_files"),
    ],
)
def test_the_embedded_corpus_has_no_parts(options, fault):
    with pytest.raises(UserError) as refused:
        open_source(SourceSpec("builtin:stdlib", **options))
    assert str(refused.value).startswith(fault)
