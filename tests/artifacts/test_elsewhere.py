"""Exports as other libraries read them without a flag: heads x families, beside what we compute ourselves."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import add_sentence_files, make_bert
from torch import Tensor

import finetune
from finetune.artifacts.padded import PaddedModel
from pretrain.checkpoint.layouts.pooled import MODELING_FILE
from pretrain.checkpoint.released import read_released
from tests import parity
from tests.artifacts.untrained import save_untrained

transformers: Any = pytest.importorskip("transformers")

FAMILIES = ("BERT", "RoBERTa", "XLM-R", "DistilBERT", "ELECTRA", "ModernBERT", "EuroBERT, all key heads")
FAMILIES += ("Nomic BERT", "DeBERTa-v3", "GTE")
POOLS = ("ModernBERT", "EuroBERT, all key heads")  # in transformers' own class
NO_QUESTIONS = ("EuroBERT, all key heads", "Nomic BERT", "GTE")  # transformers has no such class
TEXTS = ["the film was unfilmable, not good", "a plot"]
ROWS = {
    "classes": [{"text": text, "label": label} for text, label in zip([*TEXTS, "it"], ["x", "y", "z"], strict=True)],
    "labels": [{"text": TEXTS[0], "label": ["x", "y"]}, {"text": TEXTS[1], "label": ["y"]}],
    "value": [{"text": text, "label": value} for text, value in zip(TEXTS, [0.5, 2.5], strict=True)],
    "entities": [{"tokens": TEXTS[0].split(), "tags": ["O", "B-X", "I-X", "B-Y", "O", "O"]}],
    "questions": [
        {"id": "1", "question": "what", "context": TEXTS[0], "answers": {"text": ["film"], "answer_start": [4]}}
    ],
}
KINDS = {"entities": "tokens", "questions": "spans"}
CLASSES = {"sequence": "SequenceClassification", "tokens": "TokenClassification", "spans": "QuestionAnswering"}
# (family, head, how the start pools); every head of a pooled encoder, and a classifier of the first token.
CASES = [(family, head, "mean") for family in FAMILIES for head in ROWS]
CASES += [(family, "classes", "max") for family in ("BERT", "RoBERTa", "DistilBERT", "DeBERTa-v3", "GTE")]
CASES += [(family, "classes", "cls") for family in FAMILIES] + [("BERT", head, "") for head in ROWS]
Make = Callable[[str, str, str], Path]


def make_start(folder: Path, family: str, pooling: str) -> Path:
    """A released encoder of the family as sentence-transformers 6 or, if it reads the first token, 5 saves it."""
    parity.make_theirs("AutoModel", family, parity.ONNX_SHAPE).save_pretrained(make_bert(folder))
    if pooling == "mean":
        add_sentence_files(folder, {"embedding_dimension": 16, "pooling_mode": "mean"}, "Normalize")
    elif pooling:
        add_sentence_files(
            folder, {"word_embedding_dimension": 16, f"pooling_mode_{pooling}_token{'s' * (pooling == 'max')}": True}
        )
    return folder


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The folder of a fine-tuned model whose head nobody trained."""

    @functools.cache
    def start(family: str, pooling: str) -> Path:
        return make_start(tmp_path_factory.mktemp("start") / "bert", family, pooling).parent

    @functools.cache
    def made(family: str, head: str, pooling: str) -> Path:
        folder = start(family, pooling)
        (folder / f"{head}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[head]))
        kind = {"labels": "multi_label", "value": "regression"}.get(head, "single_label")
        section = {"train": str(folder / f"{head}.jsonl")}
        if head in ("entities", "questions"):
            return save_untrained(folder, head, {head: section}) / "model"
        return save_untrained(folder, head, {"classification": {**section, "problem_type": kind}}) / "model"

    return made


def place_of(folder: Path) -> Path:
    """Where the encoder lies that transformers loads without a flag."""
    return folder / "encoder" if (folder / MODELING_FILE).is_file() else folder


def inputs_of(folder: Path, *second: list[str]) -> dict[str, Tensor]:
    return transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, *second, padding=True, return_tensors="pt")


