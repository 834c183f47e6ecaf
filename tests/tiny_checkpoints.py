"""Small released checkpoints, made with transformers, and small labeled sets to fine-tune them on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain.checkpoint.assembly import ReleasedModel

WORDS = ["good", "bad", "fine", "poor", "great", "awful", "film", "book", "plot", "end"]
WORDS += ["very", "not", "a", "the", "was", "is", "it", "and", "or"]
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_bert(folder: Path, *, hidden: int = 32, layers: int = 2, positions: int = 64, seed: int = 0) -> Path:
    """Write a BertModel with random weights and a vocabulary of `WORDS` and letters."""
    import torch
    from transformers import BertConfig, BertModel

    letters = "abcdefghijklmnopqrstuvwxyz"
    entries = [*SPECIALS, *WORDS, *letters, *(f"##{letter}" for letter in letters), *".,?!0123456789"]
    vocabulary = list(dict.fromkeys(entries))
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 2 * hidden}
    shape = BertConfig(vocab_size=len(vocabulary), num_attention_heads=2, max_position_embeddings=positions, **sizes)
    BertModel(shape).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    config = {"do_lower_case": True, "tokenizer_class": "BertTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_roberta(folder: Path, bert: Path) -> Path:
    """Write a RobertaModel with random weights, and the vocabulary and tokenizer of `bert`."""
    from transformers import RobertaConfig, RobertaModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    more = {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 0}
    return _with_tokenizer_of(bert, folder, RobertaModel, RobertaConfig, **sizes, **more)


def make_distilbert(folder: Path, bert: Path) -> Path:
    """Write a DistilBertModel with random weights, and the vocabulary and tokenizer of `bert`."""
    from transformers import DistilBertConfig, DistilBertModel

    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 64}
    return _with_tokenizer_of(bert, folder, DistilBertModel, DistilBertConfig, **sizes)


def _with_tokenizer_of(bert: Path, folder: Path, model: Any, config: Any, **sizes: int) -> Path:
    import torch

    shutil.copytree(bert, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    entries = len((bert / "vocab.txt").read_text().splitlines())
    model(config(vocab_size=entries, **sizes)).save_pretrained(folder)
    return folder


def add_sentence_files(folder: Path, pooling: dict[str, Any], *further: str) -> Path:
    """Write the files that sentence-transformers adds to an encoder: for `pooling` and `further` modules."""
    kinds = ("Transformer", "Pooling", *further)
    modules = [{"idx": n, "path": f"{n}_{kind}" * (n > 0), "type": f"some.{kind}"} for n, kind in enumerate(kinds)]
    limit, prompts = {"max_seq_length": 32, "do_lower_case": False}, {"prompts": {"query": "the "}}
    files = {"modules.json": modules, "1_Pooling/config.json": {**pooling, "include_prompt": True}}
    files |= {"sentence_bert_config.json": limit, "config_sentence_transformers.json": prompts}
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def write_again(released: ReleasedModel, folder: Path, tokenizer: Path, purpose: str, **changes: Any) -> Path:
    """Write a released model again, with changed arguments of `write_released`; return the folder."""
    from pretrain.checkpoint.released_writer import write_released

    names = ("family", "model", "backbone", "head", "config")
    parts = {**{name: getattr(released, name) for name in names}, "tokenizer_folder": tokenizer, "card": "", **changes}
    write_released(folder, purpose=purpose, **parts)
    return folder


def write_reviews(folder: Path, *, train: int = 40, dev: int = 12) -> dict[str, str]:
    """Write train.jsonl and dev.jsonl of sentences whose first adjective decides the label; return their paths."""
    import random

    draw = random.Random(0)
    paths = {}
    for split, count in (("train", train), ("dev", dev)):
        rows: list[dict[str, Any]] = []
        for _ in range(count):
            label = draw.choice(["positive", "negative"])
            adjective = draw.choice(["good", "fine", "great"] if label == "positive" else ["bad", "poor", "awful"])
            tail = " ".join(draw.choices(WORDS[6:], k=draw.randint(1, 12)))
            rows.append({"text": f"the {draw.choice(['film', 'book'])} was {adjective} {tail}", "label": label})
        path = folder / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        paths[split] = str(path)
    return paths
