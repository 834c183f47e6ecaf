"""Determine the kind of a tokenizer, and how documents are encoded with it.

The kind is `wordpiece` for BERT's, `byte_bpe` for any byte-level BPE, and `released` for every other tokenizer.json,
such as the Unigram of XLM-R and DeBERTa-v3 or the BPE of Gemma and mmBERT. Every tokenizer is used unchanged. If it is
exactly BERT's (`is_bert`), documents are encoded word by word (`tokenize`), else as a whole (`whole_documents`).
"""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from pretrain.common.errors import InputError
from pretrain.corpus.byte_level import is_byte_level
from pretrain.corpus.special_tokens import SPECIAL_TOKENS

_BERT_COMPONENTS = ["WordPiece", "BertNormalizer", "BertPreTokenizer"]
MAX_WORD_CHARACTERS = 100  # longer words are [UNK], as in google-research/bert (tokenization.py, WordpieceTokenizer)
_TEST_TEXT = "a\n    b\n\tc\n\n\nd  e\r\n"  # text with line breaks, indentation and runs of spaces, as in code


def kind_of(tokenizer: Tokenizer) -> str:
    """Return the `VocabularyConfig.kind`: wordpiece, byte_bpe or released."""
    if isinstance(tokenizer.model, models.WordPiece) and _is_wordpiece(json.loads(tokenizer.to_str())):
        return "wordpiece"
    return "byte_bpe" if is_byte_level(tokenizer) else "released"


def encodes_whole_documents(tokenizer: Tokenizer) -> bool:
    """Return whether documents must be encoded as a whole, since the tokenizer is not exactly BERT's."""
    return not isinstance(tokenizer.model, models.WordPiece) or not is_bert(json.loads(tokenizer.to_str()))


def _is_wordpiece(spec: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json has BERT's components and special tokens; their settings may differ."""
    model = spec["model"]
    components = [(spec[key] or {}).get("type") for key in ("model", "normalizer", "pre_tokenizer")]
    if components != _BERT_COMPONENTS or not set(SPECIAL_TOKENS) <= set(model["vocab"]):
        return False
    return (model["continuing_subword_prefix"], model["max_input_chars_per_word"]) == ("##", MAX_WORD_CHARACTERS)


def is_bert(spec: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json gives the same tokens as `vocabulary.bert_tokenizer`, so `tokenize` can be used.

    It must split words at ideographs, all its added tokens must be special, and its ids must have no gaps.
    """
    model, normalizer, added = spec["model"], spec["normalizer"], spec["added_tokens"]
    return (
        _is_wordpiece(spec)
        and model["unk_token"] == "[UNK]"
        and normalizer["clean_text"]
        and normalizer["handle_chinese_chars"]
        and max(model["vocab"].values()) < len(model["vocab"])
        and all(token["special"] and token["content"] in SPECIAL_TOKENS for token in added)
    )


def released_from_json(path: Path, text: str) -> Tokenizer:
    """Load the `text` of a tokenizer.json unchanged, except for truncation and padding, which are disabled.

    Raises `InputError`, prefixed with `path`, if it cannot be parsed, encoding is nondeterministic (BPE dropout),
    or a byte-level BPE lacks entries for bytes.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{path}: not a tokenizer.json ({error}).") from None
    if dropout := json.loads(text)["model"].get("dropout"):
        raise InputError(f"{path}: its BPE has a dropout of {dropout}, so encoding is nondeterministic. Set it to 0.")
    missing = set(pre_tokenizers.ByteLevel.alphabet()).difference(tokenizer.get_vocab())
    if missing and is_byte_level(tokenizer):
        raise InputError(f"{path}: has no entry for {len(missing)} of the 256 bytes. Choose another vocabulary.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# Stems (`class_stem`, in lower case) of Python-only tokenizer classes, which split or convert text before encoding it.
_PYTHON_CLASSES = (
    *("bartpho", "bertgeneration", "bertjapanese", "berttokenizerlegacy", "bertweet", "biogpt", "blenderbotsmall"),
    *("byt5", "canine", "clvp", "cpm", "cpmant", "ctrl", "dia", "esm", "fastspeech2conformer", "flaubert", "fsmt"),
    *("gptneoxjapanese", "gptsw3", "kobert", "m2m100", "marian", "mgpstr", "mluke", "myt5", "perceiver", "phobert"),
    *("plbart", "pop2piano", "prophetnet", "rag", "rocbert", "roformer", "siglip", "speech2text", "speecht5", "tapas"),
    *("tipsv2", "vits", "wav2vec2ctc", "wav2vec2phonemectc", "xlm"),
)
_CONFIGS = ("tokenizer_config.json", "config.json")


def class_stem(name: object) -> str:
    """Return the name of a tokenizer class without its suffix, such as TokenizerFast."""
    return re.sub(r"(Tokenizer(Fast)?|Backend)$", "", str(name))


def tokenizer_class_name(folder: Path) -> tuple[Path, str]:
    """Return (config file, tokenizer class that it names) of a model's `folder`; the class is "" if missing."""
    candidates = [(folder / name, str(_read_object(folder / name).get("tokenizer_class") or "")) for name in _CONFIGS]
    return next((candidate for candidate in candidates if candidate[1]), candidates[0])


def reject_python_tokenizer(folder: Path) -> None:
    """Raise `InputError` if a model's `folder` needs a tokenizer in Python, which its files do not fully describe.

    tokenizer_config.json or config.json names the class. If `auto_map` is an object, only its key AutoTokenizer counts;
    in older tokenizer_config.json files, `auto_map` may be the tokenizer's class itself.
    """
    for name in _CONFIGS:
        config = _read_object(folder / name)
        auto_class = config.get("auto_map")
        if isinstance(auto_class, dict):
            auto_class = auto_class.get("AutoTokenizer")
        elif name == "config.json":
            auto_class = None
        python_class = next(filter(None, auto_class), None) if isinstance(auto_class, list) else auto_class
        for key, default in (("word_tokenizer_type", "basic"), ("subword_tokenizer_type", "wordpiece")):
            if config.get(key, default) not in (default, None):
                python_class = python_class or f"{key} {config[key]}"
        class_name = config.get("tokenizer_class")
        if not class_name and not tokenizer_class_name(folder)[1]:
            class_name = re.sub("[-_]", "", str(config.get("model_type")))
        if class_stem(class_name).lower() in _PYTHON_CLASSES:
            python_class = python_class or class_name
        if python_class:
            raise InputError(
                f"{folder / name}: {python_class} is a tokenizer in Python, which the other files do not fully "
                "describe. Choose another model. If its tokenizer.json gives the same tokens, remove this entry."
            )


def _read_object(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file; {} if it is missing or damaged, which is reported when the file is needed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def keeps_lines(tokenizer: Tokenizer) -> bool:
    """Return whether decoding restores line breaks and indentation.

    A leading space is ignored, since some tokenizers add it.
    """
    decoded = tokenizer.decode(tokenizer.encode(_TEST_TEXT, add_special_tokens=False).ids)
    return decoded.removeprefix(" ") == _TEST_TEXT
