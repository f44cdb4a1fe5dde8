import importlib.util

import pytest

from flame.paths import PACKAGE_ROOT

SCRIPT = PACKAGE_ROOT.parent / "utils" / "train_tokenizer.py"


@pytest.mark.skipif(not SCRIPT.exists(), reason="needs a checkout")
def test_trained_tokenizers_have_the_size_asked_for_and_take_any_text():
    spec = importlib.util.spec_from_file_location("train_tokenizer", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    words = [f"value_{number % 97} = {number}\n" for number in range(2000)]
    tokenizer = script.train_tokenizer(["".join(words)], vocab_size=300)
    assert len(tokenizer) == 300
    text = "not in the corpus: é 東京 🙂\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
