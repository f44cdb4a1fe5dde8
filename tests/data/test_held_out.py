"""Held-out text is the same for any layout and seed, each document once, and as much of it as asked for."""

import json
import shutil
import threading

import datasets
import pytest

from flame.config import Validation
from flame.data.batch import Batch
from flame.data.held_out import build_held_out
from flame.data.pack import IGNORE_INDEX
from flame.errors import UserError

from .corpus import make_config, numbered_texts, word_tokenizer

LENGTHS = [5, 40, 1, 17, 3, 9, 26, 2, 11, 8]
NUM_TOKENS = sum(LENGTHS)


@pytest.fixture
def held_out(tmp_path) -> str:
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in numbered_texts(LENGTHS)))
    return str(path)


def build(dataset: str, dp_rank: int = 0, dp_size: int = 1, training=None, **validation) -> list[list[Batch]]:
    config = make_config("builtin:stdlib", **{"varlen": True, **(training or {})})
    config.validation = Validation(dataset=[dataset], **{"num_tokens": 0, **validation})
    return build_held_out(config, word_tokenizer(), dp_rank, dp_size)


def sequences(batches: list[Batch], seq_len: int = 8) -> dict[int, tuple]:
    """Inputs and targets of each sequence by its number."""
    return {
        number: (tuple(inputs.tolist()), tuple(labels.tolist()))
        for batch in batches
        for number, inputs, labels in zip(
            batch.numbers, batch.input_ids.view(-1, seq_len), batch.labels.view(-1, seq_len), strict=True
        )
    }


def of_all_ranks(dataset: str, dp_size: int, **options) -> list[dict[int, tuple]]:
    """Each step's sequences."""
    ranks = [build(dataset, rank, dp_size, **options) for rank in range(dp_size)]
    assert len({len(steps) for steps in ranks}) == 1, "each rank must take part in every step"
    return [sequences([batch for step in steps for batch in step]) for steps in zip(*ranks, strict=True)]


def with_targets(steps: list[dict[int, tuple]]) -> dict[int, tuple]:
    return {
        number: sequence for step in steps for number, sequence in step.items() if set(sequence[1]) != {IGNORE_INDEX}
    }


def test_every_token_of_a_file_once(held_out):
    steps = build(held_out)
    inputs = [
        token for batch in (batch for step in steps for batch in step) for token in batch.input_ids.flatten().tolist()
    ]
    assert sorted(inputs[:NUM_TOKENS]) == list(range(NUM_TOKENS)) and set(inputs[NUM_TOKENS:]) <= {0}
    assert sum(batch.num_valid for step in steps for batch in step) == NUM_TOKENS - len(LENGTHS)


@pytest.mark.parametrize("training", [{}, {"batch_size": 1}, {"gradient_accumulation_steps": 3}, {"seed": 7}])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_neither_layout_nor_seed_changes_them(held_out, dp_size, training):
    steps = of_all_ranks(held_out, dp_size, training=training)
    expected = with_targets(of_all_ranks(held_out, 1))
    assert with_targets(steps) == expected != {}
    rows, accumulation = training.get("batch_size", 2), training.get("gradient_accumulation_steps", 1)
    assert {len(step) for step in steps} == {rows * accumulation * dp_size}, "steps are as large as training's"


def test_as_many_tokens_as_asked_for_in_whole_sequences(held_out):
    everything = with_targets(of_all_ranks(held_out, 1))
    first = with_targets(of_all_ranks(held_out, 2, num_tokens=33))
    assert first == {number: everything[number] for number in range(5)}


def test_nothing_is_tokenised_any_more_when_data_workers_are_forked():
    assert sum(len(step) for step in build("builtin:stdlib", num_tokens=8)) == 1
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tokenizer")]


