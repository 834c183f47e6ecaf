"""Corpora of released byte-level tokenizers have the library's ids, and runs that continue such checkpoints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from released_tokenizers import Kind, make_released, make_tokenizer, save_released

from finetune.cli import main
from pretrain.batches.masking import Masker
from pretrain.checkpoint import store
from pretrain.common.errors import InputError
from pretrain.config import MaskingConfig, SourceConfig
from pretrain.corpus.byte_words import is_byte_vocabulary
from pretrain.corpus.prepare import prepare
from pretrain.corpus.sentences import sentence_starts
from pretrain.corpus.shards import open_shards
from pretrain.corpus.special_tokens import check_special_tokens, special_ids
from pretrain.corpus.tokenize import WordTable
from pretrain.corpus.tokenizer_files import load_vocabulary
from pretrain.corpus.vocabulary import entries_of, save_tokenizer, vocabulary_size
from pretrain.corpus.whole_documents import DocumentEncoder, document_records
from pretrain.run.preflight import check_corpus
from tests.corpus.preparing import document_tokens, encoded, preparation
from tests.run.test_start import write_config

KINDS: tuple[Kind, ...] = get_args(Kind)
FRAGMENTS = [
    *("The", "dog", "don't", "they're", "1999", "3.14", "ab", "caf\u00e9", "cafe\u0301", "na\u00efve", "A" * 300),
    *(" ", "  ", "   ", " " * 30, "\n", "\n\n", "\t", "\r\n", "\x0b", "\x85", "\xa0", "\u3000", "\u2028", "\u200d"),
    *("'s", "'t", "'ll", "'", "''", '"', "(", ")", "#", "##", "!", "?", ".", ". ", "\u3002", "|||", "|||IP_ADDRESS|||"),
    *("<s>", "<mask>", "[MASK]", "[CLS]", "[unused1]", "<|end_of_text|>", "<|padding|>"),
    *("\U0001f600", "\U0001f469\u200d\U0001f467", "\u6f22\u5b57", "\u212b", "\ufb01", "\uff71", "\u0344", "\u0301"),
    *("\u00b2", "\u0663", "\u2167", "\ufffd", "\U0001d15e"),
]


def odd_texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    texts = ("".join(draw.choices(FRAGMENTS, k=draw.randint(1, 14))) for _ in range(2 * count))
    return [text for text in texts if text.strip()][:count]


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_has_the_ids_that_the_library_gives(kind: Kind) -> None:
    tokenizer = make_tokenizer(kind)
    library = make_tokenizer(kind)
    library.encode_special_tokens = True  # special tokens in a text are ordinary characters
    texts = odd_texts(600, seed=3)
    for text, tokens in zip(texts, encoded(tokenizer, texts), strict=True):
        assert tokens == library.encode(text, add_special_tokens=False).ids, repr(text)


def test_pieces_stand_for_most_documents_and_never_for_added_tokens() -> None:
    """Both ways are tried by the test above; this says which one a text takes."""
    plain = {kind: DocumentEncoder(make_tokenizer(kind), WordTable()).may_encode_by_piece for kind in KINDS}
    assert plain["roberta"]("The dog  don't.\n\ncafe\u0301 <s>")
    assert plain["modernbert"]("The dog don't.\n\ncaf\u00e9 [MASK]")
    for text in ("two  blanks", "|||IP_ADDRESS|||", "cafe\u0301", "[unused1]"):
        assert not plain["modernbert"](text)
    assert not plain["eurobert"]("The dog")


def test_sentences_start_where_the_one_before_ends() -> None:
    text = " The dog sat. In 1999 it ran.\n\nA cat!  Here."
    starts = sentence_starts(text, "en")
    parts = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert parts == [" The dog sat.", " In 1999 it ran.", "\n\nA cat!", "  Here."]
    assert sentence_starts(" \n ", "en") == []
    encoder = DocumentEncoder(make_tokenizer("roberta"), WordTable())
    part = encoder.encode([text], [starts], document_records([text]), np.dtype(np.uint16))
    tokens = np.split(part.items, np.cumsum(part.sentence_items)[:-1])
    assert [encoder._tokenizer.decode(sentence.tolist()) for sentence in tokens] == parts
    library = encoder._encode_whole(text, starts, np.dtype(np.uint16))
    assert library[1].tolist() == part.sentence_items.tolist()


def test_special_tokens_are_found_by_role(tmp_path: Path) -> None:
    roberta, neox, llama = (make_tokenizer(kind) for kind in ("roberta", "modernbert", "eurobert"))
    assert special_ids(roberta) == {"pad": 1, "unk": 3, "cls": 0, "sep": 2, "mask": roberta.token_to_id("<mask>")}
    assert special_ids(neox)["cls"] == neox.token_to_id("[CLS]")
    assert special_ids(neox)["cls"] > 300
    assert special_ids(llama)["sep"] == llama.token_to_id("<|end_of_text|>")
    assert "unk" not in special_ids(llama)
    # A name that is known nowhere else has to be declared.
    llama.add_special_tokens(["<MASK|own>"])
    declared = {"mask_token": {"content": "<MASK|own>"}, "cls_token": "<|pad|>"}
    found = special_ids(llama, declared)
    assert found["mask"] == llama.token_to_id("<MASK|own>")
    # What the tokenizer puts around a text counts more than what is declared.
    assert found["cls"] == llama.token_to_id("<|begin_of_text|>")
    with pytest.raises(InputError, match="start: has no mask token"):
        check_special_tokens({"pad": 0, "cls": 1, "sep": 2}, "start")


def test_written_files_are_those_of_the_released_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for kind in KINDS:
        released = save_released(tmp_path / kind, kind)
        declared = json.loads((tmp_path / kind / "tokenizer_config.json").read_text())
        (tmp_path / "out" / kind).mkdir(parents=True)
        taken = load_vocabulary(tmp_path / kind, lowercase=False, kind="byte_bpe")
        save_tokenizer(tmp_path / "out" / kind, taken, declared)
        entries = (tmp_path / "out" / kind / "vocab.txt").read_text().split("\n")[:-1]
        assert entries == entries_of(released)
        assert is_byte_vocabulary(entries)
        before, after = (AutoTokenizer.from_pretrained(folder / kind) for folder in (tmp_path, tmp_path / "out"))
        for text in odd_texts(100, seed=5):
            assert before(text)["input_ids"] == after(text)["input_ids"]
        assert before.mask_token_id == after.mask_token_id is not None


def test_tokenizers_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    parts = json.loads(make_tokenizer("roberta").to_str())

    def refused(reason: str, **changes: Any) -> None:
        (tmp_path / "tokenizer.json").write_text(json.dumps({**parts, **changes}))
        with pytest.raises(InputError, match=reason):
            load_vocabulary(tmp_path, lowercase=False, kind="byte_bpe")

    blank = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    refused("of kind released", model={"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]})
    refused("of kind released", pre_tokenizer=blank)
    refused("dropout of 0.1", model={**parts["model"], "dropout": 0.1})
    few = {entry: number for entry, number in parts["model"]["vocab"].items() if number < 100}
    refused("of the 256 bytes", model={**parts["model"], "vocab": few, "merges": []})


def write_documents(path: Path, count: int = 60) -> Path:
    """A JSONL file of documents of odd sentences."""
    draw = random.Random(1)
    words = ["The", "dog", "doesn't", "sat", "caf\u00e9", "1999", "here", "\u6f22\u5b57", "|||IP_ADDRESS|||", "cat"]
    with path.open("w") as file:
        for _ in range(count):
            sentences = [" ".join(draw.choices(words, k=draw.randint(5, 12))) + "." for _ in range(draw.randint(4, 9))]
            text = "  ".join(sentences[:2]) + "\n\n" + " ".join(sentences[2:])
            file.write(json.dumps({"text": text}) + "\n")
    return path


def jsonl(path: Path) -> list[dict[str, str]]:
    return [{"kind": "jsonl", "path": str(path)}]


@pytest.mark.parametrize("kind", ["roberta", "modernbert"])
def test_a_released_checkpoint_is_continued_and_exported(kind: Kind, tmp_path: Path) -> None:
    """prepare --from, pretrain --from, export: the layout, the padded rows and the tokenizer are the released ones."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer = make_released(tmp_path / "start", kind)
    text = write_documents(tmp_path / "text.jsonl")
    changes = {"pairs__objective": "none", "masking__scheme": "whole_words", "corpus__sources": jsonl(text)}
    path = write_config(tmp_path / "trial.yaml", tmp_path / "corpus", text, tmp_path / "start", **changes)
    assert main(["prepare", str(path)]) == 0
    assert main(["pretrain", str(path), "--no-ray"]) == 0
    shards = open_shards(tmp_path / "corpus", "train")
    assert shards.special_ids == special_ids(tokenizer)
    assert_ids_of_files(text, tokenizer, shards)
    assert main(["export", str(tmp_path / "trial"), str(tmp_path / "out")]) == 0
    before, after = (AutoModelForMaskedLM.from_pretrained(tmp_path / name).eval() for name in ("start", "out"))
    assert type(before) is type(after)
    shapes = [{name: list(tensor.shape) for name, tensor in model.state_dict().items()} for model in (before, after)]
    assert shapes[0] == shapes[1]
    assert after.config.vocab_size == tokenizer.get_vocab_size() + 5
    for key in ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        assert getattr(after.config, key, None) == getattr(before.config, key, None), key
    theirs, ours = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("start", "out"))
    for line in odd_texts(50, seed=9):
        assert theirs(line)["input_ids"] == ours(line)["input_ids"] == tokenizer.encode(line).ids
    assert_logits(tmp_path / "out", after, tokenizer)


