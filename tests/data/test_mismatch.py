import copy
import json

import pytest

from flame.data.mismatch import check_fingerprint
from flame.errors import UserError

SAVED = {
    "sources": [
        {"rows": 3, "column": "text", "sampled_rows": "a"},
        {"shards": 2, "column": "text", "bytes": 10, "names": "a", "sizes": "a", "first_rows": "a"},
    ],
    "tokenizer": {"vocabulary": "a", "opening": [], "closing": [7]},
    "order": {"seed": 1, "shuffle": "global", "probabilities": [0.5, 0.5]},
    "packing": {"seq_len": 8, "context_len": 8, "varlen": True},
}
NAMES = ["books", "web"]


def complaint(change, names=NAMES) -> str:
    current = json.loads(json.dumps(SAVED))
    change(current)
    with pytest.raises(UserError) as caught:
        check_fingerprint(SAVED, current, NAMES, names)
    return str(caught.value)


def test_equal_data_is_accepted_under_another_name():
    check_fingerprint(SAVED, copy.deepcopy(SAVED), NAMES, ["/elsewhere/books", "web"])


@pytest.mark.parametrize(
    "part, values, line",
    [
        ("order", {"seed": 2}, "--training.seed: 1 in the checkpoint, 2 now"),
        ("order", {"shuffle": "none"}, "--training.shuffle: global in the checkpoint, none now"),
        ("order", {"probabilities": [0.3, 0.7]}, "--training.data_probs: 0.5, 0.5 in the checkpoint, 0.3, 0.7 now"),
        ("packing", {"seq_len": 16, "context_len": 16}, "--training.seq_len: 8 in the checkpoint, 16 now"),
        ("packing", {"context_len": 4}, "--training.context_len: 8 in the checkpoint, 4 now"),
        ("packing", {"varlen": False}, "--training.varlen: true in the checkpoint, false now"),
        ("tokenizer", {"closing": []}, "--training.add_eos (ids that close a document): 7 in the checkpoint, none now"),
        ("tokenizer", {"vocabulary": "b"}, "--model.tokenizer_path: another vocabulary"),
    ],
)
def test_options_are_named_with_the_old_and_the_new_value(part, values, line):
    message = complaint(lambda current: current[part].update(values))
    assert line in message and message.count("\n  ") == 1
    assert "the data is not" not in message
    assert ("no document is lost" in message) == (part == "packing")


@pytest.mark.parametrize(
    "number, values, line",
    [
        (0, {"rows": 4, "sampled_rows": "b"}, "--training.dataset books: 3 rows in the checkpoint, 4 now"),
        (0, {"sampled_rows": "b"}, "--training.dataset books: the size is that in the checkpoint, but rows"),
        (0, {"column": "body", "sampled_rows": "b"}, "books: column text in the checkpoint, body now"),
        (1, {"bytes": 11, "sizes": "b"}, "--training.dataset web: 10 bytes in the checkpoint, 11 now"),
        (1, {"sizes": "b"}, "web: some of its files have another size"),
        (1, {"names": "b"}, "web: as many files as in the checkpoint, with other names or in another order"),
        (1, {"first_rows": "b"}, "web: the size is that in the checkpoint, but rows"),
    ],
)
def test_what_changed_in_a_source_is_told(number, values, line):
    message = complaint(lambda current: current["sources"][number].update(values))
    assert "the data is not that of the checkpoint" in message and line in message and message.count("\n  ") == 1


def test_another_dataset_is_named_with_the_old_one():
    message = complaint(lambda current: current["sources"][0].update(rows=4), names=["papers", "web"])
    assert "--training.dataset: books in the checkpoint, papers now" in message
    assert "web" not in message
