"""Whatever a tokenizer is made of, a corpus has the tokens that it gives, or the tokenizer is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from piece_tokenizers import CODE, LANGUAGES, character_map, make_pieces
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pretrain.checkpoint.tokenizer import read_tokenizer
from pretrain.common.errors import InputError
from pretrain.corpus import finish, samples
from pretrain.corpus.parts import DOCUMENT, Part
from pretrain.corpus.prepare import prepare
from pretrain.corpus.released import encodes_whole_documents, kind_of
from pretrain.corpus.shards import ShardWriter
from pretrain.corpus.tokenize import WordPieces, WordTable, cut_words
from pretrain.corpus.tokenizer_files import load_vocabulary
from pretrain.corpus.vocabulary import bert_tokenizer
from tests.corpus.preparing import encoded
from tests.corpus.test_any_tokenizer import TRAPS, config
from tests.corpus.test_byte_bpe import trained
from tests.corpus.test_released_tokenizers import odd_texts

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = sorted({letter for text in (*LANGUAGES.values(), CODE) for letter in text.lower() if not letter.isspace()})
WORDS = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "dog", "\u5927\u5b66", "covid"]
ENTRIES = {word: number for number, word in enumerate(dict.fromkeys(WORDS))}
NORMALIZERS: dict[str, Any] = {
    **{f"bert {name}": {name: value} for name, value in (("clean_text", False), ("handle_chinese_chars", False))},
    **{f"bert accents {value}": {"strip_accents": value} for value in (None, True, False)},
    "bert cased": {"lowercase": False},
    "nothing": None,
    **{one: getattr(normalizers, one)() for one in ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents")},
    "Strip": normalizers.Strip(),
    "Prepend": normalizers.Prepend("\u2581"),
    "Replace": normalizers.Replace(Regex(r"\s+"), " "),
    "ByteLevel": normalizers.ByteLevel(),
    "Precompiled": character_map(),
    "Sequence": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),  # pyright: ignore[reportAttributeAccessIssue]
    "Sequence of one": normalizers.Sequence([normalizers.BertNormalizer()]),  # pyright: ignore[reportAttributeAccessIssue]
}
DIVIDERS: dict[str, Any] = {
    "nothing": None,
    **{one: getattr(pre_tokenizers, one)() for one in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")},
    **{one: getattr(pre_tokenizers, one)() for one in ("Punctuation", "Digits", "UnicodeScripts", "FixedLength")},
    **{f"Metaspace {one}": pre_tokenizers.Metaspace(prepend_scheme=one) for one in ("always", "never", "first")},
    "Metaspace whole": pre_tokenizers.Metaspace(split=False),
    **{f"ByteLevel {one}": pre_tokenizers.ByteLevel(add_prefix_space=one) for one in (True, False)},
    "ByteLevel whole": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    "CharDelimiterSplit": pre_tokenizers.CharDelimiterSplit("|"),
    **{f"Split {one}": pre_tokenizers.Split(" ", one) for one in ("removed", "isolated", "merged_with_next")},
    "Sequence": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(True)]),  # pyright: ignore[reportAttributeAccessIssue]
    "Sequence of one": pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer()]),  # pyright: ignore[reportAttributeAccessIssue]
}
DECODERS = [decoders.WordPiece(cleanup=False), decoders.BPEDecoder(), decoders.ByteLevel(), decoders.Metaspace()]
ADDED = [
    {flag: True, "normalized": normalized, "special": special}
    for flag in ("single_word", "lstrip", "rstrip", "normalized")
    for normalized in (True, False)
    for special in (True, False)
]
BASES = ("bert", "byte", "unigram", "gemma")


@functools.cache
def texts() -> list[str]:
    more = [
        "covid covids acovid Covid COVID <drug>\u3000covid .",
        "\u6771\u4eac\u5927\u5b66\u3067 \u5927 \u5b66",
        "a\u3002The  b",
    ]
    found = [*LANGUAGES.values(), *TRAPS, *more, "a\u3002The  b", *odd_texts(480, seed=8)]
    return [text.replace("the", "covid ", 1) if number % 9 == 0 else text for number, text in enumerate(found)]


def base(kind: str) -> Tokenizer:
    if kind == "bert":
        return bert_tokenizer(ENTRIES, normalizers.BertNormalizer())
    return Tokenizer.from_str((trained() if kind == "byte" else make_pieces(_PIECES[kind])).to_str())


_PIECES: dict[str, Any] = {"unigram": "xlm_roberta", "gemma": "mmbert"}


def stored(tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens that a corpus has of each text."""
    if encodes_whole_documents(tokenizer):
        return encoded(tokenizer, texts())
    table, normalizer = WordTable(), tokenizer.normalizer
    lowercase = normalizer.lowercase  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    cut = cut_words([text.replace("\n", " ") for text in texts()], table, lowercase=lowercase)
    tokens, ends = WordPieces(tokenizer, table).tokens(cut.words, cut.sentences, np.dtype(np.uint16))
    filled = np.diff(cut.documents) > 0
    found = iter(np.split(tokens, ends[1:-1]))
    return [next(found).tolist() if one else [] for one in filled]