def assert_ids_of_files(text: Path, tokenizer: Any, shards: Any) -> None:
    """Every training document is a text of the file through the library."""
    texts = (json.loads(line)["text"] for line in text.read_text().splitlines())
    known = {tuple(tokenizer.encode(one, add_special_tokens=False).ids) for one in texts}
    found = document_tokens(shards)
    assert len(found) > 30
    assert known.issuperset(found)


def assert_logits(folder: Path, theirs: Any, tokenizer: Any) -> None:
    """Ours, read from the export, equal transformers' for every row of the vocabulary, padded ones included."""
    from pretrain.batches.batch import masked_batch
    from pretrain.checkpoint import hf
    from pretrain.model.heads import PretrainingModel
    from pretrain.reporting.fill_mask import MaskedSentence, mask_sentence

    shape, state, next_sentence = hf.load(folder)
    model = PretrainingModel(shape, len(state["embeddings.word"]), next_sentence).eval()
    model.load_state_dict(state)
    special = special_ids(tokenizer)
    tokens = tuple(tokenizer.encode("The dog doesn't sat here.", add_special_tokens=False).ids)
    ids = [special["cls"], *tokens, special["sep"]]
    ids[3] = special["mask"]
    with torch.inference_mode():
        ours = model.masked_logits(masked_batch([mask_sentence(MaskedSentence(tokens, 2), special)]))
        expected = theirs(input_ids=torch.tensor([ids])).logits[0, 3:4]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        ("eurobert", {"<|begin_of_text|>", "<|end_of_text|>", "<|mask|>", "<|pad|>", "<|reserved_special_token_0|>"}),
        (
            "modernbert",
            {"<|padding|>", "<|endoftext|>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"}
            | {f"[unused{number}]" for number in range(3)},
        ),
    ],
)
def test_masking_takes_words_and_draws_no_special_or_reserved_token(kind, left_out, tmp_path) -> None:
    text = write_documents(tmp_path / "text.jsonl", 20)
    save_released(tmp_path / "start", kind)
    vocabulary = {"kind": "byte_bpe", "path": str(tmp_path / "start/tokenizer.json")}
    config = preparation(tmp_path / "corpus", [SourceConfig(kind="jsonl", path=str(text))], vocabulary=vocabulary)
    prepare(config, quiet=True)
    shards = open_shards(tmp_path / "corpus", "train")
    assert shards.special_ids == special_ids(make_tokenizer(kind))
    masker = Masker(shards, MaskingConfig(scheme="whole_words"), sequence_length=32, max_predictions=0)
    entries = entries_of(make_tokenizer(kind))
    assert {entry for number, entry in enumerate(entries) if number not in masker.replacement_ids} == left_out
    vocabulary = masker._scheme.vocabulary
    assert not vocabulary.boundaries.continues[entries.index("\u0120the")]
    check_corpus(config)


