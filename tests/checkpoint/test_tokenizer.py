"""A released model's tokenizer, read from each kind of file, gives the same ids as transformers' AutoTokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from corpora import SPECIALS, write_tokenizer
from tiny_checkpoints import write_again
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers, processors

from finetune.tasks.datasets.text import TextEncoder
from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.tokenizer import ModelTokenizer, copy_tokenizer, read_tokenizer
from pretrain.common.errors import InputError
from tests import parity

transformers: Any = pytest.importorskip("transformers")

LETTERS = [*"abcdefghijklmnopqrstuvwxyzé.,!'中文", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyzé")]
UNCASED = [*SPECIALS, "[unused0]", *LETTERS, "the", "cat"]
CASED = [*UNCASED, "The", *"THC"]
TEXTS = ["The cat sat.", "Café, CAFÉ!", "it's 中文 here", "", " [MASK]  the\tcat ", "a" * 120, "the <mask> and <s>"]
TEXTS += ["\u2028the\x00cat\x85", "Ünïcödé 1234"]
ROBERTA_SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def write_files(folder: Path, vocabulary: list[str] | None, **settings: Any) -> Path:
    if vocabulary:
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_byte_pairs(folder: Path, texts: list[str]) -> Path:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, 320, special_tokens=ROBERTA_SPECIALS, show_progress=False)
    trained.save_model(str(folder))
    return folder


def copy(folder: Path, kind: str) -> Path:
    """The folder `out` within `folder`, with a copy of its tokenizer for 40 positions."""
    (folder / "out").mkdir()
    copy_tokenizer(ModelTokenizer.read(folder), folder / "out", tokenizer_class=kind, max_positions=40)
    return folder / "out"


def assert_equals_transformers(folder: Path, tokenizer: Tokenizer, texts: list[str] = TEXTS) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts:
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"], text
    ours, pair = tokenizer.encode("the cat", "the"), theirs("the cat", "the", return_token_type_ids=True)
    assert ours.ids == pair["input_ids"]
    assert len(set(ours.ids)) > 3


@pytest.mark.parametrize(
    ("vocabulary", "settings"),
    [
        (UNCASED, {}),
        (UNCASED, {"do_lower_case": True}),
        (CASED, {"do_lower_case": False}),
        (CASED, {"do_lower_case": True}),
        (CASED, {"do_lower_case": False, "tokenize_chinese_chars": False}),
        (UNCASED, {"do_lower_case": True, "strip_accents": False}),
    ],
)
@pytest.mark.parametrize("json_too", [False, True])
def test_word_pieces(vocabulary: list[str], settings: dict, json_too: bool, tmp_path: Path) -> None:
    write_files(tmp_path, vocabulary, **settings)
    if json_too:  # lower-cases whatever the settings say, which decide
        write_tokenizer(tmp_path, vocabulary)
        (tmp_path / "vocab.txt").unlink()
        write_files(tmp_path, None, **settings)
    assert_equals_transformers(tmp_path, read_tokenizer(tmp_path))


def test_the_casing_is_detected_from_the_vocabulary(tmp_path: Path) -> None:
    write_files(tmp_path, CASED)
    assert read_tokenizer(tmp_path).encode("The the").tokens == ["[CLS]", "The", "the", "[SEP]"]
    write_files(tmp_path, UNCASED)  # [unused0] and [CLS] have capital letters too
    assert read_tokenizer(tmp_path).encode("The the").tokens == ["[CLS]", "the", "the", "[SEP]"]


def test_a_cased_tokenizer_json_stays_cased_without_a_word_about_it(tmp_path: Path) -> None:
    """Where transformers 4 and 5 lower-case: BertTokenizer's default is to."""
    write_tokenizer(tmp_path, CASED)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    description["normalizer"]["lowercase"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.encode("The the").tokens == ["[CLS]", "The", "the", "[SEP]"]
    # What we write says so, and transformers then agrees.
    assert_equals_transformers(copy(tmp_path, "BertTokenizer"), tokenizer)


@pytest.mark.parametrize("prefix_space", [False, True])
@pytest.mark.parametrize("kind", ["files", "json"])
def test_robertas_bytes(kind: str, prefix_space: bool, tmp_path: Path) -> None:
    write_byte_pairs(tmp_path, [*TEXTS, *["the cat sat"] * 9])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    mask = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "normalized": False, "special": True}
    settings = {"add_prefix_space": prefix_space, "mask_token": mask}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = read_tokenizer(tmp_path)
    if kind == "json":
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name in ("vocab.json", "merges.txt"):
            (tmp_path / name).unlink()
        tokenizer = read_tokenizer(tmp_path)
    assert_equals_transformers(tmp_path, tokenizer)
    # The blank before it belongs to <mask>, as in the released tokenizer.json.
    encoded = tokenizer.encode("the <mask>")
    assert encoded.ids[-2] == tokenizer.token_to_id("<mask>")
    assert encoded.tokens[-3] != "Ġ"
    assert_equals_transformers(copy(tmp_path, "RobertaTokenizer"), tokenizer)


