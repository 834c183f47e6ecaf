"""Corpora of XLM-R's, DeBERTa-v3's and mmBERT's tokenizers have the library's ids; runs with them; line breaks."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from piece_tokenizers import CODE, LANGUAGES, PieceKind, make_pieces, save_pieces
from released_tokenizers import make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from finetune.cli import main
from pretrain.batches.masking import Masker
from pretrain.common.errors import InputError, StoppedError
from pretrain.config import MaskingConfig, PretrainConfig, SourceConfig, VocabularyConfig
from pretrain.corpus.extension import check_extension, count_sampled_words, extend_vocabulary, replaced_ids
from pretrain.corpus.prepare import prepare
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.corpus.sources import find_inputs
from pretrain.corpus.sources.jsonl import Reader
from pretrain.corpus.special_tokens import special_ids
from pretrain.corpus.tokenize import WordTable
from pretrain.corpus.tokenizer_files import load_vocabulary
from pretrain.corpus.vocabulary import entries_of, save_tokenizer, vocabulary_size
from pretrain.corpus.whole_documents import DocumentEncoder
from tests.corpus.preparing import document_tokens, encoded, masked_words, preparation
from tests.corpus.test_released_tokenizers import assert_logits, odd_texts
from tests.run.test_start import write_config

KINDS: tuple[PieceKind, ...] = get_args(PieceKind)
# What a cut at blanks could get wrong: characters that join a blank or become one, marks, and ends of lines.
TRAPS = [
    "a \u0301b c\u0308 d",
    "x\u200b y \u200bz\u00a0w \u3000v",
    "\u0600 12 \u0e01 \u0e33",
    "a \u2581b\u2581c \u2581",
    "  two  blanks \t tabs\t\tend \r\n\r\n\n\n\n",
    "\ufb01 \u00bd \uff21 \u2460 \u3392 \u00a8 \u2026",
    "\U0001f469\u200d\U0001f467 \U0001f3fb \u20ac\ufe0f",
    "\x01 a\x02 \x7f",
    "\uac00 \u1100\u1161 cafe\u0301",
]


def library_ids(kind: PieceKind, text: str) -> list[int]:
    tokenizer = make_pieces(kind)
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_has_the_ids_that_the_library_gives(kind: PieceKind) -> None:
    special = ("<s>", "<mask>", "[MASK]", "[CLS]", "<pad>", "<bos>")
    texts = [*LANGUAGES.values(), CODE, *TRAPS, "\n\n".join(LANGUAGES.values()), *odd_texts(600, seed=4)]
    texts = [text for text in texts if text.strip() and not any(name in text for name in special)]
    for text, tokens in zip(texts, encoded(make_pieces(kind), texts), strict=True):
        assert tokens == library_ids(kind, text), repr(text)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_stand_for_most_documents(kind: PieceKind) -> None:
    """The test above tries both ways; this says which one a text takes."""
    encoder = DocumentEncoder(make_pieces(kind), WordTable())

    def has_pieces(text: str) -> bool:
        return encoder.may_encode_by_piece(text) and 0 in encoder.encode_by_piece([0], [text], [[0]], np.dtype("u2"))

    assert all(map(has_pieces, (*LANGUAGES.values(), CODE)))
    assert not has_pieces("a \u2581b")
    if kind == "mmbert":
        assert not has_pieces("an <unused0> entry")
    else:
        assert not any(map(has_pieces, ("a \u0301b", "x\u200b y", "a\u00a0b")))


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_a_text_are_ordinary_characters(kind: PieceKind) -> None:
    tokenizer = make_pieces(kind)
    text = "The <mask> and [MASK], <s> and </s>, [CLS] or <pad> or <bos>."
    (tokens,) = encoded(tokenizer, [text])
    assert not set(tokens) & {number for role, number in special_ids(tokenizer).items() if role != "unk"}
    assert text in tokenizer.decode(tokens) or kind != "mmbert"


def test_a_tokenizer_without_a_known_division_goes_through_the_library() -> None:
    tokenizer = make_pieces("xlm_roberta")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    encoder = DocumentEncoder(tokenizer, WordTable())
    assert encoder.splitter is None
    texts = [*LANGUAGES.values()]
    assert encoded(tokenizer, texts) == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def test_any_word_piece_is_taken_as_it_is() -> None:
    """MPNet's is BERT's with RoBERTa's special tokens."""
    from tokenizers import normalizers

    words = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>", "the", "dog", "##s", "<", ">", "s"]
    model = models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]", max_input_chars_per_word=100)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.add_special_tokens(words[:5])
    assert encoded(tokenizer, ["The dogs <s> cat"]) == [[5, 6, 7, 3, 3]]
    assert special_ids(tokenizer) == {"pad": 1, "unk": 3, "cls": 0, "sep": 2, "mask": 4}


