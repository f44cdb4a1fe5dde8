import hashlib

import numpy as np
import torch

from flame.data.batch import combine_digests, join_sequences, sequence_digest
from flame.data.pack import Sequence


def sequence(start: int, cu_seqlens: list[int]) -> Sequence:
    input_ids = np.arange(start, start + cu_seqlens[-1], dtype=np.int32)
    return Sequence(input_ids, input_ids + 1, np.array(cu_seqlens, dtype=np.int32), [])


def test_varlen_joins_sequences_into_one_row():
    batch = join_sequences([sequence(0, [0, 1, 4]), sequence(10, [0, 3, 4])], [6, 7], varlen=True, with_digests=True)
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 10, 11, 12, 13]]
    assert batch.labels.tolist() == [[1, 2, 3, 4, 11, 12, 13, 14]]
    assert batch.cu_seqlens.tolist() == [0, 1, 4, 7, 8]
    assert (batch.input_ids.dtype, batch.labels.dtype, batch.cu_seqlens.dtype) == (
        torch.int64,
        torch.int64,
        torch.int32,
    )


def test_plain_batches_have_a_row_for_each_sequence():
    batch = join_sequences([sequence(0, [0, 1, 4]), sequence(10, [0, 4])], [6, 7], varlen=False, with_digests=False)
    assert batch.input_ids.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert batch.cu_seqlens is None and batch.digests == []


def test_digests_cover_ids_boundaries_and_labels():
    one = sequence(0, [0, 1, 4])
    other_boundary, other_label = sequence(0, [0, 2, 4]), sequence(0, [0, 1, 4])
    other_label.labels[2] = -100
    assert len({sequence_digest(part) for part in (one, other_boundary, other_label, sequence(1, [0, 1, 4]))}) == 4


def test_combined_digest_is_in_global_order():
    assert combine_digests({7: b"b", 6: b"a"}) == hashlib.sha256(b"ab").hexdigest()