@pytest.mark.parametrize("purpose", ["tokens", "sequence"])
def test_a_tagger_of_bytes_reads_a_text_as_it_read_words(purpose: str, tmp_path: Path) -> None:
    """transformers gives the first word the token that it has within a text, as all words had in training."""
    write_byte_pairs(tmp_path, ["the cat sat"] * 9)
    config = transformers.RobertaConfig(vocab_size=320, **TINY)
    getattr(transformers, parity.CLASSES[purpose]).from_config(config).save_pretrained(tmp_path)
    write_again(read_released(tmp_path), tmp_path / "out", tmp_path, purpose)
    words = ["cat", "the", "sat"]
    encoder = TextEncoder(read_tokenizer(tmp_path), 16)
    ids = [0, *encoder.encode_words(words).ids.tolist(), 2]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    said = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert said["add_prefix_space"] == (purpose == "tokens")
    assert (theirs("cat the sat")["input_ids"] == ids) == (purpose == "tokens")
    if purpose == "tokens":
        assert theirs(words, is_split_into_words=True)["input_ids"] == ids
        again = TextEncoder(read_tokenizer(tmp_path / "out"), 16)
        for name, value in vars(again.encode_words(words)).items():
            assert value.tolist() == vars(encoder.encode_words(words))[name].tolist()


def test_a_sentencepiece_tokenizer_stays_what_it_is(tmp_path: Path) -> None:
    """Its config names no class, as those of xlm-roberta-base; what is written does, and transformers goes by that."""
    words = {"\u2581the": -1.0, "\u2581c": -2.0, "at": -2.5, "\u2581": -3.0}
    pieces = [*((name, 0.0) for name in ROBERTA_SPECIALS[:4]), *words.items(), ("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 3, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.add_special_tokens(ROBERTA_SPECIALS)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = transformers.XLMRobertaConfig(vocab_size=9, **TINY)
    transformers.XLMRobertaForSequenceClassification(config).save_pretrained(tmp_path)
    write_again(read_released(tmp_path), tmp_path / "out", tmp_path, "sequence")
    assert read_tokenizer(tmp_path).encode("the cat").ids == [0, 4, 5, 6, 2]
    assert_equals_transformers(tmp_path / "out", read_tokenizer(tmp_path), ["the cat", "The cat at", "a the"])


def test_what_is_copied_keeps_its_settings(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, UNCASED)  # says 512
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(read_tokenizer(tmp_path).encode("the " * 20).ids) == 22  # neither cut nor padded
    (tmp_path / "special_tokens_map.json").write_text("{}")
    out = copy(tmp_path, "ElectraTokenizer")
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert (settings["model_max_length"], settings["tokenizer_class"]) == (40, "BertTokenizer")
    assert settings["do_lower_case"] is True
    names = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    assert sorted(path.name for path in out.iterdir()) == names


def test_a_tokenizer_with_more_entries_than_the_model_has_rows_is_another_models(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    for rows in (6, 8):
        assert read_tokenizer(tmp_path, rows).get_vocab_size() == 6
    with pytest.raises(InputError, match="ids up to 5, but the model's word embeddings have 5 rows"):
        read_tokenizer(tmp_path, 5)


@pytest.mark.parametrize("where", ["added_tokens.json", "added_tokens_decoder"])
def test_tokens_added_to_a_vocabulary(where: str, tmp_path: Path) -> None:
    number = len(UNCASED)
    write_files(tmp_path, UNCASED, do_lower_case=True)
    if where == "added_tokens.json":
        (tmp_path / where).write_text(json.dumps({"[E1]": number, "[e2]": number + 1}))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["[E1]"]}))
    else:
        described = {
            str(number): {"content": "[E1]", "special": True, "normalized": False},
            str(number + 1): {"content": "[e2]", "special": False, "normalized": True},
        }
        write_files(tmp_path, None, do_lower_case=True, added_tokens_decoder=described)
    tokenizer = read_tokenizer(tmp_path, number + 2)
    tokens = tokenizer.encode("the [E1] cat [E2]").tokens
    assert tokens == ["[CLS]", "the", "[E1]", "cat", "[e2]", "[SEP]"]
    assert_equals_transformers(tmp_path, tokenizer, ["the [E1] cat", "[E1]the cat"])
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[E9]": number + 7}))
    with pytest.raises(InputError, match=r"'\[E9\]' has the id \d+, but the next free one"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("added_tokens.json", {"[E1]": "a"}, r"the token '\[E1\]' has the id 'a'"),
        ("added_tokens.json", {"[E1]": None}, "has the id None"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "[E1]"}}}, "has the id 'x'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"special": True}}}, r"\{'special': True\} is not a"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": 5}}}, "is not a token"),
        ("tokenizer_config.json", {"additional_special_tokens": [{"id": 9}]}, "is not a token"),
        ("special_tokens_map.json", {"additional_special_tokens": [{"id": 9}]}, "is not a token"),
        ("special_tokens_map.json", {"additional_special_tokens": 9}, "9 is not a list of tokens"),
    ],
)
def test_malformed_tokens_are_refused_by_file(tmp_path: Path, file: str, content: dict[str, Any], message: str) -> None:
    write_files(tmp_path, UNCASED)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"{file}: .*{message}.*Download it again"):
        read_tokenizer(tmp_path)


