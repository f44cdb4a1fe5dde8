"""Text to token ids: loading a tokenizer, and the policy for BOS and EOS."""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

import numpy as np

from flame.data.documents import Documents
from flame.errors import UserError
from flame.paths import find_resource
from flame.quiet import quiet_third_party

logger = logging.getLogger(__name__)

# Scripts, digits, blanks and line ends: two tokenizers that cut this alike and share a vocabulary are taken as equal.
PROBE_TEXT = "Naïve café, 12345 × 67.8\n\tdef f(x):\n        return x  # 東京 Привет 🙂\r\n"


def load_tokenizer(path: str, trust_remote_code: bool = False):
    """Load a tokenizer from a folder, a ``tokenizer.json`` file or the Hugging Face hub.

    Args:
        path: as the user wrote it; a relative one may also name a folder that ships with flame.
        trust_remote_code: run Python code that comes with the tokenizer.

    Raises:
        UserError: there is no tokenizer at ``path``, or it cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    found = find_resource(path)
    try:
        if found.is_file() and not (found.parent / "tokenizer_config.json").is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(found))
        folder = found.parent if found.is_file() else found
        source = str(folder) if folder.is_dir() else path
        if source == path and not folder.is_dir():
            logger.info("tokenizer %s: no such folder here, asking the Hugging Face hub", path)
        with quiet_third_party():  # the hub's client reports each of its attempts
            return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers and tokenizers raise plain Exception, OSError, ValueError and KeyError
        raise UserError(
            f"--model.tokenizer_path {path}: no tokenizer could be loaded from it ({_first_line(error)}); "
            "give a folder that save_pretrained wrote, a tokenizer.json file, or the name of a model on the hub"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@dataclass
class Tokenized:
    """Rows between the tokenizer and the documents that they become.

    Attributes:
        rows: what the tokenizer gave for each text; or, when ``are_ids``, token ids, int64 [length].
        skipped: places of rows that are left out; they stand as empty ones in ``rows``.
    """

    rows: list
    are_ids: bool = False
    skipped: list[int] = field(default_factory=list)


class DocumentEncoder:
    """Turns documents into token ids with the tokens that open and close each of them.

    ``add_bos`` and ``add_eos`` are "true", "false" or "auto": what the tokenizer itself puts there; one that puts
    nothing on either side gets EOS at the end when it has one, so that documents have an end the model can learn.
    Documents that arrive as token ids are treated alike: an opening or closing that is already there is kept as it is.
    """

    def __init__(self, tokenizer, add_bos: str = "auto", add_eos: str = "auto"):
        self.tokenizer = tokenizer
        self.opening, self.closing = _document_frame(tokenizer, add_bos, add_eos)
        self.vocab_size = len(tokenizer)
        self.pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        # Two bytes where they will do: read-ahead buffers take half the memory.
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    def encode_texts(self, texts: list[str]) -> Documents:
        """Tokenise ``texts``; an empty one gives no token at all, not even BOS or EOS."""
        return self.frame(self.tokenize(texts))

    def tokenize(self, texts: list[str]) -> Tokenized:
        """The first part of ``encode_texts``, nearly all of its work; other Python threads may run meanwhile."""
        if not self.tokenizer.is_fast:
            encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
            return Tokenized(encoded)
        backend = self.tokenizer.backend_tokenizer
        if backend.padding is not None:  # changing it is refused while another thread uses the tokenizer
            backend.no_padding()
        if backend.truncation is not None:
            backend.no_truncation()
        return Tokenized(backend.encode_batch_fast(texts, add_special_tokens=False))

    def frame(self, tokenized: Tokenized) -> Documents:
        """The documents of what ``tokenize`` gave, or of rows that were token ids to begin with."""
        documents = self.encode_ids(tokenized.rows) if tokenized.are_ids else self._frame_all(tokenized.rows)
        documents.skipped = tokenized.skipped
        return documents

    def encode_ids(self, rows: list[np.ndarray]) -> Documents:
        """Documents from pre-tokenised rows, equal to those of the texts they were made from.

        ``rows`` are int64 [length], each id inside the vocabulary.
        """
        framed = [self._frame(ids) for ids in rows]
        ends = list(accumulate(map(len, framed)))
        return Documents(np.concatenate([np.empty(0, dtype=self.dtype), *framed]), ends)

    def fingerprint(self) -> dict[str, str | list[int]]:
        """What decides the tokens of a document, as plain data."""
        vocab = json.dumps(sorted(self.tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])))
        try:
            probe = self.tokenizer(PROBE_TEXT, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(f"--model.tokenizer_path: it cannot encode ordinary text: {_first_line(error)}") from error
        digest = hashlib.sha256(f"{vocab}{list(probe)}".encode()).hexdigest()
        return {"vocabulary": digest[:32], "opening": list(self.opening), "closing": list(self.closing)}

    def _frame_all(self, encoded: list) -> Documents:
        """Ids come out of a fast tokenizer as lists only; all of them are packed into one array in one go."""
        joined, ends = [], []
        for ids in map(attrgetter("ids"), encoded) if self.tokenizer.is_fast else encoded:
            if ids:
                joined += self.opening
                joined += ids
                joined += self.closing
            ends.append(len(joined))
        # struct takes half the time of numpy.fromiter.
        packed = struct.pack(f"{len(joined)}{self.dtype.char}", *joined)
        return Documents(np.frombuffer(packed, dtype=self.dtype), ends)

    def _frame(self, ids: np.ndarray) -> np.ndarray:
        if not ids.size:
            return np.empty(0, dtype=self.dtype)
        opened = ids[: len(self.opening)].tolist() == self.opening
        closed = not self.closing or ids[-len(self.closing) :].tolist() == self.closing
        parts = [[] if opened else self.opening, ids, [] if closed else self.closing]
        return np.concatenate([np.asarray(part, dtype=self.dtype) for part in parts])


def _document_frame(tokenizer, add_bos: str, add_eos: str) -> tuple[list[int], list[int]]:
    opening, closing = _own_frame(tokenizer)
    if add_eos == "auto" and not opening and not closing and tokenizer.eos_token_id is not None:
        closing = [tokenizer.eos_token_id]
    opening = _apply_choice("add_bos", add_bos, opening, tokenizer.bos_token_id)
    closing = _apply_choice("add_eos", add_eos, closing, tokenizer.eos_token_id)
    return opening, closing


def _own_frame(tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer itself puts before and after a text."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    framed = list(tokenizer("a")["input_ids"])
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []


def _apply_choice(name: str, choice: str, automatic: list[int], token_id: int | None) -> list[int]:
    if choice == "auto":
        return automatic
    if choice == "false":
        return []
    if token_id is None:
        token = "BOS" if name == "add_bos" else "EOS"
        raise UserError(f"--training.{name} true: the tokenizer has no {token} token; use auto or false")
    return [token_id]