def test_streamed_text_is_the_same_text(held_out):
    steps = of_all_ranks(held_out, 2, streaming=True)
    tokens = [token for inputs, _ in with_targets(steps).values() for token in inputs]
    assert set(tokens) == set(range(NUM_TOKENS)) and len(tokens) == -(-NUM_TOKENS // 8) * 8
    assert len(with_targets(of_all_ranks(held_out, 1, streaming=True, num_tokens=16))) == 2


def test_documents_without_varlen_are_rows(held_out):
    (first, *_), *_ = build(held_out, training={"varlen": False})
    assert first.cu_seqlens is None and first.input_ids.shape == (2, 8)


def test_the_split_is_validation_where_there_are_several(tmp_path):
    texts = {"train": numbered_texts([20]), "validation": numbered_texts([9])}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": text}) for name, text in texts.items()})
    saved.save_to_disk(tmp_path / "saved")
    count = {
        split: sum(batch.num_valid for step in build(str(tmp_path / "saved"), dataset_split=split) for batch in step)
        for split in ((), ("train",))
    }
    assert count == {(): 8, ("train",): 19}


def test_a_dataset_that_was_saved_by_itself_has_no_split(tmp_path):
    for split in (None, "train", "validation"):
        dataset = datasets.Dataset.from_dict({"text": numbered_texts([9])}, split=split)
        dataset.save_to_disk(tmp_path / str(split))
        ((batch, *_),) = build(str(tmp_path / str(split)), training={"batch_size": 2})
        assert batch.num_valid == 8


def test_files_inside_a_dataset_have_no_split(tmp_path):
    for name, length in (("seen", 20), ("kept", 9)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": numbered_texts([length])[0]}) + "\n")
    steps = build(str(tmp_path), data_files=["kept.jsonl"])
    assert sum(batch.num_valid for step in steps for batch in step) == 8


def test_a_folder_without_that_split_asks_for_another(held_out, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")  # the name of a test would say which split it is
    shutil.copy(held_out, folder)
    message = r"--validation.dataset .*Unknown split \"validation\".*; name a split with --validation.dataset_split$"
    with pytest.raises(UserError, match=message):
        build(str(folder))
    assert build(str(folder), dataset_split=["train"])


def test_warnings_name_no_option_of_training(held_out, caplog):
    assert build(held_out, dataset_name=["en"])
    assert "dataset_name = en is not used" in caplog.text and "training." not in caplog.text


@pytest.mark.parametrize(
    ("dataset", "validation", "message"),
    [
        ("/nowhere/at/all", {}, "--validation.dataset /nowhere/at/all: there is no such file or folder"),
        ("", {"text_column": "body"}, "--validation.text_column body: .* has no such column"),
        ("builtin:stdlib", {"dataset_split": ["dev"]}, "--validation.dataset_split dev: builtin:stdlib"),
        ("", {"data_files": ["a", "b"]}, "--validation.data_files a, b: .* is a file, which has none"),
    ],
)
def test_faults_name_the_options_of_validation(held_out, dataset, validation, message):
    with pytest.raises(UserError, match=message):
        build(dataset or held_out, **validation)


def test_text_without_a_word_is_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text('{"text": ""}\n' * 3)
    with pytest.raises(UserError, match=r"--validation.dataset .*empty\.jsonl: no row holds any text"):
        build(str(path))


@pytest.mark.parametrize("dp_size", [1, 2])
def test_text_without_a_target_is_refused(tmp_path, dp_size):
    path = tmp_path / "single.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in numbered_texts([1] * 12)))
    for rank in range(dp_size):
        with pytest.raises(UserError, match=r"--validation.dataset .*single\.jsonl: no row holds two tokens"):
            build(str(path), rank, dp_size)


def test_bad_rows_that_are_left_out_are_counted(tmp_path, caplog):
    path = tmp_path / "some.jsonl"
    texts = [text for good in numbered_texts([9, 9, 9, 9]) for text in (None, good)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.raises(UserError, match="the value is missing"):
        build(str(path))
    with caplog.at_level("INFO"):
        build(str(path), training={"on_bad_row": "skip"})
    assert "validation: 5 sequences every 500 steps; 4 bad rows left out" in caplog.text


def test_no_dataset_no_validation():
    assert build_held_out(make_config("builtin:stdlib"), word_tokenizer()) == []