def test_null_settings_count_as_missing(tmp_path: Path) -> None:
    settings = {"model_max_length": None, "do_lower_case": None, "strip_accents": None}
    write_files(tmp_path, UNCASED, **settings)
    assert read_tokenizer(tmp_path).encode("The Thé").tokens == ["[CLS]", "the", "the", "[SEP]"]
    written = json.loads((copy(tmp_path, "BertTokenizer") / "tokenizer_config.json").read_text())
    assert written["model_max_length"] == 40
    write_files(tmp_path, None, do_lower_case="yes")
    with pytest.raises(InputError, match="do_lower_case is 'yes'"):
        read_tokenizer(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_first_token(tmp_path: Path) -> None:
    write_files(tmp_path, ["\ufeff" + UNCASED[0], *UNCASED[1:]])
    assert read_tokenizer(tmp_path).get_vocab() == {token: number for number, token in enumerate(UNCASED)}


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no tokenizer: neither"):
        read_tokenizer(tmp_path)
    for name in ("spm.model", "sentencepiece.bpe.model"):
        (tmp_path / name).write_bytes(b"")
        message = rf"has {name}, which is not read, but no tokenizer\.json.* Write one with transformers \(save_pre"
        with pytest.raises(InputError, match=message):
            read_tokenizer(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "vocab.txt").write_text("[PAD]\na\na\n")
    with pytest.raises(InputError, match="'a' occurs twice"):
        read_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\na\n")
    with pytest.raises(InputError, match=r"\[SEP\], \[MASK\] missing"):
        read_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(b"\xff\n")
    with pytest.raises(InputError, match=r"vocab\.txt: cannot be read"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    for vocabulary, message in (('{"a": 0}', "are damaged"), ('{"a": 0, "b": 1, "ab": 2}', r"has no <s>, <pad>")):
        (tmp_path / "vocab.json").write_text(vocabulary)
        with pytest.raises(InputError, match=message):
            read_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(ROBERTA_SPECIALS)}))
    (tmp_path / "merges.txt").write_text("")
    malformed = {"tokenizer_class": "RobertaTokenizer", "mask_token": {"lstrip": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(malformed))
    with pytest.raises(InputError, match=r"tokenizer_config\.json: \{'lstrip': True\} is not a token"):
        read_tokenizer(tmp_path)
    # A vocabulary of words that are cut by others.
    write_files(tmp_path, CASED, tokenizer_class="MPNetTokenizer")
    with pytest.raises(InputError, match="tokenizer_class is MPNetTokenizer, which does not tokenize like Bert"):
        read_tokenizer(tmp_path)
    for name in ("BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"):
        write_files(tmp_path, CASED, tokenizer_class=name)
        read_tokenizer(tmp_path)