def test_without_a_word_to_add_the_line_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Japanese has no blanks, and GPT-2's splitting takes whole words alone."""
    text, kana = tmp_path / "text.jsonl", [chr(0x3042 + n) for n in range(60)]
    texts = ["".join(kana[n * m % 60] for m in range(1, 50)) for n in range(1, 21)]
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    make_released(tmp_path / "start", "roberta")
    added = {"corpus__sources": jsonl(text), "corpus__vocabulary__added_words": 4, "corpus__min_document_words": 1}
    path = write_config(tmp_path / "trial.yaml", tmp_path / "corpus", text, tmp_path / "start", **added)
    assert main(["prepare", str(path)]) == 0
    assert "(no words added: none has several tokens" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["roberta", "modernbert"])
def test_a_run_continues_with_words_added_to_a_byte_level_vocabulary(kind: Kind, tmp_path: Path) -> None:
    text = write_documents(tmp_path / "text.jsonl", 20)
    old = make_released(tmp_path / "start", kind)
    added = {"corpus__sources": jsonl(text), "corpus__vocabulary__added_words": 4}
    path = write_config(tmp_path / "trial.yaml", tmp_path / "corpus", text, tmp_path / "start", **added)
    assert main(["prepare", str(path)]) == 0
    shards, size = open_shards(tmp_path / "corpus", "train"), vocabulary_size(old)
    assert shards.vocabulary_size == size + 4
    assert max(int(tokens.max()) for tokens in shards.some_tokens()) >= size
    card = json.loads((tmp_path / "corpus/card.json").read_text())["vocabulary"]
    assert card["added"] == 4
    assert card["saved_share"] > 0
    assert main(["pretrain", str(path), "--no-ray"]) == 0
    rows = store.read_weights(sorted((tmp_path / "trial/checkpoints").glob("step-*"))[0])["embeddings.word"]
    assert len(rows) == size + 4
