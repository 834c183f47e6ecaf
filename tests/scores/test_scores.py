"""`evaluate-pretrained`: held-out text and BLiMP of a checkpoint, and what is kept of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from finetune.cli import main
from finetune.scores import blimp, held_out, masked_model
from finetune.scores.blimp import BlimpScore, ParadigmScore, blimp_score, pseudo_log_likelihoods, read_blimp
from finetune.scores.held_out import HeldOutSettings, masked_sequences, read_documents, score_held_out
from finetune.scores.masked_model import MaskedModel
from finetune.scores.record import check_model, read_models, write_scores
from finetune.scores.view import score_rows
from pretrain.checkpoint.released import read_released
from pretrain.common.errors import InputError
from tests.tasks.refusals import refused
from tests.tiny_checkpoints import SPECIALS, WORDS, make_bert

SENTENCES = ["the film was good.", "a book is very very bad, and the plot was not great.", "it is fine"]
SENTENCES += ["the end", "a film or a book", "The FILM was good."]


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


# ---- BLiMP


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_pseudo_log_likelihoods_are_those_of_a_loop_over_transformers(tmp_path, kind, monkeypatch) -> None:
    folder = make_masked_lm(tmp_path, kind)
    expected = [naive(folder, sentence) for sentence in SENTENCES]
    assert max(expected) - min(expected) > 1
    model = MaskedModel(folder)
    together = pseudo_log_likelihoods(model, SENTENCES)
    np.testing.assert_allclose(together, expected, atol=1e-4)
    # Whatever shares a forward pass.
    monkeypatch.setattr(masked_model, "BATCH_TOKENS", 20)
    monkeypatch.setattr(blimp, "MAX_TOKENS", 30)
    counted: list[int] = []
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
    before = read_blimp(data)
    score = blimp_score(MaskedModel(bert), before)
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


def test_a_sentence_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 9 tokens, but the model has 8 positions"):
        pseudo_log_likelihoods(MaskedModel(make_masked_lm(tmp_path, positions=8)), ["a film or a book or it"])


def pair(**changes: Any) -> bytes:
    row = {"sentence_good": "a", "sentence_bad": "b", "UID": "one", "linguistics_term": "t", **changes}
    return json.dumps(row).encode() + b"\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([pair()[:-2] + b', "x": "\xe9"}\n'], "line 1 is not a BLiMP pair .UnicodeDecodeError"),
        ([pair() + pair(sentence_good=None)], "line 2 is not a BLiMP pair .*a value is not text"),
        ([pair() + pair(UID="two")], r"line 2 has another UID or term\. Give one file for each UID"),
        ([pair() + pair(linguistics_term="u")], "line 2 has another UID or term"),
        ([pair(), pair()], r"1\.jsonl: another file has the same UID .one."),
        ([], r"no \.jsonl file"),
        ([b""], "has no pair"),
        ([b'{"sentence_good": "a"}\n'], "line 1 is not a BLiMP pair"),
        ([b"[1\n"], "line 1 is not a BLiMP pair"),
    ],
)
def test_damaged_blimp_is_refused(tmp_path: Path, files: list[bytes], message: str) -> None:
    for number, content in enumerate(files):
        (tmp_path / f"{number}.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_blimp(tmp_path, 1)  # whatever the limit is


# ---- held-out text


def characters_of(tokenizer: Tokenizer, document: str) -> list[int]:
    return held_out.encode_document(tokenizer, document)[1].tolist()


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
    score = score_held_out(MaskedModel(bert), read_documents([text]), HeldOutSettings(length=64))
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
        ids, places, labels = sequence.masked.ids, sequence.masked.masked_positions, sequence.masked.labels
        assert len(ids) <= 16
        assert (ids[0], ids[-1]) == (SPECIALS.index("[CLS]"), SPECIALS.index("[SEP]"))
        with torch.no_grad():
            logits = model(torch.tensor([ids.tolist()])).logits[0, places]
        nats -= float(logits.log_softmax(-1)[range(len(labels)), labels].sum())
        hits, count = hits + int((logits.argmax(-1).numpy() == labels).sum()), count + len(labels)
    score = score_held_out(ours, read_documents(paths), how)
    assert score.nats_per_token == pytest.approx(nats / count, abs=1e-4)
    assert (score.accuracy, score.predictions) == (pytest.approx(hits / count), count)
    assert score.documents == 1 + len(SENTENCES)
    assert score.bits_per_character == pytest.approx(nats / math.log(2) / sum(one.characters for one in sequences))
    monkeypatch.setattr(masked_model, "BATCH_TOKENS", 17)
    again = score_held_out(ours, read_documents(paths), how)
    assert again.nats_per_token == pytest.approx(score.nats_per_token, abs=1e-5)
    assert again.predictions == score.predictions


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
            (one.masked.ids.tolist(), one.masked.masked_positions.tolist())
            for one in masked_sequences(model.tokenizer, model.special_ids, documents, how)
        ]

    alone = masks([document])
    assert masks(["it is fine", document])[1:] == alone
    assert masks([document], seed=1) != alone
    assert alone[0][1] != alone[1][1]  # sequences of a document differ
    places = [place for _, chosen in alone for place in chosen]
    sequences = list(masked_sequences(model.tokenizer, model.special_ids, [document], HeldOutSettings()))
    assert len(places) / sum(one.tokens for one in sequences) == pytest.approx(0.15, abs=0.01)
    changed = np.concatenate([one.masked.ids[one.masked.masked_positions] != one.masked.labels for one in sequences])
    masked = np.concatenate([one.masked.ids[one.masked.masked_positions] == model.mask_id for one in sequences])
    assert masked.mean() == pytest.approx(0.8, abs=0.1)
    assert 0 < (changed & ~masked).mean() < 0.25  # random tokens
    assert 0 < (~changed).mean() < 0.25


def test_texts_that_cannot_be_measured_are_refused(tmp_path: Path, bert: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    refused("has no text", read_documents, [tmp_path / "empty.txt"])
    refused("no such file", read_documents, [tmp_path / "none.txt"])
    for length, message in ((65, "--length: 65, but the model has 64 positions"), (2, "--length: 2 leaves no room")):
        refused(message, score_held_out, MaskedModel(bert), ["the film was good."], HeldOutSettings(length=length))


# ---- the model


CLS, SEP, MASK = (SPECIALS.index(name) for name in ("[CLS]", "[SEP]", "[MASK]"))


def with_tokenizer(bert: Path, folder: Path, replaced: Sequence[tuple[str, str]] = (), **changes: Any) -> Path:
    """A copy of the model whose tokenizer.json has other values and names."""
    shutil.copytree(bert, folder)
    content = {**json.loads(MaskedModel(bert).tokenizer.to_str()), **changes}
    text = json.dumps(content, ensure_ascii=False)
    for before, after in replaced:
        text = text.replace(before, after)
    (folder / "tokenizer.json").write_text(text)
    (folder / "vocab.txt").unlink()
    return folder


def test_special_tokens_in_a_text_are_ordinary_characters(bert: Path) -> None:
    model = MaskedModel(bert)
    text = "the [MASK] film [SEP] [CLS]"
    ids, ordinary = model.encode(text)
    (sequence,) = masked_sequences(model.tokenizer, model.special_ids, [text], HeldOutSettings(share=0.01))
    for found in (ids.tolist(), [*sequence.masked.ids]):
        assert [found.count(number) for number in (CLS, SEP)] == [1, 1]
    assert MASK not in ids
    assert ordinary.tolist() == [False, *[True] * (len(ids) - 2), False]


def test_a_tokenizer_without_a_template_is_framed_as_in_pretraining(tmp_path: Path, bert: Path) -> None:
    plain, model = MaskedModel(with_tokenizer(bert, tmp_path / "plain", post_processor=None)), MaskedModel(bert)
    assert plain.encode("the film")[0].tolist() == model.encode("the film")[0].tolist()
    for one in (plain, model):
        (sequence,) = masked_sequences(one.tokenizer, one.special_ids, ["the film was good"], HeldOutSettings())
        assert (sequence.masked.ids[0], sequence.masked.ids[-1], sequence.tokens) == (CLS, SEP, 4)


def test_the_mask_is_found_by_its_role(tmp_path: Path, bert: Path) -> None:
    renamed = with_tokenizer(bert, tmp_path / "renamed", [("[MASK]", "[BLANK]")])
    refused("its tokenizer has no mask token", MaskedModel, renamed)
    (renamed / "tokenizer_config.json").write_text('{"mask_token": "[BLANK]"}')
    assert MaskedModel(renamed).mask_id == MASK


def test_a_fingerprint_knows_how_a_checkpoint_computes(tmp_path: Path, bert: Path) -> None:
    def digest(folder: Path) -> str:
        return masked_model.fingerprint(folder, read_released(folder))

    own = digest(bert)
    assert digest(make_masked_lm(tmp_path / "same")) == own
    for name, value in {"num_attention_heads": 4, "layer_norm_eps": 1e-2, "classifier_dropout": 0.9}.items():
        assert digest(with_config(bert, tmp_path / name, **{name: value})) != own, name
    modern = make_masked_lm(tmp_path / "modern", "modernbert")
    assert digest(with_config(modern, tmp_path / "mean", classifier_pooling="mean")) != digest(modern)


# ---- the command


def test_the_command_puts_models_side_by_side(tmp_path: Path, bert: Path, capsys: Any) -> None:
    (tmp_path / "text.txt").write_text(" ".join(SENTENCES))
    data, out = write_blimp(tmp_path / "blimp"), tmp_path / "out"
    common = ["evaluate-pretrained", str(bert), "--out", str(out)]
    held_out = ["--texts", str(tmp_path / "text.txt"), "--text-scores", "held_out"]
    assert main([*common, "--name", "one", "--blimp", str(data)]) == 0
    assert main([*common, "--name", "one", *held_out]) == 0, "what was measured before stays"
    printed = capsys.readouterr().out
    assert "held-out text, bits per character" in printed
    assert "BLiMP, all paradigms" in printed
    assert main([*common, "--name", "two", "--blimp", str(data)]) == 0
    one, two = json.loads((out / "scores.json").read_text())["models"]
    assert one["held_out"]["how"]["length"] == 64, "of a model with fewer positions than 128"
    assert one["blimp"] == two["blimp"]
    rows = dict(score_rows([one, two]))
    assert rows["held-out text, accuracy"] == [f"{one['held_out']['scores']['accuracy']:.4f}", "–"]
    assert rows["BLiMP, all paradigms"][0] == rows["BLiMP, all paradigms"][1]
    page = (out / "scores.html").read_text()
    assert page.count(f'<td class="figure">{one["blimp"]["scores"]["overall"]:.4f}</td>') >= 2
    assert f"unknown {one['held_out']['scores']['unknown']:.4g}" in page
    assert "http" not in page


def test_what_was_measured_differently_has_separate_rows(tmp_path: Path, bert: Path) -> None:
    data, out = write_blimp(tmp_path / "blimp"), tmp_path / "out"
    common = ["evaluate-pretrained", str(bert), "--blimp", str(data), "--out", str(out)]
    for name, options in {"a": [], "b": [], "c": ["--precision", "bf16"], "d": ["--blimp-limit", "1"]}.items():
        assert main([*common, "--name", name, *options]) == 0
    rows = [values for title, values in score_rows(read_models(out)) if title == "BLiMP, all paradigms"]
    assert [[value != "–" for value in values] for values in rows] == [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert rows[0][0] == rows[0][1]


def test_scores_are_one_model_s_whoever_writes_them(tmp_path: Path) -> None:
    """Two processes write scores of one model; those of other weights under its name are refused, and damaged files."""
    model = {"name": "n", "folder": "d", "fingerprint": "f"}
    write_scores(tmp_path, model, {"blimp": {"scores": {"overall": 1.0}}})
    write_scores(tmp_path, {**model, "name": "m"}, {"blimp": {"scores": {"overall": 0.5}}})
    found = write_scores(tmp_path, model, {"held_out": {"scores": {"accuracy": 0.5}}})
    assert found == read_models(tmp_path)
    assert [one["model"]["name"] for one in found] == ["m", "n"]
    assert found[1].keys() == {"model", "blimp", "held_out"}
    refused(
        r"another model named n, or an .*\(evaluated from d\)\. Choose",
        check_model,
        tmp_path,
        {**model, "fingerprint": "g"},
    )
    refused("another model named n", write_scores, tmp_path, {**model, "fingerprint": "g"}, {})
    for content in ("{", "[]", '{"scores": {}}', '{"models": [{"held_out": {}}]}'):
        (tmp_path / "scores.json").write_text(content)
        refused("scores.json: damaged", read_models, tmp_path)


def test_a_model_without_a_masked_head_is_refused(tmp_path: Path, capsys: Any) -> None:
    folder, data = make_bert(tmp_path / "sentence-encoder"), write_blimp(tmp_path / "blimp")
    assert main(["evaluate-pretrained", str(folder), "--out", str(tmp_path / "out"), "--blimp", str(data)]) == 2
    assert "has no head for masked language modeling" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to score"),
        (["--texts", "a"], "--texts: a does not exist"),
        (["--texts", ".", "--blimp", "a"], "--blimp: a does not exist"),
        (["--texts", "a", "--blimp-limit", "3"], "--blimp-limit: has no effect without --blimp"),
        (["--blimp", ".", "--length", "3"], "--length: has no effect without --texts"),
        (["--blimp", ".", "--text-scores", "held_out"], "--text-scores: has no effect without --texts"),
        (["--blimp", ".", "--pid", "3"], "--pid: has no effect without --follow"),
        (["--texts", ".", "--out", "run"], "--out: run is a run folder"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, words, message, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run", "config.yaml").touch()
    assert main(["evaluate-pretrained", str(tmp_path), "--out", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