@pytest.mark.parametrize("kind", ["xlm_roberta", "deberta_v3", "roberta", "modernbert"])
def test_added_words_are_tokens_and_change_no_other_word(kind: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    old = make_pieces(kind) if kind in KINDS else make_tokenizer(kind)
    counts = {"quokkaburra": 9, "sentiments": 5, "dignity": 2, "all": 2, "1948": 8}
    extension = extend_vocabulary(old, counts, 9)  # a number has no letter
    new, size = extension.tokenizer, vocabulary_size(old)
    assert [word.lstrip("\u2581\u0120") for word in extension.words] == ["quokkaburra", "sentiments"]
    assert vocabulary_size(new) == size + 2
    assert old.get_vocab(with_added_tokens=True).items() <= new.get_vocab(with_added_tokens=True).items()
    text = "The quokkaburra met sentiments, and quokkaburras."
    ids = new.encode(text, add_special_tokens=False).ids
    assert [number for number in ids if number >= size] == [size, size + 1, *([size] if kind in KINDS else [])]
    assert new.decode(ids).strip() == text
    plain = [*LANGUAGES.values(), CODE]
    assert [new.encode(one).ids for one in plain] == [old.encode(one).ids for one in plain]
    assert encoded(new, [text, *plain]) == [new.encode(one, add_special_tokens=False).ids for one in (text, *plain)]
    assert len(replaced_ids(old, extension.words)[0]) > 1
    save_tokenizer(tmp_path, new, {})
    assert AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False)["input_ids"] == ids


def test_a_unigram_takes_a_word_before_its_beginning() -> None:
    roots = ["".join(one) for one in itertools.product(("karvo", "mitu"), ("melda", "nodru"), ("gifo", "qua"))]
    counts = {root + end: 9 for root in roots for end in ("", "ne", "nely", "s", "ss")}
    extension = extend_vocabulary(make_pieces("xlm_roberta"), counts, 99)
    assert len(extension.words) == len(counts) == 40
    assert all(len(extension.tokenizer.encode(word, add_special_tokens=False).ids) == 1 for word in counts)


def test_a_tokenizer_without_words_takes_none() -> None:
    with pytest.raises(InputError, match="is a BPE that does not split text into words"):
        check_extension(make_pieces("mmbert"), 2)
    marked = Tokenizer(models.BPE({"a": 0, "a</w>": 1}, [], end_of_word_suffix="</w>"))
    marked.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(InputError, match="or marks the end of words"):
        check_extension(marked, 2)


def test_an_entry_that_its_own_pieces_beat_is_not_added_again() -> None:
    model = models.Unigram([("<unk>", 0.0), ("\u2581cat", -9.0), ("\u2581c", -1.0), ("at", -1.0)], unk_id=0)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert extend_vocabulary(tokenizer, {"cat": 9}, 2).words == []