def ours(folder: Path, head: str, *second: list[str]) -> tuple[Tensor, list[Tensor]]:
    """[B, L, H] of the encoder, and the logits, of `TEXTS`, or of pairs of them."""
    model, inputs = PaddedModel(read_released(folder), KINDS.get(head, "sequence")).eval(), inputs_of(folder, *second)
    named = [inputs.get(name, torch.zeros_like(inputs["input_ids"])) for name in model.inputs]
    with torch.no_grad():
        return model.encode(*named, *([None] * (3 - len(named)))), list(model(*named))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "head", "pooling"), CASES)
def test_transformers_computes_our_vectors_and_logits(make: Make, family: str, head: str, pooling: str) -> None:
    folder = make(family, head, pooling)
    place, inputs, (hidden, logits) = place_of(folder), inputs_of(folder), ours(folder, head)
    real = inputs["attention_mask"].bool()
    wrapped = pooling in ("mean", "max") and head in ("classes", "labels", "value") and family not in POOLS
    assert wrapped == (place != folder)
    with torch.no_grad():
        theirs = transformers.AutoModel.from_pretrained(place).eval()(**inputs)[0]
    close(theirs[real], hidden[real])
    kind = getattr(transformers, f"AutoModelFor{CLASSES[KINDS.get(head, 'sequence')]}")
    if wrapped:
        for load in (transformers.AutoModel, kind):
            with pytest.raises(ValueError, match="custom code"):
                load.from_pretrained(folder)
    if head == "questions" and family in NO_QUESTIONS:
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            kind.from_pretrained(folder)
        return
    model = kind.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        output = model(**inputs)
        embedded = model(
            inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]),
            **{k: v for k, v in inputs.items() if k != "input_ids"},
            output_hidden_states=True,
        )
    for found in (output, embedded):
        got = [found.start_logits, found.end_logits] if head == "questions" else [found.logits]
        for one, expected in zip(got, logits, strict=True):
            close(
                one if one.ndim == 2 and head not in KINDS else one[real],
                expected if head not in KINDS else expected[real],
            )
    assert len(embedded.hidden_states) == 3


@pytest.mark.parametrize(("family", "head", "pooling"), CASES)
def test_a_pipeline_raises_or_gives_our_numbers(make: Make, family: str, head: str, pooling: str) -> None:
    folder = make(family, head, pooling)
    task = {"entities": "token-classification", "questions": "question-answering"}.get(head, "text-classification")
    if place_of(folder) != folder or head == "questions":
        with pytest.raises((ValueError, KeyError), match=r"custom code|question-answering"):
            transformers.pipeline(task, model=str(folder))
        if head == "questions":
            return
    run = transformers.pipeline(task, model=str(folder), trust_remote_code=place_of(folder) != folder)
    if head == "entities":
        (_, (logits,)), inputs = ours(folder, head), transformers.AutoTokenizer.from_pretrained(folder)(TEXTS[0])
        scores, names = logits[0].softmax(-1), run.model.config.id2label
        expected = [names[int(row.argmax())] for row in scores[: len(inputs["input_ids"])]][1:-1]
        found = run(TEXTS[0], ignore_labels=[])
        assert [one["entity"] for one in found] == expected
        close([float(one["score"]) for one in found], scores.amax(1)[1 : len(expected) + 1].tolist())
        ends = {0, *(n for n, letter in enumerate(TEXTS[0]) if letter in " ,"), TEXTS[0].index(",") + 1, len(TEXTS[0])}
        first = run(TEXTS[0], aggregation_strategy="first", ignore_labels=[])
        assert {end for one in first for end in (one["start"] - (one["start"] - 1 in ends), one["end"])} <= ends
        return
    for text in TEXTS:
        found, made = run(text, top_k=None), finetune.load(folder)(text)
        if head == "value":
            close([one["score"] for one in found], [made["value"]])
        else:
            close({one["label"]: one["score"] for one in found}, made["scores"])


