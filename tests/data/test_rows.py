import numpy as np
import pytest

from flame.data.rows import find_fault, read_rows
from flame.data.sources import TextSource
from flame.data.tokenize import DocumentEncoder
from flame.errors import UserError

from .corpus import word_tokenizer


class BrokenSource(TextSource):
    """Row 1 cannot be read, alone or with others."""

    def read(self, rows: list[int]) -> list[str]:
        if 1 in rows:
            raise OSError("checksum does not match")
        return super().read(rows)


def test_an_unreadable_row_is_named():
    source = BrokenSource("shard.arrow", ["0", "1", "2"])
    with pytest.raises(UserError, match=r"shard.arrow: row 1 .*cannot be read \(OSError: checksum"):
        read_rows(source, [0, 1, 2], DocumentEncoder(word_tokenizer()), skip_bad_rows=False)


def test_only_the_unreadable_row_is_skipped():
    source = BrokenSource("shard.arrow", ["0", "1", "2"])
    documents = read_rows(source, [2, 1, 0], DocumentEncoder(word_tokenizer()), skip_bad_rows=True)
    assert documents.tokens.tolist() == [2, 0] and documents.ends == [1, 1, 2] and documents.skipped == [1]


@pytest.mark.parametrize(
    "value, is_tokenized, fault",
    [
        ("text", False, None),
        ("", False, None),
        (None, False, "missing"),
        (3, False, "of type int"),
        (np.array([1, 9]), True, None),
        (np.array([], dtype=int), True, None),
        (np.array([1, 10]), True, "token id 10"),
        (np.array([-1, 3]), True, "token id -1"),
        (None, True, "missing"),
    ],
)
def test_faults(value, is_tokenized, fault):
    found = find_fault(value, is_tokenized, vocab_size=10)
    assert found is None if fault is None else fault in found
