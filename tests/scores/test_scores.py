"""`evaluate-pretrained`: held-out text, BLiMP and fine-tunings of a checkpoint, and what is kept of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from finetune.cli import main
from finetune.scores import blimp, finetuning_runs, held_out, masked_model
from finetune.scores.blimp import BlimpScore, ParadigmScore, blimp_score, pseudo_log_likelihoods, read_blimp
from finetune.scores.finetuning import FinetuningScore, finetuning_scores
from finetune.scores.finetuning_runs import FinetuningSettings
from finetune.scores.held_out import HeldOutSettings, held_out_score, masked_sequences, read_documents
from finetune.scores.masked_model import MaskedModel, ModelSettings
from finetune.scores.record import Record
from finetune.scores.view import finetuning_charts, score_notes, score_rows
from finetune.training.config import load_config
from pretrain.common.errors import InputError, MachineError
from pretrain.model import compile as compiler
from pretrain.model.compile import MARKS_UNKNOWN_SIZES
from pretrain.run.preflight import only_run
from tests.fake_trials import hand_out
from tests.tasks.refusals import refused
from tests.tiny_checkpoints import SPECIALS, WORDS, make_bert, write_reviews

SENTENCES = ["the film was good.", "a book is very very bad, and the plot was not great.", "it is fine"]
SENTENCES += ["the end", "a film or a book", "The FILM was good."]
Trained = list[
    tuple[str, bool, int]
]  # of each run, the checkpoint, whether it begins from random weights, and the seed


def make_masked_lm(folder: Path, kind: str = "bert", positions: int = 64) -> Path:
    """A small released model for masked language modeling with random weights of transformers' class."""
    from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

    make_bert(folder, positions=positions)
    vocabulary = len((folder / "vocab.txt").read_text().splitlines())
    torch.manual_seed(1)
    shape: dict[str, Any] = {"vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": positions}
    shape |= {"initializer_range": 0.5}
    if kind == "bert":
        model: Any = BertForMaskedLM(BertConfig(**shape))
    else:
        shape |= {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
        shape |= {"global_attn_every_n_layers": 2, "local_attention": 8, "attn_implementation": "eager"}
        model = ModernBertForMaskedLM(ModernBertConfig(**shape))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


def with_config(model: Path, folder: Path, **changes: Any) -> Path:
    """A copy of the model whose config.json has other values."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def with_weights(model: Path, factor: float) -> Path:
    """The model with all weights multiplied."""
    path = model / "model.safetensors"
    scaled = {name: factor * tensor for name, tensor in load_file(path).items()}
    save_file(scaled, path, {"format": "pt"})
    return model


def naive(folder: Path, sentence: str) -> float:
    """The pseudo-log-likelihood by transformers, one masked copy after another."""
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    encoded = Tokenizer.from_str(MaskedModel(folder).tokenizer.to_str()).encode(sentence)
    total = 0.0
    for place, special in enumerate(encoded.special_tokens_mask):
        if special:
            continue
        ids = torch.tensor([encoded.ids])
        ids[0, place] = SPECIALS.index("[MASK]")
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        total += float(logits[0, place].log_softmax(-1)[encoded.ids[place]])
    return total


def watch_compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Gets the names of the functions whose compiled program is called from now on."""
    called: set[str] = set()
    original = compiler.compiled_function

    def watched(function: Callable[..., Any], integers: tuple[int | None, ...]) -> Callable[..., Any]:
        called.add(function.__name__)
        return original(function, integers)

    monkeypatch.setattr(compiler, "compiled_function", watched)
    return called


# ---- BLiMP


@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_pseudo_log_likelihoods_are_those_of_a_loop_over_transformers(tmp_path, kind, compile, monkeypatch) -> None:
    folder = make_masked_lm(tmp_path, kind)
    expected = [naive(folder, sentence) for sentence in SENTENCES]
    assert max(expected) - min(expected) > 1
    model = MaskedModel(folder, ModelSettings(compile=compile))
    compiled = watch_compiled(monkeypatch)
    together = pseudo_log_likelihoods(model, SENTENCES)
    np.testing.assert_allclose(together, expected, atol=1e-4)
    assert ({"embed", "after_attention", "weights_kernel", "mlm_transform"} <= compiled) is compile
    assert bool(compiled) is compile
    # Whatever shares a forward pass.
    monkeypatch.setattr(masked_model, "BATCH_TOKENS", 20)
    monkeypatch.setattr(blimp, "AT_ONCE", 30)
    counted: list[int] = []
    with torch._dynamo.config.patch(error_on_recompile=MARKS_UNKNOWN_SIZES):
        apart = pseudo_log_likelihoods(model, SENTENCES, counted.append)
    np.testing.assert_allclose(apart, expected, atol=1e-4)
    assert len(counted) > 2
    assert sum(counted) == len(SENTENCES)


def write_blimp(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    paradigms = {
        "one": ("agreement", [("the film was good.", "the film was bad."), ("it is fine", "it is poor")]),
        "two": ("agreement", [("a book", "a plot"), ("THE END", "the end")]),
        "three": ("islands", [("a film or a book", "a film or a film"), ("it", "it")]),
    }
    for name, (term, pairs) in paradigms.items():
        rows = [
            {"sentence_good": good, "sentence_bad": bad, "linguistics_term": term, "UID": name} for good, bad in pairs
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_blimp_counts_pairs_and_ties_are_wrong(tmp_path: Path, bert: Path) -> None:
    data = write_blimp(tmp_path / "blimp")
    score, before = blimp_score(bert, data), read_blimp(data)
    for paradigm in before:
        right = sum(naive(bert, good) > naive(bert, bad) for good, bad in paradigm.pairs[:1])
        # The second pairs of two and three have equal tokens.
        right += paradigm.name == "one" and naive(bert, "it is fine") > naive(bert, "it is poor")
        assert score.paradigms[paradigm.name] == ParadigmScore(paradigm.phenomenon, 2, right)
    assert [len(one.pairs) for one in read_blimp(data, 1)] == [1, 1, 1]
    for file in data.iterdir():
        file.write_bytes(file.read_bytes() + b"\r\n\n")
    assert read_blimp(data) == before, "blank lines are no pairs"


def test_phenomena_are_means_of_paradigms() -> None:
    score = BlimpScore({"a": ParadigmScore("x", 10, 1), "b": ParadigmScore("x", 2, 1), "c": ParadigmScore("y", 4, 4)})
    assert score.phenomena == pytest.approx({"x": 0.3, "y": 1.0})
    assert score.overall == pytest.approx(1.6 / 3)


def test_an_interrupted_blimp_continues(tmp_path: Path, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, path = write_blimp(tmp_path / "blimp"), tmp_path / "record.json"
    model = {"fingerprint": masked_model.fingerprint(bert), "name": "n", "folder": "d"}
    whole = blimp_score(bert, data)
    scored: list[int] = []
    original = blimp.right_pairs

    def fails_after(count: int) -> Any:
        def right_pairs(*arguments: Any) -> int:
            if len(scored) == count:
                raise KeyboardInterrupt
            scored.append(1)
            return original(*arguments)

        return right_pairs

    monkeypatch.setattr(blimp, "right_pairs", fails_after(2))
    with pytest.raises(KeyboardInterrupt):
        blimp_score(bert, data, record=Record(path, model))
    ((title, (shown,)),) = score_rows([Record(path, model).content])
    assert (title, shown[-9:]) == ("BLiMP, all paradigms", " (2 of 3)"), "no score of phenomena"
    scored.clear()
    monkeypatch.setattr(blimp, "right_pairs", fails_after(1))
    assert blimp_score(bert, data, record=Record(path, model)) == whole
    assert len(scored) == 1
    rows = dict(score_rows([Record(path, model).content]))
    assert "of" not in rows["BLiMP, all paradigms"][0]
    assert len(rows) == 3
    # Measured in another way, nothing of it counts, and it replaces what is finished once it is finished itself.
    finished = Record(path, model).content["blimp"]
    scored.clear()
    monkeypatch.setattr(blimp, "right_pairs", fails_after(2))
    with pytest.raises(KeyboardInterrupt):
        blimp_score(bert, data, limit=1, record=Record(path, model))
    assert Record(path, model).content["blimp"] == finished
    monkeypatch.setattr(blimp, "right_pairs", fails_after(9))
    blimp_score(bert, data, limit=1, record=Record(path, model))
    assert len(scored) == 3
    assert Record(path, model).content["blimp"]["how"]["limit"] == 1
    assert list(Record(path, model).content) == ["model", "blimp"], "nothing is left of what is finished"
    refused("another model", Record, path, {**model, "fingerprint": "g"})


def test_records_of_eager_layers_are_those_of_compiled_ones_in_fp32_only(tmp_path, bert, monkeypatch) -> None:
    """In bf16, compiled layers round elsewhere, which changes pairs with close scores."""
    (tmp_path / "text.txt").write_text(" ".join(SENTENCES))
    data, path = write_blimp(tmp_path / "blimp"), tmp_path / "record.json"
    model = {"fingerprint": masked_model.fingerprint(bert), "name": "n", "folder": "d"}
    computed: list[ModelSettings] = []
    original = MaskedModel.__init__

    def watched(self: MaskedModel, folder: Path, settings: ModelSettings) -> None:
        computed.append(settings)
        original(self, folder, settings)

    monkeypatch.setattr(MaskedModel, "__init__", watched)

    def scores(**settings: Any) -> tuple[Any, Any]:
        given, record = ModelSettings(**settings), Record(path, model)
        how = HeldOutSettings(64)
        found = held_out_score(bert, [tmp_path / "text.txt"], how=how, settings=given, record=record)
        return found, blimp_score(bert, data, settings=given, record=record)

    def how() -> list[list[str]]:
        return [list(Record(path, model).content[part]["how"]) for part in ("held_out", "blimp")]

    eager = scores()
    as_ever = [["texts", "length", "share", "seed", "precision"], ["data", "limit", "precision"]]
    assert how() == as_ever, "else all earlier records would be measured again"
    assert scores(compile=True) == eager
    assert len(computed) == 2, "no model was needed"
    path.unlink()
    held, pairs = scores(compile=True)
    assert how() == as_ever
    assert [settings.compile for settings in computed[2:]] == [True, True]
    assert pairs == eager[1]
    assert held.nats_per_token == pytest.approx(eager[0].nats_per_token, rel=1e-5)
    computed.clear()
    scores(precision="bf16")
    assert how() == as_ever
    first = Record(path, model).content
    scores(precision="bf16", compile=True)
    assert len(computed) == 4
    assert [keys[-1] for keys in how()] == ["compile", "compile"]
    second = Record(path, model).content
    assert "BLiMP [2]: compile True" in score_notes([first, second])
    assert "BLiMP [1]: compile True" in score_notes([second, first])


def test_a_machine_that_cannot_compile_is_named(tmp_path: Path, bert: Path, monkeypatch: Any, capsys: Any) -> None:
    def failing(error: Exception) -> Callable[..., Any]:
        def fail(*arguments: Any) -> Any:
            raise error

        return lambda function, integers: torch.compile(function, backend=fail)

    monkeypatch.setattr(compiler, "compiled_function", failing(InvalidCxxCompiler()))
    command = ["evaluate-pretrained", str(bert), "--blimp", str(write_blimp(tmp_path / "blimp"))]
    assert main([*command, "--out", str(tmp_path / "out"), "--compile"]) == 3
    printed = capsys.readouterr().err
    assert "No working C++ compiler found" in printed
    assert printed.rstrip().endswith("Install them, or leave out --compile.")
    without_headers = CppCompileError(["g++"], "main.cpp:1:10: fatal error: Python.h: No such file or directory")
    monkeypatch.setattr(compiler, "compiled_function", failing(without_headers))
    assert main([*command, "--out", str(tmp_path / "out"), "--compile"]) == 3
    assert "(Python.h: not found)" in capsys.readouterr().err
    monkeypatch.setattr(compiler, "compiled_function", failing(CppCompileError(["g++"], "error: wrong code")))
    with pytest.raises(RuntimeError, match="wrong code"):  # a bug keeps its traceback
        main([*command, "--out", str(tmp_path / "out"), "--compile"])


def test_a_model_that_changes_meanwhile_is_refused(tmp_path: Path, bert: Path) -> None:
    """Such as a run that saves another checkpoint."""
    folder = Path(shutil.copytree(bert, tmp_path / "run"))
    (tmp_path / "text.txt").write_text(" ".join(SENTENCES))
    record = Record(tmp_path / "record.json", {"fingerprint": masked_model.fingerprint(folder), "name": "n"})
    with_weights(folder, -1)
    changed, text = "its weights have changed since the evaluation began", [tmp_path / "text.txt"]
    refused(changed, held_out_score, folder, text, record=record)
    refused(changed, blimp_score, folder, write_blimp(tmp_path / "blimp"), record=record)
    assert not record.path.exists()


def test_a_sentence_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 9 tokens, but the model has 8 positions"):
        pseudo_log_likelihoods(MaskedModel(make_masked_lm(tmp_path, positions=8)), ["a film or a book or it"])


# ---- held-out text


def characters_of(tokenizer: Tokenizer, document: str) -> list[int]:
    return held_out.tokens_of(tokenizer, document)[1].tolist()


def test_every_character_belongs_to_one_token(bert: Path) -> None:
    words = MaskedModel(bert).tokenizer
    # the | film | was | n ##o ##v ##e ##l | . ; the blank before a token is its own.
    assert characters_of(words, "the film was novel.") == [3, 5, 4, 2, 1, 1, 1, 1, 1]
    assert characters_of(words, "film \x00\x00") == [7]  # what the tokenizer drops at the end
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE({one: number for number, one in enumerate(alphabet)}, []))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert sum(characters_of(bytes_, "é film")) == 6
    assert len(characters_of(bytes_, "é film")) == 7  # two bytes of one character


def test_bits_per_character_compare_vocabularies(tmp_path: Path, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that spreads its belief evenly over characters has the same bits whatever its tokens are."""
    text = tmp_path / "text.txt"
    text.write_text("the film was good and the book was very bad. " * 40)
    sizes = {word: len(word) + 1 for word in WORDS} | {".": 1}

    def predict(self: MaskedModel, sequences: Sequence[Any], advance: Any) -> masked_model.Predictions:
        tokens = [str(self.tokenizer.id_to_token(int(label))) for one in sequences for label in one.labels]
        return masked_model.Predictions(np.array([-0.5 * sizes[token] for token in tokens]), np.ones(len(tokens), bool))

    monkeypatch.setattr(MaskedModel, "predict", predict)
    score = held_out_score(bert, [text], how=HeldOutSettings(length=64))
    # "the" at the beginning has no blank before it: at most one character of all.
    assert score.bits_per_character == pytest.approx(0.5 / math.log(2), rel=0.01)


def test_held_out_loss_is_that_of_transformers(tmp_path: Path, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForMaskedLM

    (tmp_path / "a.txt").write_text(" ".join(SENTENCES) * 3)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in SENTENCES))
    paths, how = [tmp_path / "a.txt", tmp_path / "b.jsonl"], HeldOutSettings(length=16)
    ours, model = MaskedModel(bert), AutoModelForMaskedLM.from_pretrained(bert).eval()
    sequences = list(masked_sequences(ours.tokenizer, ours.special_ids, read_documents(paths), how))
    nats, hits, count = 0.0, 0, 0
    for sequence in sequences:
        ids, places, labels = sequence.masked.ids, sequence.masked.places, sequence.masked.labels
        assert len(ids) <= 16
        assert (ids[0], ids[-1]) == (SPECIALS.index("[CLS]"), SPECIALS.index("[SEP]"))
        with torch.no_grad():
            logits = model(torch.tensor([ids.tolist()])).logits[0, places]
        nats -= float(logits.log_softmax(-1)[range(len(labels)), labels].sum())
        hits, count = hits + int((logits.argmax(-1).numpy() == labels).sum()), count + len(labels)
    score = held_out_score(bert, paths, how=how)
    assert score.nats_per_token == pytest.approx(nats / count, abs=1e-4)
    assert (score.accuracy, score.predictions) == (pytest.approx(hits / count), count)
    assert score.documents == 1 + len(SENTENCES)
    assert score.bits_per_character == pytest.approx(nats / math.log(2) / sum(one.characters for one in sequences))
    monkeypatch.setattr(masked_model, "BATCH_TOKENS", 17)
    again = held_out_score(bert, paths, how=how)
    assert again.nats_per_token == pytest.approx(score.nats_per_token, abs=1e-5)
    assert again.predictions == score.predictions


def test_a_score_of_another_version_is_measured_again(tmp_path: Path, bert: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(SENTENCES))
    record = Record(tmp_path / "record.json", {"fingerprint": masked_model.fingerprint(bert), "name": "n"})
    score = held_out_score(bert, [tmp_path / "text.txt"], how=HeldOutSettings(16), record=record)
    kept = record.content["held_out"]
    for scores in ({**kept["scores"], "further": 1}, {"accuracy": 0.5}):
        record.write("held_out", kept["how"], scores)
        assert held_out_score(bert, [tmp_path / "text.txt"], how=HeldOutSettings(16), record=record) == score
    assert record.content["held_out"] == kept


def test_products_in_fp32_are_exact_after_a_training(bert: Path) -> None:
    """A training in fp32 lets the process use TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        MaskedModel(bert)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def test_masks_depend_on_document_and_seed_alone(bert: Path) -> None:
    model = MaskedModel(bert)
    document = "the film was good and the book was very bad. " * 60

    def masks(documents: Sequence[str], **settings: Any) -> list[Any]:
        how = HeldOutSettings(**settings)
        return [
            (one.masked.ids.tolist(), one.masked.places.tolist())
            for one in masked_sequences(model.tokenizer, model.special_ids, documents, how)
        ]

    alone = masks([document])
    assert masks(["it is fine", document])[1:] == alone
    assert masks([document], seed=1) != alone
    assert alone[0][1] != alone[1][1]  # sequences of a document differ
    places = [place for _, chosen in alone for place in chosen]
    sequences = list(masked_sequences(model.tokenizer, model.special_ids, [document], HeldOutSettings()))
    assert len(places) / sum(one.tokens for one in sequences) == pytest.approx(0.15, abs=0.01)
    changed = np.concatenate([one.masked.ids[one.masked.places] != one.masked.labels for one in sequences])
    masked = np.concatenate([one.masked.ids[one.masked.places] == model.mask_id for one in sequences])
    assert masked.mean() == pytest.approx(0.8, abs=0.1)
    assert 0 < (changed & ~masked).mean() < 0.25  # random tokens
    assert 0 < (~changed).mean() < 0.25


def test_texts_that_cannot_be_measured_are_refused(tmp_path: Path, bert: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    refused("has no text", read_documents, [tmp_path / "empty.txt"])
    refused("no such file", read_documents, [tmp_path / "none.txt"])
    (tmp_path / "some.txt").write_text("the film was good.")
    for length, message in ((65, r"--length: 65, but .* has 64 positions"), (2, "--length: 2 leaves no room")):
        refused(message, held_out_score, bert, [tmp_path / "some.txt"], how=HeldOutSettings(length=length))


# ---- fine-tuning


@pytest.fixture
def work(tmp_path: Path, bert: Path) -> Path:
    """A folder with a config, whose data is in data/."""
    write_reviews(tmp_path / "data")
    (tmp_path / "reviews.yaml").write_text(
        "name: reviews\nmax_length: 32\nclassification:\n  train: train.jsonl\n  dev: dev.jsonl\n"
        "training:\n  steps: 2\n  examples_per_step: 4\nengine:\n  precision: fp32\n  compile: false\n"
    )
    return tmp_path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """The trials that were run; they score 0.6, 0.7, ... or 0.5 from random."""
    handed: Trained = []

    def result(task: Any) -> float:
        config = task.training.config
        handed.append((Path(config["start_from"]).name, config["random_weights"], config["seed"]))
        return 0.5 + 0.01 * config["seed"] if config["random_weights"] else 0.6 + 0.1 * config["seed"]

    monkeypatch.setattr(
        "cluster.workers.trials.launch.run_trials", lambda target, tasks, *, poll, **_: hand_out(tasks, poll, result)
    )
    return handed


def test_random_weights_are_trained_once_for_a_shape(work: Path, bert: Path, trained: Trained) -> None:
    settings = FinetuningSettings((work / "reviews.yaml",), seeds=2, data=work / "data")
    record = Record(work / "record.json", {"fingerprint": "f", "name": "n", "folder": "d"})
    first = finetuning_scores(bert, work / "out", "first", settings, record=record)["reviews"]
    assert first == FinetuningScore("accuracy", "dev", (0.6, 0.7), (0.5, 0.51), runs=2)
    assert sorted(trained) == sorted((bert.name, random, seed) for random in (False, True) for seed in (0, 1))
    kept = json.loads((work / "record.json").read_text())["finetuning"]["scores"]["reviews"]
    assert FinetuningScore.from_data(kept) == first
    assert kept["pretrained_mean"] == pytest.approx(0.65)
    # The same shape with other weights.
    trained.clear()
    other = with_weights(make_masked_lm(work / "other"), -1)
    second = finetuning_scores(other, work / "out", "second", settings)["reviews"]
    assert second == first
    assert trained == [("other", False, 0), ("other", False, 1)]
    # Another config stands beside it in the record.
    (work / "again.yaml").write_text((work / "reviews.yaml").read_text())
    finetuning_scores(bert, work / "out", "first", replace(settings, configs=(work / "again.yaml",)), record=record)
    assert list(record.content["finetuning"]["scores"]) == ["reviews", "again"]
    # One more seed, and other data.
    trained.clear()
    more = finetuning_scores(other, work / "out", "second", replace(settings, seeds=3))["reviews"]
    assert sorted(trained) == [("other", False, 2), ("other", True, 2)]
    assert len(more.random) == 3
    trained.clear()
    write_reviews(work / "data", train=44)
    finetuning_scores(bert, work / "out", "third", settings)
    assert len(trained) == 4


def test_finished_runs_are_found_wherever_their_data_lies(work, bert, trained, monkeypatch) -> None:
    settings = FinetuningSettings((work / "reviews.yaml",), seeds=1, data=work / "data")
    first = finetuning_scores(bert, work / "out", "n", settings)
    trained.clear()
    monkeypatch.chdir(work)
    assert finetuning_scores(bert, work / "out", "n", replace(settings, data=Path("data"))) == first
    shutil.move(work / "data", work / "moved")
    assert finetuning_scores(bert, work / "out", "n", replace(settings, data=work / "moved")) == first
    assert trained == []
    other = replace(settings, data=work / "moved", overrides=("training.steps=3",))
    assert finetuning_scores(bert, work / "out", "n", other) == first, "the fake's scores depend on the seed alone"
    assert len(trained) == 2


def test_a_fingerprint_knows_what_changes_random_runs(work: Path, bert: Path) -> None:
    path = work / "reviews.yaml"

    def digest(folder: Path = bert, *overrides: str) -> str:
        places = [f"classification.{part}={work / 'data' / f'{part}.jsonl'}" for part in ("train", "dev")]
        return finetuning_runs.run_fingerprint(load_config(path, [f"start_from={folder}", *places, *overrides]))

    own = digest()
    assert digest(bert, "name=other", "seed=3", "run_dir=elsewhere") == own
    assert digest(bert, "training.learning_rate=1e-3") != own
    assert digest(bert, "max_length=16") != own
    assert digest(make_bert(work / "wide", hidden=48)) != own
    lower = make_masked_lm(work / "cased")
    (lower / "tokenizer_config.json").write_text('{"do_lower_case": false, "tokenizer_class": "BertTokenizer"}')
    assert digest(lower) != own
    assert digest(make_masked_lm(work / "same")) == own
    assert digest(with_config(bert, work / "dropout", classifier_dropout=0.9)) != own


def test_a_fingerprint_knows_how_a_checkpoint_computes(tmp_path: Path, bert: Path) -> None:
    own = masked_model.fingerprint(bert)
    assert masked_model.fingerprint(make_masked_lm(tmp_path / "same")) == own
    for name, value in {"num_attention_heads": 4, "layer_norm_eps": 1e-2, "classifier_dropout": 0.9}.items():
        assert masked_model.fingerprint(with_config(bert, tmp_path / name, **{name: value})) != own, name
    modern = make_masked_lm(tmp_path / "modern", "modernbert")
    pooled = with_config(modern, tmp_path / "mean", classifier_pooling="mean")
    assert masked_model.fingerprint(pooled) != masked_model.fingerprint(modern)


def test_scores_of_one_row_that_were_measured_differently_have_marks(work: Path, bert: Path, trained: Trained) -> None:
    settings = FinetuningSettings((work / "reviews.yaml",), seeds=1, random=False, data=work / "data")

    def measured(name: str, folder: Path = bert, **changes: Any) -> dict[str, Any]:
        record = Record(work / f"{name}.json", {"fingerprint": name, "name": name, "folder": "d"})
        finetuning_scores(folder, work / "out", name, replace(settings, **changes), record=record)
        return record.content

    first = measured("first")
    moved = Path(shutil.copytree(work / "data", work / "moved"))
    lower = make_masked_lm(work / "cased")
    (lower / "tokenizer_config.json").write_text('{"do_lower_case": false, "tokenizer_class": "BertTokenizer"}')
    same = [first, measured("elsewhere", data=moved), measured("other-tokens", lower)]
    assert score_notes(same) == []
    assert score_rows(same) == [("reviews, accuracy", ["0.6000"] * 3)]
    with (moved / "dev.jsonl").open("a") as file:
        file.write('{"text": "the film was good", "label": "positive"}\n')
    other_data = measured("other-data", data=moved)
    assert score_rows([*same, other_data])[0][1] == [*["0.6000 [1]"] * 3, "0.6000 [2]"]
    assert [note[:18] for note in score_notes([first, other_data])] == [f"reviews [{n}]: data " for n in "12"]
    (work / "reviews.yaml").write_text((work / "reviews.yaml").read_text().replace("steps: 2", "steps: 3"))
    assert ["config" in note for note in score_notes([first, measured("other-config")])] == [True, True]
    assert score_notes([measured("set", overrides=("training.steps=2",)), first]) != []
    before = json.loads(json.dumps(first))  # of an older version
    for key in ("config", "data"):
        del before["finetuning"]["scores"]["reviews"][key]
    assert "config unknown, data unknown" in score_notes([first, before])[1]


def test_differences_are_in_standard_errors() -> None:
    score = FinetuningScore("f1", "dev", (0.8, 0.9, 0.7), (0.5, 0.5, 0.8))
    # Deviations 0.1 and 0.1732; errors 0.0577 and 0.1.
    assert score.difference == pytest.approx(0.2)
    assert score.difference_in_errors == pytest.approx(0.2 / math.hypot(0.1 / 3**0.5, 0.1))
    assert FinetuningScore("f1", "dev", (0.8,), (0.5,)).difference_in_errors is None
    assert FinetuningScore("f1", "dev", (0.8, 0.8), (0.5, 0.5)).difference_in_errors is None
    assert FinetuningScore("f1", "dev", (0.8, 0.9)).difference is None


def test_a_score_below_0_has_no_bar() -> None:
    score = FinetuningScore("matthews", "dev", (0.2, 0.3), (-0.1, -0.05))
    model = {"model": {"name": "one"}, "finetuning": {"how": {}, "scores": {"cola": score.as_data()}}}
    (chart,) = finetuning_charts([model])
    assert "-0.075" in chart
    assert 'width="0.0"' in chart
    assert 'width="-' not in chart
    assert score_rows([model])[2] == ("  difference", ["+0.3250 (+5.8 SE)"])
    alone = FinetuningScore("matthews", "dev", (0.2, 0.3), ()).as_data()
    other = {"model": {"name": "two"}, "finetuning": {"how": {}, "scores": {"cola": alone}}}
    assert score_rows([model, other])[1] == ("  from random weights", ["-0.0750 ± 0.0250", "–"])


def test_two_configs_of_one_name_are_refused(work: Path, bert: Path) -> None:
    (work / "again").mkdir()
    (work / "again" / "reviews.yaml").write_text((work / "reviews.yaml").read_text())
    settings = FinetuningSettings((work / "reviews.yaml", work / "again" / "reviews.yaml"), data=work / "data")
    refused("another config is called reviews", finetuning_scores, bert, work / "out", "n", settings)


def test_a_config_without_a_dev_set_is_refused_before_all_else(work, bert, trained, capsys) -> None:
    (work / "reviews.yaml").write_text((work / "reviews.yaml").read_text().replace("  dev: dev.jsonl\n", ""))
    words = ["--blimp", str(write_blimp(work / "blimp")), "--finetune", str(work / "reviews.yaml")]
    words += ["--data", str(work / "data"), "--out", str(work / "out")]
    assert main(["evaluate-pretrained", str(bert), *words]) == 2
    assert "--finetune: reviews: no dev set, so there is no score." in capsys.readouterr().err
    assert (trained, (work / "out").exists()) == ([], False)


def test_a_run_that_is_training_is_not_fine_tuned(work: Path, trained: Trained) -> None:
    """Each fine-tuning would begin from another checkpoint."""
    run = work / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("name: run\n")
    with only_run(run), pytest.raises(InputError, match="this run is training"):
        finetuning_scores(run, work / "out", "n", FinetuningSettings((work / "reviews.yaml",), data=work / "data"))
    assert trained == []
    with only_run(run):
        assert finetuning_runs.read_plans(run, FinetuningSettings(())) == {}, "its text may be scored meanwhile"


# ---- the command


def test_the_command_puts_models_side_by_side(work: Path, bert: Path, trained: Trained, capsys: Any) -> None:
    (work / "text.txt").write_text(" ".join(SENTENCES))
    data, out = write_blimp(work / "blimp"), work / "out"
    common = ["evaluate-pretrained", str(bert), "--out", str(out)]
    tune = ["--finetune", str(work / "reviews.yaml"), "--data", str(work / "data"), "--seeds", "2"]
    both = ["--blimp", str(data)]
    assert main([*common, "--name", "one", "--texts", str(work / "text.txt"), "--length", "64", *both, *tune]) == 0
    printed = capsys.readouterr().out
    assert "held-out text, bits per character" in printed
    assert "reviews, accuracy" in printed
    assert "0.6500 ± 0.0500" in printed
    assert main([*common, "--name", "two", *both, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    one, two = json.loads((out / "scores.json").read_text())["models"]
    assert two == shown
    assert one["blimp"]["scores"] == two["blimp"]["scores"]
    assert "finetuning" not in two
    rows = dict(score_rows([one, two]))
    assert rows["  from random weights"] == ["0.5050 ± 0.0050", "–"]
    assert rows["BLiMP, all paradigms"][0] == rows["BLiMP, all paradigms"][1]
    page = (out / "scores.html").read_text()
    assert "one, random weights" in page
    assert page.count("chance") == 2
    # Both models have the same bars, and 1.0 is the whole width whatever the highest accuracy is.
    overall = one["blimp"]["scores"]["overall"]
    assert page.count(f'width="{round(6 + overall * 388, 1) - 6:.1f}"') >= 2
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_model_without_a_masked_head_is_only_fine_tuned(work: Path, trained: Trained, capsys: Any) -> None:
    folder, data = make_bert(work / "sentence-encoder"), write_blimp(work / "blimp")
    command = ["evaluate-pretrained", str(folder), "--out", str(work / "out"), "--blimp", str(data)]
    assert main(command) == 2
    assert "has no head for masked language modeling" in capsys.readouterr().err
    tune = ["--finetune", str(work / "reviews.yaml"), "--data", str(work / "data"), "--seeds", "1", "--no-random"]
    assert main([*command, *tune]) == 0
    result = capsys.readouterr()
    assert [line[:17] for line in result.err.splitlines() if "skipped" in line] == ["skipped: --blimp:"]
    assert "reviews, accuracy" in result.out
    assert [random for _, random, _ in trained] == [False]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to measure"),
        (["--texts", "a", "--data", "d"], "--data: has no effect without --finetune"),
        (["--texts", "a", "--seeds", "5"], "--seeds: has no effect without --finetune"),
        (["--texts", "a", "--grid-set", "training.epochs=1,2"], "--grid-set: has no effect without --finetune"),
        (["--texts", "a", "--blimp-limit", "3"], "--blimp-limit: has no effect without --blimp"),
        (["--finetune", "a", "--precision", "bf16"], "--precision: has no effect without --texts or --blimp"),
        (["--finetune", "a", "--compile"], "--compile: has no effect without --texts or --blimp"),
        (["--texts", ".", "--name", "a/b"], "--name: 'a/b' cannot name"),
        (["--texts", ".", "--out", "run"], "--out: run is the folder of a run"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, words, message, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run", "config.yaml").touch()
    assert main(["evaluate-pretrained", str(tmp_path), "--out", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_failed_run_leaves_all_other_scores(work: Path, bert: Path, monkeypatch: Any, capsys: Any) -> None:
    failing = MagicMock(side_effect=MachineError("2 of 4 runs failed"))
    monkeypatch.setattr("finetune.scores.command.finetuning_scores", failing)
    words = ["--blimp", str(write_blimp(work / "blimp")), "--finetune", str(work / "reviews.yaml")]
    words += ["--data", str(work / "data")]
    assert main(["evaluate-pretrained", str(bert), "--out", str(work / "out"), "--name", "one", *words]) == 3
    assert "BLiMP, all paradigms" in capsys.readouterr().out
    assert (work / "out" / "scores.html").is_file()


def test_transfer_configs_are_valid(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "configs" / "finetune" / "transfer"
    configs = finetuning_runs.read_configs(tmp_path, FinetuningSettings(tuple(folder.glob("*.yaml")), data=tmp_path))
    assert sorted(configs) == ["cola", "mrpc", "rte", "sst2", "sst2-2000", "stsb", "wnut17"]
    assert {config.max_length <= 128 for config in configs.values()} == {True}
    sections = [config.task_settings for config in configs.values()]
    places = [getattr(one, name, "") for one in sections for name in ("glue_dir", "train", "dev")]
    assert all(place.startswith(str(tmp_path)) for place in places if place)
    as_written = finetuning_runs.read_configs(tmp_path, FinetuningSettings((folder / "sst2.yaml",)))["sst2"]
    assert not any(str(tmp_path) in getattr(as_written.task_settings, name, "") for name in ("train", "dev"))
