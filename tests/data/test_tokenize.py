import numpy as np
import pytest
from tokenizers import processors

from flame.data.tokenize import DocumentEncoder, load_tokenizer
from flame.errors import UserError

from .corpus import EOS, word_tokenizer

BOS = EOS + 1


def framing_tokenizer(template: str):
    """A tokenizer that adds BOS, EOS or both by itself, as ``template`` says."""
    tokenizer = word_tokenizer(bos_token="<bos>", eos_token="<eos>")
    special_tokens = [("<bos>", BOS), ("<eos>", EOS)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special_tokens
    )
    return tokenizer


def split(documents) -> list[list[int]]:
    return [part.tolist() for part in np.split(documents.tokens, documents.ends[:-1])]


@pytest.mark.parametrize(
    "tokenizer, add_bos, add_eos, expected",
    [
        (word_tokenizer(), "auto", "auto", [1, 2]),
        (word_tokenizer(eos_token="<eos>"), "auto", "auto", [1, 2, EOS]),
        (word_tokenizer(eos_token="<eos>"), "auto", "false", [1, 2]),
        (word_tokenizer(bos_token="<bos>", eos_token="<eos>"), "true", "auto", [BOS, 1, 2, EOS]),
        (framing_tokenizer("<bos> $A"), "auto", "auto", [BOS, 1, 2]),
        (framing_tokenizer("<bos> $A"), "false", "true", [1, 2, EOS]),
        (framing_tokenizer("<bos> $A <eos>"), "auto", "auto", [BOS, 1, 2, EOS]),
        (framing_tokenizer("$A <eos>"), "auto", "auto", [1, 2, EOS]),
    ],
)
def test_bos_and_eos(tokenizer, add_bos, add_eos, expected):
    encoder = DocumentEncoder(tokenizer, add_bos, add_eos)
    assert split(encoder.encode_texts(["1 2", "", "1 2"])) == [expected, [], expected]
    variants = [[1, 2], expected, tokenizer("1 2")["input_ids"]]
    for row in variants if add_bos == add_eos == "auto" else variants[:2]:
        assert split(encoder.encode_ids([np.array(row), np.array([], dtype=int)])) == [expected, []]


def test_asking_for_a_token_that_there_is_not():
    with pytest.raises(UserError, match=r"add_bos true.*no BOS"):
        DocumentEncoder(word_tokenizer(), "true", "auto")


def test_truncation_and_padding_of_a_tokenizer_file_are_off():
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=6)
    assert split(DocumentEncoder(tokenizer).encode_texts(["1 2 3", "4"])) == [[1, 2, 3], [4]]


def test_slow_tokenizers_give_the_same():
    fast = word_tokenizer(eos_token="<eos>")

    class SlowTokenizer:
        is_fast = False
        bos_token_id, eos_token_id, pad_token_id = None, EOS, None

        def __len__(self):
            return len(fast)

        def __call__(self, texts, add_special_tokens=True, verbose=True):
            return fast(texts, add_special_tokens=add_special_tokens)

    encoder = DocumentEncoder(SlowTokenizer())
    assert split(encoder.encode_texts(["1 2", ""])) == [[1, 2, EOS], []]
    assert len(encoder.encode_texts([])) == 0


def test_fingerprint_follows_vocabulary_and_frame():
    one = DocumentEncoder(word_tokenizer(eos_token="<eos>")).fingerprint()
    assert one == DocumentEncoder(word_tokenizer(eos_token="<eos>")).fingerprint()
    assert one != DocumentEncoder(word_tokenizer(eos_token="<eos>"), add_eos="false").fingerprint()
    assert one["vocabulary"] != DocumentEncoder(load_tokenizer("configs/tokenizer")).fingerprint()["vocabulary"]


def test_shipped_tokenizer():
    tokenizer = load_tokenizer("configs/tokenizer")
    text = "def f(x):\n\treturn 'é 東京 🙂'  # \x00 \r\n"
    assert len(tokenizer) == 4096
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.pad_token == "<|pad|>"
    assert DocumentEncoder(tokenizer).closing == [tokenizer.eos_token_id]


def test_tokenizer_file(tmp_path):
    word_tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path / "tokenizer.json"))("3 4")["input_ids"] == [3, 4]


@pytest.mark.parametrize("path", ["no-such-folder/tokenizer", "./nowhere", "{dir}"])
def test_no_tokenizer_there(tmp_path, path):
    with pytest.raises(UserError, match="tokenizer_path"):
        load_tokenizer(path.format(dir=tmp_path))