@pytest.mark.parametrize(
    ("head", "pooling"), [(head, pooling) for head in ("classes", "labels", "value") for pooling in ("mean", "")]
)
def test_a_cross_encoder_is_told_its_activation(make: Make, head: str, pooling: str) -> None:
    folder = make("BERT", head, pooling)
    name = json.loads((folder / "config.json").read_text())["sentence_transformers"]["activation_fn"]
    module, _, kind = name.rpartition(".")
    activation = getattr(import_module(module), kind)()

    def scores(*second: list[str]) -> Tensor:
        made = activation(ours(folder, head, *second)[1][0])
        return made.softmax(1) if head == "classes" else made  # an option of `predict`

    made = finetune.load(folder)(TEXTS)
    close(scores().tolist(), [[one["value"]] if head == "value" else list(one["scores"].values()) for one in made])
    cross = pytest.importorskip("sentence_transformers").CrossEncoder(str(folder), trust_remote_code=bool(pooling))
    found = cross.predict(list(zip(TEXTS, TEXTS, strict=True)), apply_softmax=head == "classes")
    close(torch.as_tensor(found).reshape(2, -1), scores(TEXTS))


FILES = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")


@pytest.mark.parametrize(("family", "head", "pooling"), [case for case in CASES if case[2]])
def test_the_files_of_sentence_transformers_lie_beside_the_encoder(
    make: Make, family: str, head: str, pooling: str
) -> None:
    place = place_of(make(family, head, pooling))
    modules, pools, longest, prompts = (json.loads((place / name).read_text()) for name in FILES)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if pooling == "mean" else [])]
    assert [one["type"] for one in modules] == [f"sentence_transformers.models.{kind}" for kind in kinds]
    assert [one["path"] for one in modules] == ["", "1_Pooling", "2_Normalize"][: len(kinds)]
    assert pools["pooling_mode_cls_token"] == (pooling == "cls")
    assert pools["pooling_mode_mean_tokens"] == (pooling == "mean")
    assert (pools["pooling_mode_lasttoken"], pools["word_embedding_dimension"]) == (False, 16)
    assert (longest, prompts) == ({"max_seq_length": 32, "do_lower_case": False}, {"prompts": {"query": "the "}})


@pytest.mark.parametrize(("family", "head", "pooling"), [case for case in CASES if case[2]])
def test_sentence_transformers_setfit_and_peft(
    make: Make, family: str, head: str, pooling: str, tmp_path: Path
) -> None:
    library = pytest.importorskip("sentence_transformers")
    peft, setfit = pytest.importorskip("peft"), pytest.importorskip("setfit")
    folder = make(family, head, pooling)
    place, real = place_of(folder), inputs_of(folder)["attention_mask"].bool()
    hidden, logits = ours(folder, head)
    vectors = hidden[:, 0] if pooling == "cls" else hidden.masked_fill(~real[..., None], -9e9).amax(1)
    if pooling == "mean":
        vectors = torch.nn.functional.normalize((hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True))
    close(library.SentenceTransformer(str(place)).encode(TEXTS, convert_to_tensor=True).cpu(), vectors)
    few = setfit.SetFitModel.from_pretrained(str(place))
    close(torch.as_tensor(few.encode(TEXTS, show_progress_bar=False)), vectors)
    config = peft.LoraConfig(task_type="FEATURE_EXTRACTION", target_modules="all-linear", init_lora_weights=False)
    lora = peft.get_peft_model(transformers.AutoModel.from_pretrained(place), config).eval()
    lora.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(transformers.AutoModel.from_pretrained(place), tmp_path).eval()
    with torch.no_grad(), again.disable_adapter():
        close(again(**inputs_of(folder))[0][real], hidden[real])
    close(again(**inputs_of(folder))[0], lora(**inputs_of(folder))[0])
    if head in KINDS:
        return
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, trust_remote_code=True)
    names = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and ".layer" in name]
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=names)).eval()
    close(model(**inputs_of(folder), labels=None).logits, logits[0])
