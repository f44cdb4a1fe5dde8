import numpy as np

from flame.data.documents import Documents, interleave


def test_select_copies_a_range():
    documents = Documents(np.arange(6), [2, 2, 5, 6], skipped=[1])
    part = documents.select(1, 3)
    assert part.tokens.tolist() == [2, 3, 4] and part.ends == [0, 3] and part.skipped == [0]
    assert not np.shares_memory(part.tokens, documents.tokens)
    assert len(documents.select(0, 0)) == 0


def test_interleave_puts_sources_into_one_order():
    one = Documents(np.array([1, 1, 2]), [2, 2, 3], skipped=[1])
    two = Documents(np.array([9, 9, 9]), [3])
    joined = interleave([one, two], [np.array([0, 2, 3]), np.array([1])])
    assert joined.tokens.tolist() == [1, 1, 9, 9, 9, 2]
    assert joined.ends == [2, 5, 5, 6] and joined.skipped == [2]
