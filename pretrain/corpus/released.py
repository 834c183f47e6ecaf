"""Determine the kind of a tokenizer, and how documents are encoded with it.

`wordpiece` is BERT's, `byte_bpe` any byte-level BPE, `released` every other tokenizer.json, such as the Unigram of
XLM-R and DeBERTa-v3 or the BPE of Gemma and mmBERT. Each is used unchanged. If the tokenizer is exactly BERT's
(`is_bert`), words are encoded independently (`tokenize`), otherwise whole documents (`whole_documents`).
"""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from pretrain.common.errors import InputError
from pretrain.corpus.byte_level import is_byte_level
from pretrain.corpus.special_tokens import SPECIAL_TOKENS

_BERT_STEPS = ["WordPiece", "BertNormalizer", "BertPreTokenizer"]
MAX_WORD_CHARACTERS = 100  # longer words are [UNK]: google-research/bert tokenization.py, WordpieceTokenizer
_TEST_TEXT = "a\n    b\n\tc\n\n\nd  e\r\n"  # line breaks, indentation and runs of spaces, as in code


def kind_of(tokenizer: Tokenizer) -> str:
    """Return the `VocabularyConfig.kind`: wordpiece, byte_bpe or released."""
    if isinstance(tokenizer.model, models.WordPiece) and _is_wordpiece(json.loads(tokenizer.to_str())):
        return "wordpiece"
    return "byte_bpe" if is_byte_level(tokenizer) else "released"


def encodes_whole_documents(tokenizer: Tokenizer) -> bool:
    """Return whether whole documents are encoded, which is necessary unless the tokenizer is exactly BERT's."""
    return not isinstance(tokenizer.model, models.WordPiece) or not is_bert(json.loads(tokenizer.to_str()))


def _is_wordpiece(described: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json is a WordPiece with BERT's steps and special tokens, whatever its settings."""
    model = described["model"]
    steps = [(described[step] or {}).get("type") for step in ("model", "normalizer", "pre_tokenizer")]
    if steps != _BERT_STEPS or not set(SPECIAL_TOKENS) <= set(model["vocab"]):
        return False
    return (model["continuing_subword_prefix"], model["max_input_chars_per_word"]) == ("##", MAX_WORD_CHARACTERS)


def is_bert(described: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json gives the same tokens as `vocabulary.bert_tokenizer`, so `tokenize` can be used.

    It must split words at ideographs, and have neither added tokens that are not special nor gaps in the ids.
    """
    model, normalizer, added = described["model"], described["normalizer"], described["added_tokens"]
    return (
        _is_wordpiece(described)
        and model["unk_token"] == "[UNK]"
        and normalizer["clean_text"]
        and normalizer["handle_chinese_chars"]
        and max(model["vocab"].values()) < len(model["vocab"])
        and all(token["special"] and token["content"] in SPECIAL_TOKENS for token in added)
    )


def released_from_json(path: Path, text: str) -> Tokenizer:
    """Load the `text` of a tokenizer.json unchanged, except for truncation and padding, which are disabled.

    Raises `InputError`, prefixed with `path`, if it cannot be parsed, its tokens are random (BPE dropout), or a
    byte-level BPE lacks entries for bytes.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{path}: not a tokenizer.json ({error}).") from None
    if dropout := json.loads(text)["model"].get("dropout"):
        raise InputError(f"{path}: its BPE has a dropout of {dropout}, so its tokens are random. Set it to 0.")
    missing = set(pre_tokenizers.ByteLevel.alphabet()).difference(tokenizer.get_vocab())
    if missing and is_byte_level(tokenizer):
        raise InputError(f"{path}: has no entry for {len(missing)} of the 256 bytes. Choose another vocabulary.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# Python-only tokenizer classes of transformers and of models: they split or convert text before matching entries.
_PYTHON_CLASSES = (
    *("bartpho", "bertgeneration", "bertjapanese", "berttokenizerlegacy", "bertweet", "biogpt", "blenderbotsmall"),
    *("byt5", "canine", "clvp", "cpm", "cpmant", "ctrl", "dia", "esm", "fastspeech2conformer", "flaubert", "fsmt"),
    *("gptneoxjapanese", "gptsw3", "kobert", "m2m100", "marian", "mgpstr", "mluke", "myt5", "perceiver", "phobert"),
    *("plbart", "pop2piano", "prophetnet", "rag", "rocbert", "roformer", "siglip", "speech2text", "speecht5", "tapas"),
    *("tipsv2", "vits", "wav2vec2ctc", "wav2vec2phonemectc", "xlm"),
)
_CONFIGS = ("tokenizer_config.json", "config.json")


def class_stem(name: object) -> str:
    """Return the name of a tokenizer class without its suffix."""
    return re.sub(r"(Tokenizer(Fast)?|Backend)$", "", str(name))


def named_class(folder: Path) -> tuple[Path, str]:
    """Return (config file, name of the tokenizer class in it) of a model's `folder`; the name is "" if missing."""
    named = [(folder / name, str(_object(folder / name).get("tokenizer_class") or "")) for name in _CONFIGS]
    return next((candidate for candidate in named if candidate[1]), named[0])


def refuse_python(folder: Path) -> None:
    """Raise `InputError` if a model's `folder` needs a tokenizer in Python, which its files do not fully describe.

    The class is in tokenizer_config.json or config.json. An `auto_map` without a tokenizer only concerns the model; in
    older tokenizer_config.json files, `auto_map` may be the tokenizer's class instead of an object.
    """
    for name in _CONFIGS:
        read = _object(folder / name)
        mapped = read.get("auto_map")
        if isinstance(mapped, dict):
            mapped = mapped.get("AutoTokenizer")
        elif name == "config.json":
            mapped = None
        python = next(filter(None, mapped), None) if isinstance(mapped, list) else mapped
        for key, default in (("word_tokenizer_type", "basic"), ("subword_tokenizer_type", "wordpiece")):
            if read.get(key, default) not in (default, None):
                python = python or f"{key} {read[key]}"
        named = read.get("tokenizer_class")
        if not named and not named_class(folder)[1]:
            named = re.sub("[-_]", "", str(read.get("model_type")))
        if class_stem(named).lower() in _PYTHON_CLASSES:
            python = python or named
        if python:
            raise InputError(
                f"{folder / name}: {python} is a tokenizer in Python, which the files do not replace. Choose a model "
                "with another tokenizer. If its tokenizer.json gives the same tokens, remove the name."
            )


def _object(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file; {} if it is missing or damaged, which is reported where the file is needed."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def keeps_lines(tokenizer: Tokenizer) -> bool:
    """Return whether line breaks and indentation are tokens, so that decoding restores a document.

    A leading space is ignored, since some tokenizers add it.
    """
    decoded = tokenizer.decode(tokenizer.encode(_TEST_TEXT, add_special_tokens=False).ids)
    return decoded.removeprefix(" ") == _TEST_TEXT
