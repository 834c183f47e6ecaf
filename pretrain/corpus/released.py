"""Which tokenizers there are, and which of them have a fast way to tokens.

`wordpiece` is BERT's, `byte_bpe` any byte-level BPE, `released` every other tokenizer.json, such as the Unigram of
XLM-R and DeBERTa-v3 or the BPE of Gemma and mmBERT. Each is taken as it is. Whole documents are encoded with it, as
the library does (`whole_documents`), unless `is_bert` says that words alone have the same tokens (`tokenize`).
"""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from pretrain.common.errors import InputError
from pretrain.corpus.byte_level import is_byte_level
from pretrain.corpus.special_tokens import SPECIAL_TOKENS

_BERT_PARTS = ["WordPiece", "BertNormalizer", "BertPreTokenizer"]
MAX_WORD_CHARACTERS = 100  # longer words are [UNK]: google-research/bert tokenization.py, WordpieceTokenizer
# Line breaks, indentation and runs of blanks, as in code.
_LINES = "a\n    b\n\tc\n\n\nd  e\r\n"


def kind_of(tokenizer: Tokenizer) -> str:
    """`VocabularyConfig.kind`: wordpiece, byte_bpe or released."""
    if isinstance(tokenizer.model, models.WordPiece) and _is_wordpiece(json.loads(tokenizer.to_str())):
        return "wordpiece"
    return "byte_bpe" if is_byte_level(tokenizer) else "released"


def takes_whole_documents(tokenizer: Tokenizer) -> bool:
    """Whether documents are encoded as wholes: it is not exactly BERT's."""
    return not isinstance(tokenizer.model, models.WordPiece) or not is_bert(json.loads(tokenizer.to_str()))


def _is_wordpiece(described: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is a WordPiece with BERT's parts and special tokens, of any settings."""
    model = described["model"]
    kinds = [(described[part] or {}).get("type") for part in ("model", "normalizer", "pre_tokenizer")]
    if kinds != _BERT_PARTS or not set(SPECIAL_TOKENS) <= set(model["vocab"]):
        return False
    return (model["continuing_subword_prefix"], model["max_input_chars_per_word"]) == ("##", MAX_WORD_CHARACTERS)


def is_bert(described: dict[str, Any]) -> bool:
    """Whether the tokens of a tokenizer.json are those of `vocabulary.bert_tokenizer`, which `tokenize` finds by word.

    Words are cut at ideographs, no text has an added token, and a further entry would have the id after the last.
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
    """The tokenizer that the `text` of a tokenizer.json describes as it is, without truncation and padding.

    Raises `InputError`, which names `path`, if it cannot be read, or its tokens are random, or bytes have none.
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


# Classes of transformers and of models' own code that are Python: they divide or map text before an entry is found.
_PYTHON = (
    *("bartpho", "bertgeneration", "bertjapanese", "berttokenizerlegacy", "bertweet", "biogpt", "blenderbotsmall"),
    *("byt5", "canine", "clvp", "cpm", "cpmant", "ctrl", "dia", "esm", "fastspeech2conformer", "flaubert", "fsmt"),
    *("gptneoxjapanese", "gptsw3", "kobert", "m2m100", "marian", "mgpstr", "mluke", "myt5", "perceiver", "phobert"),
    *("plbart", "pop2piano", "prophetnet", "rag", "rocbert", "roformer", "siglip", "speech2text", "speecht5", "tapas"),
    *("tipsv2", "vits", "wav2vec2ctc", "wav2vec2phonemectc", "xlm"),
)
_CONFIGS = ("tokenizer_config.json", "config.json")


def class_stem(name: object) -> str:
    """The name of a class of tokenizers without its ending."""
    return re.sub(r"(Tokenizer(Fast)?|Backend)$", "", str(name))


def named_class(folder: Path) -> tuple[Path, str]:
    """(the file that names it, the class of the tokenizer of a model's `folder`); "" if none is named."""
    named = [(folder / name, str(_object(folder / name).get("tokenizer_class") or "")) for name in _CONFIGS]
    return next((one for one in named if one[1]), named[0])


def refuse_python(folder: Path) -> None:
    """Raise `InputError` if the tokenizer of a model's `folder` is one in Python, of which files tell only a part.

    It is named in tokenizer_config.json or config.json. `auto_map` without a tokenizer is of the model, and no matter;
    one that is no object is of the tokenizer in tokenizer_config.json, as older files have it.
    """
    for name in _CONFIGS:
        read = _object(folder / name)
        mapped = read.get("auto_map")
        if isinstance(mapped, dict):
            mapped = mapped.get("AutoTokenizer")
        elif name == "config.json":
            mapped = None
        found = next(filter(None, mapped), None) if isinstance(mapped, list) else mapped
        for part, plain in (("word_tokenizer_type", "basic"), ("subword_tokenizer_type", "wordpiece")):
            if read.get(part, plain) not in (plain, None):
                found = found or f"{part} {read[part]}"
        named = read.get("tokenizer_class")
        if not named and not named_class(folder)[1]:
            named = re.sub("[-_]", "", str(read.get("model_type")))
        if class_stem(named).lower() in _PYTHON:
            found = found or named
        if found:
            raise InputError(
                f"{folder / name}: {found} is a tokenizer in Python, for which the files cannot stand. Choose a model "
                "with another tokenizer. If its tokenizer.json gives the same tokens, take the name out."
            )


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is none: damaged files are reported where they are needed."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def keeps_lines(tokenizer: Tokenizer) -> bool:
    """Whether line breaks and indentation are tokens, so that a text is what its tokens decode to.

    A blank at its beginning, which some tokenizers add, does not count.
    """
    decoded = tokenizer.decode(tokenizer.encode(_LINES, add_special_tokens=False).ids)
    return decoded.removeprefix(" ") == _LINES
