"""Small tokenizers with the same parts in tokenizer.json as XLM-R, DeBERTa-v3 and mmBERT (Gemma's tokenizer).

The character map is SentencePiece 0.2.3's rule `nmt_nfkc` (Apache License 2.0), which XLM-R uses, too: models trained
by SentencePiece have it in `normalizer_spec.precompiled_charsmap`.
"""

import functools
import json
import lzma
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

PieceKind = Literal["xlm_roberta", "deberta_v3", "mmbert"]

# Universal Declaration of Human Rights, article 1, in twelve languages.
LANGUAGES = {
    "ar": "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "el": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "en": "All human beings are born free and equal in dignity and rights. They don't care, it's 1948.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. C'est « l'été ».",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "ja": "すべての人間は、生まれながらにして自由であり、ﾊﾝｶｸとかつ、尊厳と権利とについて平等である。",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "ru": "Все люди рождаются свободными и равными в своём достоинстве и правах.",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "vi": "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.",
    "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，",
}
CODE = "def f(x):\n    if x > 1:\n\treturn [x, 'a  b']\n\n\n    # naïve\n    return {\"k\": x ** 2}\n"


def make_pieces(kind: PieceKind) -> Tokenizer:
    """Return a tokenizer of about 600 entries, trained on `LANGUAGES` and `CODE`."""
    return Tokenizer.from_str(_trained(kind))


@functools.cache
def _trained(kind: PieceKind) -> str:
    return {"xlm_roberta": _xlm_roberta, "deberta_v3": _deberta_v3, "mmbert": _mmbert}[kind]().to_str()


def character_map() -> normalizers.Normalizer:
    return normalizers.Precompiled(
        lzma.decompress((Path(__file__).parent / "fixtures" / "nmt_nfkc.charsmap.xz").read_bytes())
    )


def _pieces(normalizer: normalizers.Normalizer, cut: Any) -> list[list[Any]]:
    """Train a Unigram model, and return [entry, score] of each entry."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, cut
    trainer = trainers.UnigramTrainer(vocab_size=600, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([*LANGUAGES.values(), CODE], trainer)
    return json.loads(tokenizer.to_str())["model"]["vocab"][1:]


def _xlm_roberta() -> Tokenizer:
    """FacebookAI/xlm-roberta-base, tokenizer.json: fairseq's four special tokens first, `<mask>` last."""
    cut: Any = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    first = [[token, 0.0] for token in ("<s>", "<pad>", "</s>", "<unk>")]
    entries = [*first, *_pieces(character_map(), cut), ["<mask>", 0.0]]
    tokenizer = Tokenizer(models.Unigram([(entry, score) for entry, score in entries], unk_id=3))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = character_map(), cut, decoders.Metaspace()
    tokenizer.add_special_tokens([entry for entry, _ in first])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return tokenizer


def _deberta_v3() -> Tokenizer:
    """microsoft/deberta-v3-base as transformers 4 writes its tokenizer.json; `[MASK]` is beyond the model's entries."""
    cut: Any = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    blanks = normalizers.Replace(Regex(" {2,}"), " ")
    normalizer: Any = normalizers.Sequence([normalizers.Strip(), character_map(), blanks])
    entries = [*([token, 0.0] for token in ("[PAD]", "[CLS]", "[SEP]", "[UNK]")), *_pieces(normalizer, cut)]
    tokenizer = Tokenizer(models.Unigram([(entry, score) for entry, score in entries], unk_id=3))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, cut, decoders.Metaspace()
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]"])
    tokenizer.add_special_tokens([AddedToken("[UNK]", normalized=True, special=True), "[MASK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def _mmbert() -> Tokenizer:
    """jhu-clsp/mmBERT-base, tokenizer.json, which is google/gemma-2's: BPE over whole texts, bytes as a fallback."""
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    cut: Any = pre_tokenizers.Split("\u2581", "merged_with_next")
    trained.pre_tokenizer = cut
    runs = ["\n" * count for count in (1, 2, 3)] + ["\u2581" * count for count in range(8, 1, -1)] + ["\t", "\t\t"]
    known = [*first, "<unused0>", "<unused1>", *runs, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=known, show_progress=False)
    # Rare characters are spelled by their bytes.
    trained.train_from_iterator([text for name, text in LANGUAGES.items() if name not in ("th", "ko")] * 2, trainer)
    described = json.loads(trained.to_str())["model"]
    blanks = [("\u2581" * count, "\u2581" * count) for count in (1, 2, 4)]
    merges = [*blanks, *((merge[0], merge[1]) for merge in described["merges"])]
    tokenizer = Tokenizer(models.BPE(described["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in first])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ["<unused0>", "<unused1>", *runs]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B:1 <eos>:1", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    return tokenizer


def save_pieces(folder: Path, kind: PieceKind) -> Tokenizer:
    """Write tokenizer.json and tokenizer_config.json as released, and return the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_pieces(kind)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "xlm_roberta": {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>", "bos": "<s>"},
        "deberta_v3": {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]"},
        "mmbert": {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"},
    }[kind]
    name = {"xlm_roberta": "XLMRobertaTokenizer", "deberta_v3": "DebertaV2Tokenizer", "mmbert": "GemmaTokenizerFast"}
    declared = {f"{role}_token": token for role, token in names.items()}
    declared |= {"tokenizer_class": name[kind], "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    return tokenizer
