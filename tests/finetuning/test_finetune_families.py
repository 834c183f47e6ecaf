"""Fine-tuning of a ModernBERT with byte-level BPE, and of a DeBERTa with Unigram, end to end.

Three tasks, prediction, and transformers' answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import write_reviews
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import finetune
from finetune.tasks.datasets.text import TextEncoder
from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.tokenizer import ModelTokenizer, copy_tokenizer, read_tokenizer
from tests.distributed import run_workers
from tests.starts import Start, make_starts, records

transformers: Any = pytest.importorskip("transformers")

WINDOW = 48  # tokens
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
SIZES |= {"max_position_embeddings": 64, "pad_token_id": 0}
NAMES = {"PER": ["anna", "bob", "carla"], "LOC": ["paris", "rome", "oslo"]}
FILLERS = ["the", "film", "was", "in", "with", "and", "very", "not", "went", "to"]


# Where GPT-4's, Llama's and EuroBERT's tokenizers cut; ModernBERT's own is one ByteLevel.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"


def write_byte_level_tokenizer(folder: Path, texts: Sequence[str], *, split: bool = False) -> None:
    """tokenizer.json and tokenizer_config.json as those of ModernBERT, or with a regular expression first."""
    tokenizer = Tokenizer(models.BPE())
    if split:
        from tokenizers import Regex

        cut = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    declared = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))


def make_modernbert(folder: Path, texts: Sequence[str]) -> Path:
    """A ModernBertForMaskedLM with random weights, local layers and a byte-level tokenizer."""
    write_byte_level_tokenizer(folder, texts)
    torch.manual_seed(0)
    special = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    rows, local = read_tokenizer(folder).get_vocab_size(), {"local_attention": 8, "global_attn_every_n_layers": 2}
    config = transformers.ModernBertConfig(vocab_size=rows, **SIZES, **special, **local)
    transformers.ModernBertForMaskedLM(config).save_pretrained(folder)
    return folder


def make_deberta(folder: Path, texts: Sequence[str]) -> Path:
    """A DebertaV2ForMaskedLM with random weights and its tokenizer as transformers saves it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIALS, unk_token="[UNK]", show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    pieces = [tuple(piece) for piece in json.loads(tokenizer.to_str())["model"]["vocab"]]
    transformers.DebertaV2Tokenizer(vocab=pieces, model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    positions = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p"}
    positions |= {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_buckets": 8}
    config = transformers.DebertaV2Config(vocab_size=len(pieces), **SIZES, **positions)
    transformers.DebertaV2ForMaskedLM(config).save_pretrained(folder)
    return folder


def sentences(count: int, seed: int) -> list[tuple[list[str], list[str]]]:
    """Words and their tags; a sentence often begins with a name, so its first word needs the blank of the others."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        words, tags = [], []
        for place in range(draw.randint(3, 9)):
            kind = draw.choice([*NAMES, *NAMES, ""] if place == 0 else [*NAMES, *[""] * 4])
            words.append(draw.choice(NAMES[kind] if kind else FILLERS))
            tags.append(f"B-{kind}" if kind else "O")
        made.append((words, tags))
    return made


def write_conll(path: Path, made: list[tuple[list[str], list[str]]]) -> str:
    blocks = ("".join(f"{word} {tag}\n" for word, tag in zip(*one, strict=True)) for one in made)
    path.write_text("\n".join(blocks))
    return str(path)


def write_questions(path: Path, count: int, seed: int) -> str:
    """The answer is the place that follows the person asked for."""
    draw, lines = random.Random(seed), []
    for number in range(count):
        people, places = draw.sample(NAMES["PER"], 2), draw.sample(NAMES["LOC"], 2)
        context = " and ".join(f"{person} went to {place}" for person, place in zip(people, places, strict=True))
        asked = draw.randrange(2)
        answer = {"text": places[asked], "answer_start": context.index(places[asked])}
        question = f"where was {people[asked]}"
        lines.append({"id": str(number), "question": question, "context": context, "answers": [answer]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def settings(root: Path, name: str, section: dict[str, Any]) -> dict[str, Any]:
    values = {"name": name, "run_dir": str(root / name), "start_from": str(root / "start"), "max_length": WINDOW}
    values |= {"training": {"examples_per_step": 16, "learning_rate": 1e-2, "epochs": 6.0}, **section}
    values |= {"engine": {"precision": "fp32", "compile": False, "micro_batch_tokens": 400, "zero_stage": 1}}
    return values | {"tracking": {"log_every_steps": 10, "wandb": "off"}}


def starts(given: list[Start]) -> list[str]:
    from finetune.training import train

    return make_starts(train.main, given)


# What the masked-language-modeling head of the start gives to the head of a task.
STARTS = {"modernbert": (make_modernbert, {"dense_weight", "norm_weight"}), "deberta": (make_deberta, set())}
HEADS = {"modernbert": {"dense_weight", "norm_weight"}, "deberta": {"dense_weight", "dense_bias"}}


@pytest.fixture(scope="module", params=STARTS)
def root(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A start, and three finished runs from it."""
    root = tmp_path_factory.mktemp(request.param)
    reviews = write_reviews(root, train=160, dev=32)
    texts = [json.loads(line)["text"] for line in Path(reviews["train"]).read_text().splitlines()]
    STARTS[request.param][0](root / "start", [*texts, *(" ".join(words) for words, _ in sentences(200, 1))])
    tagged = {"train": write_conll(root / "train.conll", sentences(128, 2))}
    tagged["dev"] = write_conll(root / "dev.conll", sentences(32, 3))
    asked = {"stride": 8, "max_question_tokens": 16, "train": write_questions(root / "train-questions.jsonl", 128, 4)}
    asked["dev"] = write_questions(root / "dev-questions.jsonl", 16, 5)
    sections = {"reviews": {"classification": reviews}, "names": {"entities": tagged}, "answers": {"questions": asked}}
    given = [Start(settings(root, name, section)) for name, section in sections.items()]
    assert run_workers(1, starts, given) == [["", "", ""]]
    return root


@pytest.mark.parametrize("name", ["names", "answers"])
def test_a_task_is_learned(root: Path, name: str) -> None:
    losses = [record["loss"] for record in records(root / name)]
    assert losses[-1] < 0.8 * losses[0]


def test_the_head_of_the_start_is_taken_over(root: Path) -> None:
    start = read_released(root / "start")
    assert set(start.head) == STARTS[start.family][1]
    for name in ("reviews", "names", "answers"):
        own = HEADS[start.family] if start.family == "modernbert" or name == "reviews" else set()
        assert set(read_released(root / name / "model").head) == {*own, "out_weight", "out_bias"}


def test_transformers_answers_as_we_do(root: Path) -> None:
    folder = root / "answers" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    lines = [json.loads(line) for line in (root / "dev-questions.jsonl").read_text().splitlines()]
    for line, made in zip(lines, finetune.load(root / "answers")(lines), strict=True):
        assert made["answer"] == line["context"][made["start"] : made["end"]] == made["answer"].strip()
        inputs = tokenizer(line["question"], line["context"], return_tensors="pt", return_offsets_mapping=True)
        offsets = inputs.pop("offset_mapping")[0]
        with torch.no_grad():
            output = model(**inputs)
        context = torch.tensor([number == 1 for number in inputs.sequence_ids()])
        best = [
            (float(output.start_logits[0, a] + output.end_logits[0, b]), a, b)
            for a in context.nonzero().flatten().tolist()
            for b in range(a, int(context.nonzero().max()) + 1)
        ]
        _, first, last = max(best)
        begin, end = int(offsets[first, 0]), int(offsets[last, 1])
        assert made["answer"] == line["context"][begin:end].strip()


@pytest.mark.parametrize("split", [False, True])
def test_words_have_the_tokens_of_a_text(split: bool, tmp_path: Path) -> None:
    write_byte_level_tokenizer(tmp_path, [" ".join(words) for words, _ in sentences(200, 1)], split=split)
    tokenizer = read_tokenizer(tmp_path)
    words = ["anna", "went", "to", "paris", ",", "rome", "'s", "x1"]
    column = TextEncoder(tokenizer, 32).encode_words(words)
    for number, word in enumerate(words):
        ids = column.ids[column.starts[number] : column.starts[number + 1]]
        assert ids.tolist() == tokenizer.encode(f" {word}", add_special_tokens=False).ids
        offsets = column.offsets[column.starts[number] : column.starts[number + 1]]
        assert (offsets[0, 0], offsets[-1, 1]) == (0, len(word))
    (tmp_path / "out").mkdir()
    read = ModelTokenizer.read(tmp_path)
    copy_tokenizer(read, tmp_path / "out", tokenizer_class="PreTrainedTokenizerFast", max_positions=64, for_words=True)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    split_up = theirs(words, is_split_into_words=True, add_special_tokens=False)["input_ids"]
    assert split_up == column.ids.tolist()
    again = TextEncoder(read_tokenizer(tmp_path / "out"), 32).encode_words(words)
    assert again.ids.tolist() == column.ids.tolist()
    assert again.offsets[again.starts[1:] - 1, 1].tolist() == [len(word) for word in words]
    text = "anna went, to paris"
    assert theirs(text)["input_ids"] == tokenizer.encode(f" {text}").ids
