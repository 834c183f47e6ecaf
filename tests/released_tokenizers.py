"""Small byte-level tokenizers like RoBERTa's, ModernBERT's and EuroBERT's, and checkpoints with them."""

import json
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

Kind = Literal["roberta", "roberta_blank", "modernbert", "eurobert"]

TEXT = (
    "The dog doesn't care. In 1999 they're all here, the cat sat on the mat!\n  def f(x):\n\treturn x + 1\n"
    "A caf\u00e9 is na\u00efve. \u6f22\u5b57 and \U0001f600 are here."
)
# From meta-llama/Meta-Llama-3-8B, tokenizer.json; EuroBERT's is the same.
_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>")
_BERT = ("[UNK]", "[CLS]", "[SEP]", "[PAD]")
_LLAMA_SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|mask|>", "<|pad|>", "<|reserved_special_token_0|>")


def make_tokenizer(kind: Kind) -> Tokenizer:
    """Return a tokenizer of about 500 entries, trained on `TEXT`."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "eurobert"))
    if kind == "eurobert":
        split = pre_tokenizers.Split(Regex(_LLAMA), "isolated")
        cut: Any = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        cut = pre_tokenizers.ByteLevel(add_prefix_space=kind == "roberta_blank")
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    first = [] if kind in ("modernbert", "eurobert") else [*_ROBERTA]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=first,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    _add_tokens(tokenizer, kind)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, kind: Kind) -> None:
    if kind == "modernbert":
        # EleutherAI/gpt-neox-20b, allenai/OLMo and answerdotai/ModernBERT-base, tokenizer.json.
        tokenizer.normalizer = normalizers.NFC()
        runs = [AddedToken(" " * count, normalized=True) for count in range(24, 1, -1)]
        tokenizer.add_special_tokens(["<|padding|>", "<|endoftext|>"])
        tokenizer.add_tokens([AddedToken("|||IP_ADDRESS|||", normalized=False), *runs])
        tokenizer.add_special_tokens([*_BERT, AddedToken("[MASK]", lstrip=True, special=True)])
        tokenizer.add_tokens([AddedToken(f"[unused{number}]", normalized=False) for number in range(3)])
        first, last = "[CLS]", "[SEP]"
    elif kind == "eurobert":
        tokenizer.add_special_tokens([*_LLAMA_SPECIALS])
        first, last = _LLAMA_SPECIALS[:2]
    else:
        tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
        tokenizer.post_processor = processors.RobertaProcessing(
            ("</s>", 2), ("<s>", 0), add_prefix_space=kind == "roberta_blank"
        )
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B {last}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (first, last)],
    )


def save_released(folder: Path, kind: Kind) -> Tokenizer:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json as released; return the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(kind)
    tokenizer.save(str(folder / "tokenizer.json"))
    if kind == "modernbert":
        names = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
        declared: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    elif kind == "eurobert":
        names = {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>", "mask": "<|mask|>", "pad": "<|pad|>"}
        declared = {"tokenizer_class": "PreTrainedTokenizerFast"}
    else:
        names = {"unk": "<unk>", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "mask": "<mask>"}
        names |= {"bos": "<s>", "eos": "</s>"}
        declared = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": kind == "roberta_blank"}
    tokens = {f"{role}_token": name for role, name in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({**declared, **tokens, "model_max_length": 64}))
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    return tokenizer


def make_released(folder: Path, kind: Kind) -> Tokenizer:
    """Write an MLM checkpoint with random weights and five extra embedding rows; return its tokenizer."""
    import torch
    from transformers import ModernBertConfig, ModernBertForMaskedLM, RobertaConfig, RobertaForMaskedLM

    tokenizer = save_released(folder, kind)
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size() + 5,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    if kind == "modernbert":
        ids: dict[str, Any] = {
            f"{role}_token_id": tokenizer.token_to_id(f"[{role.upper()}]") for role in ("pad", "cls", "sep")
        }
        ids |= {"bos_token_id": ids["cls_token_id"], "eos_token_id": ids["sep_token_id"]}
        shape = ModernBertConfig(**common, **ids, max_position_embeddings=64, local_attention=16)
        model: Any = ModernBertForMaskedLM(shape)
    else:
        model = RobertaForMaskedLM(RobertaConfig(**common, max_position_embeddings=66, type_vocab_size=1))
    torch.nn.init.normal_(next(iter(model.parameters())), std=0.3)
    model.save_pretrained(folder)
    return tokenizer