def test_a_stop_while_words_are_chosen_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pieces(tmp_path / "start", "xlm_roberta")
    (tmp_path / "a.txt").write_text("Some words.")
    corpus = {"dir": str(tmp_path / "corpus"), "sources": [{"kind": "books", "path": str(tmp_path / "a.txt")}]}
    corpus["vocabulary"] = {"kind": "released", "added_words": 2}
    phase = {"sequence_length": 32, "global_sequences": 2, "steps": 1, "peak_learning_rate": 1e-3}
    values = {"name": "x", "phases": [phase], "corpus": corpus, "start_from": str(tmp_path / "start")}

    def stopped(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pretrain.corpus.prepare.count_sampled_words", stopped)
    with pytest.raises(StoppedError, match="Run the same command again"):
        prepare(PretrainConfig.model_validate(values), tokenizer=make_pieces("xlm_roberta"), quiet=True)


def test_words_of_all_files_are_counted_and_held_out_ones_are_not(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"The {name}-word, {name}word.\n\nAnother the.")
    given = [{"kind": "books", "path": f"{tmp_path}/{name}.txt", "held_out": name == "c"} for name in ("a", "b", "c")]
    read = [SourceConfig.model_validate(one) for one in given]
    counts, texts = count_sampled_words((one, find_inputs(one, "x")) for one in read)
    assert texts == [f"The {name}-word, {name}word.\nAnother the." for name in "ab"]
    assert counts == {"The": 2, "a": 1, "b": 1, "word": 2, "aword": 1, "bword": 1, "Another": 2, "the": 2}


def test_compressed_text_is_counted_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(
            json.dumps({"text": f"many of the same {'words' if n < 990 else 'last'}"}) + "\n" for n in range(999)
        )
    read = SourceConfig.model_validate({"kind": "jsonl", "path": str(tmp_path / "a.jsonl.gz")})
    assert count_sampled_words([(read, find_inputs(read, "x"))])[0]["last"] == 9
    # Shards of a hub have no known size: they share what is read.
    monkeypatch.setattr(Reader, "text_bytes", lambda *_: math.inf)
    assert count_sampled_words([(read, find_inputs(read, "x"))])[0]["same"] == 999


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_written_files_with_the_same_ids(kind: PieceKind, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = save_pieces(tmp_path / "released", kind)
    declared = json.loads((tmp_path / "released" / "tokenizer_config.json").read_text())
    (tmp_path / "out").mkdir()
    taken = load_vocabulary(tmp_path / "released", lowercase=False, kind="released")
    save_tokenizer(tmp_path / "out", taken, declared)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (*LANGUAGES.values(), CODE, *TRAPS):
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids, text
        assert theirs(text, text)["input_ids"] == tokenizer.encode(text, text).ids
    assert {role: getattr(theirs, f"{role}_token_id") for role in ("pad", "mask", "cls", "sep")} == {
        role: number for role, number in special_ids(tokenizer).items() if role != "unk"
    }
    assert theirs.padding_side == "right"
    assert (tmp_path / "out" / "vocab.txt").read_text().split("\n")[:-1] == entries_of(tokenizer)


def test_a_kind_and_its_file_must_agree(tmp_path: Path) -> None:
    save_pieces(tmp_path, "xlm_roberta")
    with pytest.raises(InputError, match=r"kind: wordpiece, but .* is a vocabulary of kind released"):
        load_vocabulary(tmp_path, lowercase=True)
    assert VocabularyConfig.model_validate({"kind": "released", "path": "x"}).lowercase is False
    with pytest.raises(ValueError, match="lowercase must be false with kind: released"):
        VocabularyConfig.model_validate({"kind": "released", "lowercase": True})
    with pytest.raises(InputError, match=r"vocabulary\.path: empty, but kind: released needs a tokenizer\.json"):
        prepare(config(tmp_path, "", {"kind": "released"}), quiet=True)


def test_words_begin_at_blanks_and_between_letters_numbers_and_marks() -> None:
    text = "human beings (don't), 1948: \u062c\u0645\u064a\u0639"
    words = [" human", " beings", " (", "don", "'t", "),", " 1948", ":", " \u062c\u0645\u064a\u0639"]
    for kind in KINDS:
        expected = [words[0].strip() if kind == "mmbert" else words[0], *words[1:]]
        assert "".join(masked_words(make_pieces(kind), text)) == "".join(expected)
    assert masked_words(make_pieces("mmbert"), "equal\n  rights\n\nfree") == [
        "equal",
        "\n",
        "  ",
        "rights",
        "\n\n",
        "free",
    ]


def config(folder: Path, path: str, vocabulary: dict[str, Any], **corpus: Any) -> PretrainConfig:
    source = {"kind": "files", "path": path} if path else {"kind": "jsonl", "path": str(folder / "a.jsonl")}
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    more = {"vocabulary": vocabulary, "min_document_words": 0, "validation_fraction": 0, **corpus}
    return preparation(folder / "corpus", [SourceConfig.model_validate(source)], **more)


def documents() -> list[str]:
    lines = list(LANGUAGES.values())
    return [" ".join(lines[n:] + lines[:n]) + f"\n\n{CODE}" for n in range(len(lines))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_is_masked_by_ordinary_tokens(kind: PieceKind, tmp_path: Path) -> None:
    tokenizer = save_pieces(tmp_path / "start", kind)
    prepare(config(tmp_path, "", {"kind": "released", "path": str(tmp_path / "start")}), quiet=True)
    shards = open_shards(tmp_path / "corpus", "train")
    assert sorted(document_tokens(shards)) == sorted(tuple(library_ids(kind, text)) for text in documents())
    masker = Masker(shards, MaskingConfig(scheme="whole_words"), sequence_length=32, max_predictions=0)
    left_out = set(range(tokenizer.get_vocab_size())) - set(masker.replacement_ids.tolist())
    names = {tokenizer.id_to_token(number) for number in left_out}
    marked = {"<unused0>", "<unused1>", *(f"<0x{byte:02X}>" for byte in range(256))} if kind == "mmbert" else set()
    assert names == {tokenizer.id_to_token(number) for number in special_ids(tokenizer).values()} | marked
    card = json.loads((tmp_path / "corpus" / "card.json").read_text())
    assert card["vocabulary"]["kind"] == "released"


def python_files() -> list[Path]:
    """Files of this project: those of Python differ from version to version."""
    folder = Path(__file__).parents[2] / "pretrain" / "storage"
    return [folder / name for name in ("__init__.py", "folders.py", "objects.py", "runs.py")]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    for file in python_files():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "Makefile").write_text(
        "all:\n\tcc  a.c\r\n\n\n  # na\u00efve \u6f22\u5b57 \U0001f600\n\tx" + "\n" * 40 + "y"
    )
    return folder


def decoded(shards: TokenShards) -> set[str]:
    tokenizer = Tokenizer.from_file(str(shards.folder / "tokenizer.json"))
    return {tokenizer.decode(tokens) for tokens in document_tokens(shards)}


def contents(code: Path) -> set[str]:
    return {file.read_bytes().decode() for file in code.iterdir()}


def test_a_file_of_code_decodes_to_itself(code: Path, tmp_path: Path) -> None:
    save_pieces(tmp_path / "start", "mmbert")
    vocabulary = {"kind": "released", "path": str(tmp_path / "start")}
    prepare(config(tmp_path, str(code), vocabulary, line_breaks="keep"), quiet=True)
    assert decoded(open_shards(tmp_path / "corpus", "train")) == contents(code)


def test_a_vocabulary_trained_on_code_has_its_indentation(code: Path, tmp_path: Path) -> None:
    trained, given = tmp_path / "trained", tmp_path / "given"
    trained.mkdir()
    given.mkdir()
    vocabulary = {"kind": "byte_bpe", "size": 1000}
    prepare(config(trained, str(code), vocabulary, line_breaks="keep"), quiet=True)
    shards = open_shards(trained / "corpus", "train")
    # Every text begins with a blank, so that its first word is the same token as within a text.
    assert decoded(shards) == {text if text.startswith(" ") else f" {text}" for text in contents(code)}
    tokenizer = Tokenizer.from_file(str(trained / "corpus" / "tokenizer.json"))
    assert {"\u010a", "\u010a\u0120\u0120\u0120", "\u0120return"} <= set(tokenizer.get_vocab())
    expected = sorted(tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in contents(code))
    assert sorted(document_tokens(shards)) == expected
    # Given, the vocabulary makes the same tokens at once.
    path = {"kind": "byte_bpe", "path": str(trained / "corpus")}
    prepare(config(given, str(code), path, line_breaks="keep"), quiet=True)
    assert open_shards(given / "corpus", "train").fingerprint == shards.fingerprint
    # Sentences end where lines do.
    cuts = [(one.tokens, cut) for one in shards.shards for cut in itertools.pairwise(one.sentences.astype(int))]
    parts = [tokenizer.decode(tokens[a:b].tolist()) for tokens, (a, b) in cuts]
    assert "\nimport math" in parts
    with pytest.raises(InputError, match=r"corpus\.line_breaks: was 'keep', is None"):
        prepare(config(trained, str(code), vocabulary), quiet=True)


@pytest.mark.parametrize("kind", ["wordpiece", "xlm_roberta", "deberta_v3"])
def test_a_vocabulary_without_line_breaks_is_refused(kind: Any, code: Path, tmp_path: Path) -> None:
    vocabulary: dict[str, Any] = {}
    if kind != "wordpiece":
        save_pieces(tmp_path / "start", kind)
        vocabulary = {"kind": "released", "path": str(tmp_path / "start")}
    with pytest.raises(InputError, match=r"line_breaks: keep, but the vocabulary has no tokens for line breaks"):
        prepare(config(tmp_path, str(code), vocabulary, line_breaks="keep"), quiet=True)


def released_model(folder: Path, kind: PieceKind) -> Tokenizer:
    """A checkpoint for masked language modeling of random weights, in the family that has such a tokenizer."""
    import torch
    import transformers

    tokenizer = save_pieces(folder, kind)
    torch.manual_seed(0)
    ids = special_ids(tokenizer)
    common: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size() + 4,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "pad_token_id": ids["pad"],
        "bos_token_id": ids["cls"],
        "eos_token_id": ids["sep"],
    }
    if kind == "xlm_roberta":
        shape = transformers.XLMRobertaConfig(**common, max_position_embeddings=66, type_vocab_size=1)
        model: Any = transformers.XLMRobertaForMaskedLM(shape)
    elif kind == "mmbert":
        common |= {"cls_token_id": ids["cls"], "sep_token_id": ids["sep"]}
        shape = transformers.ModernBertConfig(**common, max_position_embeddings=64, local_attention=16)
        model = transformers.ModernBertForMaskedLM(shape)
    else:
        common |= {"max_position_embeddings": 64, "type_vocab_size": 0, "position_biased_input": False}
        common |= {"relative_attention": True, "position_buckets": 16, "pos_att_type": "p2c|c2p"}
        common |= {"norm_rel_ebd": "layer_norm", "share_att_key": True}
        shape = transformers.DebertaV2Config(**common)
        model = transformers.DebertaV2ForMaskedLM(shape)
    torch.nn.init.normal_(next(iter(model.parameters())), std=0.3)
    model.save_pretrained(folder)
    return tokenizer


def write_run(folder: Path, start: Path | str, **changes: Any) -> Path:
    text = folder / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"{document} {n}"}) + "\n" for n, document in enumerate(documents() * 3))
    )
    changes |= {"pairs__objective": "none", "masking__scheme": "whole_words", "corpus__min_document_words": 0}
    source = {"kind": "jsonl", "path": str(text)}
    path = folder / "trial.yaml"
    return write_config(path, folder / "corpus", text, Path(start), corpus__sources=[source], **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_released_checkpoint_is_continued_and_exported(kind: PieceKind, tmp_path: Path) -> None:
    """prepare --from, pretrain --from, export: the layout, the padded rows and the tokenizer are the released ones."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer = released_model(tmp_path / "start", kind)
    path = write_run(tmp_path, tmp_path / "start")
    assert main(["prepare", str(path)]) == 0
    assert main(["pretrain", str(path), "--no-ray"]) == 0
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "trial"), str(out)]) == 0
    before, after = (AutoModelForMaskedLM.from_pretrained(tmp_path / name).eval() for name in ("start", "out"))
    assert type(before) is type(after)
    shapes = [{name: list(tensor.shape) for name, tensor in model.state_dict().items()} for model in (before, after)]
    assert shapes[0] == shapes[1]
    for key in ("pad_token_id", "bos_token_id", "eos_token_id", "type_vocab_size", "max_position_embeddings"):
        assert getattr(after.config, key, None) == getattr(before.config, key, None), key
    theirs = AutoTokenizer.from_pretrained(out)
    for text in (*LANGUAGES.values(), CODE, *TRAPS):
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert_logits(out, after, tokenizer)
    assert main(["report", str(tmp_path / "trial")]) == 0


def test_xlm_r_is_pretrained_from_random_weights(tmp_path: Path) -> None:
    """Family and tokenizer make the export XLM-R's: positions after the padding's, one segment, its class."""
    import torch
    import transformers

    tokenizer = save_pieces(tmp_path / "tokenizer", "xlm_roberta")
    path = write_run(
        tmp_path,
        "",
        start_from="",
        corpus__vocabulary={"kind": "released", "path": str(tmp_path / "tokenizer")},
        model={"family": "roberta", "size": "custom", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64},
    )
    assert main(["prepare", str(path)]) == 0
    assert main(["pretrain", str(path), "--no-ray"]) == 0
    assert main(["export", str(tmp_path / "trial"), str(tmp_path / "out")]) == 0
    loaded, report = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert type(loaded) is transformers.XLMRobertaForMaskedLM
    values = loaded.config
    assert (values.max_position_embeddings, values.type_vocab_size, values.layer_norm_eps) == (66, 1, 1e-5)
    assert (values.pad_token_id, values.bos_token_id, values.eos_token_id) == (1, 0, 2)
    assert_logits(tmp_path / "out", loaded.eval(), tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    with torch.inference_mode():
        guesses = transformers.pipeline("fill-mask", model=loaded, tokenizer=theirs)("All human <mask> are born")
    assert len(guesses) == 5
