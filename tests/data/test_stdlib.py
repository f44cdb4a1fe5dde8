from flame.data.stdlib import list_stdlib_files, read_stdlib_texts


def test_files_are_the_librarys_own_in_sorted_order():
    files = list_stdlib_files()
    names = [path.as_posix() for path in files]
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any("/site-packages/" in name or "/test/" in name for name in names)
    assert names == sorted(names)


def test_there_is_enough_text_to_learn_from():
    texts = read_stdlib_texts()
    assert len(texts) > 300 and sum(map(len, texts)) > 5_000_000
    assert all(texts)