def differing(tokenizer: Tokenizer) -> list[str]:
    """The texts whose stored tokens are not those of the tokenizer.json; special tokens are characters there, too."""
    library = Tokenizer.from_str(tokenizer.to_str())
    library.encode_special_tokens = True
    expected = [library.encode(text, add_special_tokens=False).ids for text in texts()]
    pairs = zip(texts(), stored(Tokenizer.from_str(tokenizer.to_str())), expected, strict=True)
    added = tokenizer.get_added_tokens_decoder().values()
    names = [token.content for token in added if token.special and not token.content.isalnum()]
    is_bpe = isinstance(tokenizer.model, models.BPE)  # others have entries for them, which a corpus does not use
    return [text for text, found, ids in pairs if found != ids and (is_bpe or not any(n in text for n in names))]


def of_normalizer(kind: str, name: str) -> Tokenizer:
    tokenizer, normalizer = base(kind), NORMALIZERS[name]
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer) if isinstance(normalizer, dict) else normalizer
    return tokenizer


def of_divider(kind: str, name: str) -> Tokenizer:
    tokenizer = base(kind)
    tokenizer.pre_tokenizer = DIVIDERS[name]
    return tokenizer


def of_decoder(kind: str, number: int) -> Tokenizer:
    tokenizer = base(kind)
    tokenizer.decoder = DECODERS[number]
    return tokenizer


def of_added(kind: str, number: int) -> Tokenizer:
    tokenizer, flags = base(kind), ADDED[number]
    add = tokenizer.add_special_tokens if flags["special"] else tokenizer.add_tokens
    add([AddedToken("covid", **flags), AddedToken("\u5927", **flags)])
    tokenizer.add_tokens(["<drug>"])  # its id follows those of special tokens
    return tokenizer


CHANGES = {of_normalizer: NORMALIZERS, of_divider: DIVIDERS, of_decoder: range(4), of_added: range(16)}
# Of them, those whose documents are encoded as wholes; all others are BERT's to the letter.
WHOLE = {
    "bert": {of_normalizer: 17, of_divider: len(DIVIDERS) - 1, of_decoder: 0, of_added: 16},
    **{kind: {make: len(names) for make, names in CHANGES.items()} for kind in BASES[1:]},
}


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("make", CHANGES)
def test_every_part_and_flag_is_followed(kind: str, make: Any) -> None:
    made = {name: make(kind, name) for name in CHANGES[make]}
    assert {name: found for name, one in made.items() if (found := differing(one))} == {}
    assert sum(map(encodes_whole_documents, made.values())) == WHOLE[kind][make]


def write_bert(folder: Path, vocabulary: str = "tokenizer.json", **declared: Any) -> Path:
    folder.mkdir()
    if vocabulary == "tokenizer.json":
        tokenizer = base("bert")
        tokenizer.add_tokens(["remdesivir"])
        tokenizer.add_special_tokens(["<drug>"])
        tokenizer.save(str(folder / vocabulary))
    (folder / "vocab.txt").write_text("\n".join(ENTRIES))
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, **declared}))
    return folder


