import importlib.util

import pytest

from flame.data.tokenize import load_tokenizer
from flame.paths import PACKAGE_ROOT

SCRIPT = PACKAGE_ROOT.parent / "utils" / "train_tokenizer.py"


pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs a checkout")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_tokenizer", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_trained_tokenizers_have_the_size_asked_for_and_take_any_text(script):
    words = [f"value_{number % 97} = {number}\n" for number in range(2000)]
    tokenizer = script.train_tokenizer(["".join(words)], vocab_size=300)
    assert len(tokenizer) == 300
    text = "not in the corpus: é 東京 🙂\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_tokenizer_learns_the_words_of_its_data(script, tmp_path, capsys):
    (tmp_path / "words.txt").write_text("überraschung folgt auf überraschung\n" * 50)
    command = ["--data", str(tmp_path / "words.txt"), "--output", str(tmp_path / "new"), "--vocab_size", "300"]
    assert script.main(command) == 0
    assert len(load_tokenizer(str(tmp_path / "new")).tokenize("überraschung")) == 1
    assert script.main(command) == 2
    assert "there is something already" in capsys.readouterr().err


def test_data_without_text_is_refused(script, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    assert script.main(["--data", str(tmp_path / "empty.jsonl"), "--output", str(tmp_path / "new")]) == 2
    assert "holds no text" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_vocabulary_that_cannot_hold_the_bytes_is_refused(script, tmp_path, capsys):
    command = ["--data", "builtin:stdlib", "--output", str(tmp_path / "new"), "--vocab_size", "257"]
    assert script.main(command) == 2
    assert "at least 258" in capsys.readouterr().err