@pytest.mark.parametrize("vocabulary", ["tokenizer.json", "vocab.txt"])
def test_added_tokens_of_a_bert_are_kept_with_their_flags(tmp_path: Path, vocabulary: str) -> None:
    from transformers import AutoTokenizer

    size = len(ENTRIES)
    flags = {"lstrip": False, "rstrip": False}
    added = {
        str(ENTRIES["covid"]): {"content": "covid", "single_word": True, "normalized": True, "special": False, **flags},
        str(size): {"content": "remdesivir", "single_word": False, "normalized": True, "special": False, **flags},
        str(size + 1): {"content": "<drug>", "single_word": False, "normalized": False, "special": True, **flags},
    }
    folder = write_bert(tmp_path / "a", vocabulary, added_tokens_decoder=added, tokenizer_class="BertTokenizer")
    tokenizer = read_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs("remdesivir", add_special_tokens=False)["input_ids"] == [size]
    for text in ("Covid covids acovid", "<drug> REMDESIVIRx the", "a<drug>remdesivir"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    path = str(folder / "tokenizer.json") if vocabulary == "tokenizer.json" else ""
    prepare(config(tmp_path, "", {"path": path} if path else {}), tokenizer=None if path else tokenizer, quiet=True)
    assert len((tmp_path / "corpus/vocab.txt").read_text().split("\n")) - 1 == size + 2
    assert kind_of(tokenizer) == "wordpiece"


@pytest.mark.parametrize(
    ("declared", "shared"),
    [
        ({"word_tokenizer_type": "mecab"}, {}),
        ({}, {"tokenizer_class": "BertJapaneseTokenizer"}),
        ({"tokenizer_class": "KoBertTokenizer"}, {}),
        ({"auto_map": {"AutoTokenizer": ["tokenization_kobert.KoBertTokenizer", None]}}, {}),
        ({}, {"auto_map": {"AutoTokenizer": "own.Tokenizer"}}),
        ({"auto_map": ["own.Tokenizer", None]}, {}),
        ({"auto_map": "own.Tokenizer"}, {}),
        ({}, {"auto_map": ["own.Model"], "tokenizer_class": "TapasTokenizer"}),
        ({"subword_tokenizer_type": "character"}, {}),
        ({}, {"model_type": "roc_bert"}),
        *(({"tokenizer_class": f"{name}Tokenizer"}, {}) for name in ("CpmAnt", "Marian", "M2M100", "BlenderbotSmall")),
        *(({"tokenizer_class": f"{name}Tokenizer"}, {}) for name in ("MyT5", "Perceiver", "Speech2Text", "Clvp")),
        ({"tokenizer_class": "BertTokenizerLegacy"}, {}),
        ({}, {"tokenizer_class": "RoFormerTokenizerFast"}),
    ],
)
def test_a_tokenizer_in_python_is_refused_by_its_class(tmp_path: Path, declared: Any, shared: Any) -> None:
    for vocabulary in ("tokenizer.json", "vocab.txt"):
        folder = write_bert(tmp_path / vocabulary, vocabulary, **declared)
        (folder / "config.json").write_text(json.dumps(shared))
        with pytest.raises(InputError, match="is a tokenizer in Python, which the other files do not"):
            read_tokenizer(folder)
        with pytest.raises(InputError, match="is a tokenizer in Python"):
            load_vocabulary(folder, lowercase=True)


@pytest.mark.parametrize(
    ("declared", "shared", "message"),
    [
        *(
            ({}, {"tokenizer_class": name}, f"config.json: tokenizer_class is {name}, which")
            for name in ("MyOwn", "MPNet")
        ),
        ({"tokenizer_class": "HerbertTokenizer"}, {}, "HerbertTokenizer, which does not tokenize like Bert"),
        ({"unk_token": "[unused0]"}, {}, r"unk_token is '\[unused0\]', but BERT's is \[UNK\]"),
        ({"sep_token": {"content": "the"}}, {}, "sep_token is 'the'"),
        (
            {"tokenizer_class": "BertTokenizer", "word_tokenizer_type": "mecab"},
            {},
            ": word_tokenizer_type mecab is",
        ),
    ],
)
def test_a_vocab_txt_of_other_classes_is_refused(tmp_path: Path, declared: Any, shared: Any, message: str) -> None:
    folder = write_bert(tmp_path / "a", "vocab.txt", **declared)
    (folder / "config.json").write_text(json.dumps(shared))
    for read in (read_tokenizer, functools.partial(load_vocabulary, lowercase=True)):
        with pytest.raises(InputError, match=message):
            read(folder)


@pytest.mark.parametrize(
    "declared",
    [
        {"tokenize_chinese_chars": False},
        {"strip_accents": False},
        {"added_tokens_decoder": {str(len(ENTRIES)): {"content": "remdesivir", "single_word": True}}},
        {"added": {"remdesivir": len(ENTRIES)}},
        {"added_tokens_decoder": {str(len(ENTRIES)): {"content": "remdesivir", "lstrip": True, "special": True}}},
    ],
)
@pytest.mark.parametrize("vocabulary", ["tokenizer.json", "vocab.txt"])
def test_a_path_is_read_as_a_checkpoint_is(tmp_path: Path, vocabulary: str, declared: Any) -> None:
    folder = write_bert(tmp_path / "a", vocabulary, **declared)
    (folder / "added_tokens.json").write_text(json.dumps(declared.get("added", {})))
    for path in (folder, folder / vocabulary):
        taken = load_vocabulary(path, lowercase=True)
        assert taken.to_str() == read_tokenizer(folder).to_str()
        flags = declared.get("added_tokens_decoder", {}).get(str(len(ENTRIES)), {})
        added = taken.get_added_tokens_decoder().get(len(ENTRIES))
        assert all(getattr(added, name) == value for name, value in flags.items())
    with pytest.raises(InputError, match=r"lowercase: false, but .* has true"):
        load_vocabulary(folder, lowercase=False)


def test_code_of_a_model_alone_means_nothing(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "a", "vocab.txt", word_tokenizer_type="basic")
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_pooled.Pooled"}}))
    assert read_tokenizer(folder).get_vocab_size() == len(ENTRIES)


def test_other_tokens_than_those_of_the_tokenizer_json_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = of_normalizer("bert", "bert handle_chinese_chars")
    monkeypatch.setattr("pretrain.corpus.prepare.encodes_whole_documents", lambda _: False)
    with pytest.raises(
        InputError, match=r"source jsonl-a: the corpus and its tokenizer\.json give a document different tokens"
    ):
        prepare(config(tmp_path, "", {}), tokenizer=tokenizer, quiet=True)
    assert not (tmp_path / "corpus/manifest.json").exists()


@pytest.mark.parametrize("damaged", ["written", "changed"])
def test_other_tokens_in_the_files_of_a_shard_are_an_error(damaged: str, tmp_path: Path, monkeypatch: Any) -> None:
    run, tokenizer = config(tmp_path, "", {}), of_normalizer("bert", "bert handle_chinese_chars")
    add, message = ShardWriter.add, r"give a document different tokens, at .* Prepare it into another corpus\.dir"
    with monkeypatch.context() as broken:
        if damaged == "written":
            broken.setattr(ShardWriter, "add", lambda self, tokens, *rest: add(self, tokens + 1, *rest))
        else:
            broken.setattr(finish, "save_tokenizer", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError if damaged == "changed" else InputError):
            prepare(run, tokenizer=tokenizer, quiet=True)
    for path in (tmp_path / "corpus").glob("*.tokens.npy"):
        np.save(path, np.load(path)[::-1])
    with pytest.raises(InputError, match=message):
        prepare(run, tokenizer=tokenizer, quiet=True)
    assert not (tmp_path / "corpus/manifest.json").exists()


def test_a_sample_is_bounded() -> None:
    assert samples.choose(["a" * 9000, "b" * 10_000]) == [0]
    assert len(samples.choose(["a"] * 1000)) <= 16
    part = Part(np.zeros(1000, np.uint16), np.zeros(0, np.uint32), np.zeros(1, DOCUMENT), [])
    assert len(samples.limit_sample([("a" * 8000, np.zeros(2, np.uint64))] * 99, part)) == 2
    assert samples.limit_sample([("a" * 100_000, np.zeros(2, np.uint64))], part)
