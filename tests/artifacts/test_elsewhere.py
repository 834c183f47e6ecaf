"""Exports as other libraries read them without a flag: heads x families, beside what we compute ourselves."""

from __future__ import annotations

import functools
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tiny_checkpoints import add_sentence_files, make_bert
from torch import Tensor

import finetune
from finetune.artifacts.padded import PaddedModel
from finetune.tasks.base import Head
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
KINDS: dict[str, Head] = {"entities": "tokens", "questions": "spans"}
CLASSES = {"entities": "TokenClassification", "questions": "QuestionAnswering"}
PIPELINES = {"entities": "token-classification", "questions": "question-answering"}
FLAGS = {"cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens", "mean": "pooling_mode_mean_tokens"}
# Family, head, how the start pools: every head of a pooled encoder, and classifiers of others.
CASES = [(family, head, "mean") for family in FAMILIES for head in ROWS]
CASES += [(family, "classes", "max") for family in ("BERT", "RoBERTa", "DistilBERT", "DeBERTa-v3", "GTE")]
CASES += [(family, "classes", "cls") for family in FAMILIES] + [("BERT", head, "") for head in ROWS]


class Case(NamedTuple):
    """A fine-tuned model whose head nobody trained, and where the encoder lies that needs no flag."""

    family: str
    head: str
    pooling: str
    folder: Path

    @property
    def place(self) -> Path:
        return self.folder / "encoder" if (self.folder / MODELING_FILE).is_file() else self.folder

    def inputs(self, *second: list[str]) -> Any:
        return transformers.AutoTokenizer.from_pretrained(self.folder)(
            TEXTS, *second, padding=True, return_tensors="pt"
        )

    def ours(self, *second: list[str]) -> tuple[Tensor, list[Tensor]]:
        """[B, L, H] of the encoder, and the logits, of `TEXTS` or of pairs of them."""
        model, inputs = (
            PaddedModel(read_released(self.folder), KINDS.get(self.head, "sequence")).eval(),
            self.inputs(*second),
        )
        named = [inputs.get(name, torch.zeros_like(inputs["input_ids"])) for name in model.inputs]
        with torch.no_grad():
            return model.encode(*named, *([None] * (3 - len(named)))), list(model(*named))

    def theirs(self) -> Any:
        kind = getattr(transformers, f"AutoModelFor{CLASSES.get(self.head, 'SequenceClassification')}")
        return kind.from_pretrained(self.folder, trust_remote_code=self.place != self.folder).eval()


@functools.cache
def start(root: Path, family: str, pooling: str) -> Path:
    """A released encoder of the family as sentence-transformers 6 or, if it is no mean, 5 saves it."""
    folder = root / f"{family}-{pooling}" / "bert"
    theirs: Any = parity.make_theirs("AutoModel", family, parity.ONNX_SHAPE)
    theirs.save_pretrained(make_bert(folder))
    if pooling == "mean":
        add_sentence_files(folder, {"embedding_dimension": 16, "pooling_mode": "mean"}, "Normalize")
    elif pooling:
        add_sentence_files(folder, {"word_embedding_dimension": 16, FLAGS[pooling]: True})
    return folder.parent


@functools.cache
def made(root: Path, family: str, head: str, pooling: str) -> Case:
    folder = start(root, family, pooling)
    train = folder / f"{head}.jsonl"
    train.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[head]))
    kinds = {"classes": "single_label", "labels": "multi_label", "value": "regression"}
    more = {"problem_type": kinds[head]} if head in kinds else {}
    section = {"classification" if more else head: {"train": str(train), **more}}
    return Case(family, head, pooling, save_untrained(folder, head, section) / "model")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, root: Path) -> Case:
    return made(root, *request.param)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_transformers_computes_our_vectors_and_logits(case: Case) -> None:
    inputs, (hidden, logits) = case.inputs(), case.ours()
    real = inputs["attention_mask"].bool()
    wrapped = case.pooling in ("mean", "max") and case.head not in KINDS and case.family not in POOLS
    assert wrapped == (case.place != case.folder)
    with torch.no_grad():
        close(transformers.AutoModel.from_pretrained(case.place).eval()(**inputs)[0][real], hidden[real])
    if wrapped:
        for kind in (transformers.AutoModel, transformers.AutoModelForSequenceClassification):
            with pytest.raises(ValueError, match="custom code"):
                kind.from_pretrained(case.folder)
    if case.head == "questions" and case.family in NO_QUESTIONS:
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            case.theirs()
        return
    model, rest = case.theirs(), {name: values for name, values in inputs.items() if name != "input_ids"}
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]), **rest}
    with torch.no_grad():
        found = [model(**inputs), model(**embedded, output_hidden_states=True)]
    assert len(found[1].hidden_states) == 3
    for output in found:
        actual = [output.start_logits, output.end_logits] if case.head == "questions" else [output.logits]
        for one, expected in zip(actual, logits, strict=True):
            close(*((one[real], expected[real]) if case.head in KINDS else (one, expected)))


def test_a_pipeline_raises_or_gives_our_numbers(case: Case) -> None:
    task, folder = PIPELINES.get(case.head, "text-classification"), str(case.folder)
    wrapped = case.place != case.folder
    if wrapped or case.head == "questions":
        with pytest.raises((ValueError, KeyError), match=r"custom code|question-answering"):
            transformers.pipeline(task, model=folder)
        if case.head == "questions":
            return
    run = transformers.pipeline(task, model=folder, trust_remote_code=wrapped)
    if case.head == "entities":
        expect_entities(case, run)
        return
    for text in TEXTS:
        found, predicted = run(text, top_k=None), finetune.load(folder)(text)
        scores = {"LABEL_0": predicted["value"]} if case.head == "value" else predicted["scores"]
        close({one["label"]: one["score"] for one in found}, scores)


def expect_entities(case: Case, run: Any) -> None:
    """Tags and scores of all tokens as ours; and in the guide's strategy, no part of a word."""
    (scores, tags), text = case.ours()[1][0][0].softmax(-1).max(-1), TEXTS[0]
    found = run(text, ignore_labels=[])
    count = int(case.inputs()["attention_mask"][0].sum())
    assert len(found) == count - 2  # [CLS], [SEP]
    assert [one["entity"] for one in found] == [run.model.config.id2label[int(tag)] for tag in tags[1 : count - 1]]
    close([float(one["score"]) for one in found], scores[1 : count - 1].tolist())
    bounds = {number for word in re.finditer(r"\w+|,", text) for number in word.span()}
    first = run(text, aggregation_strategy="first", ignore_labels=[])
    assert {number for one in first for number in (one["start"], one["end"])} <= bounds


@pytest.mark.parametrize("pooling", ["mean", ""])
@pytest.mark.parametrize("head", ["classes", "labels", "value"])
def test_a_cross_encoder_is_told_its_activation(root: Path, head: str, pooling: str) -> None:
    case = made(root, "BERT", head, pooling)
    name = json.loads((case.folder / "config.json").read_text())["sentence_transformers"]["activation_fn"]
    activation = getattr(import_module(name.rpartition(".")[0]), name.rpartition(".")[2])()
    last = torch.nn.Softmax(1) if head == "classes" else torch.nn.Identity()  # an option of `predict`
    expected = [
        [one["value"]] if head == "value" else list(one["scores"].values()) for one in finetune.load(case.folder)(TEXTS)
    ]
    close(last(activation(case.ours()[1][0])).tolist(), expected)
    library = pytest.importorskip("sentence_transformers")
    cross = library.CrossEncoder(str(case.folder), trust_remote_code=bool(pooling))
    found = cross.predict(list(zip(TEXTS, TEXTS, strict=True)), apply_softmax=head == "classes")
    close(torch.as_tensor(found).reshape(2, -1), last(activation(case.ours(TEXTS)[1][0])))


def test_sentence_transformers_setfit_and_peft(case: Case, tmp_path: Path) -> None:
    """What they read, and what they compute where they are installed."""
    if not case.pooling:
        assert not (case.place / "modules.json").exists()
        return
    names = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")
    modules, pools, longest, prompts = (json.loads((case.place / name).read_text()) for name in names)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if case.pooling == "mean" else [])]
    assert [one["type"] for one in modules] == [f"sentence_transformers.models.{kind}" for kind in kinds]
    assert [one["path"] for one in modules] == ["", "1_Pooling", "2_Normalize"][: len(kinds)]
    assert [name for name, value in pools.items() if value is True][:-1] == [FLAGS[case.pooling]]
    assert (pools["pooling_mode_lasttoken"], pools["word_embedding_dimension"]) == (False, 16)
    assert (longest, prompts) == ({"max_seq_length": 32, "do_lower_case": False}, {"prompts": {"query": "the "}})
    library = pytest.importorskip("sentence_transformers")
    peft, setfit = pytest.importorskip("peft"), pytest.importorskip("setfit")
    inputs, (hidden, logits) = case.inputs(), case.ours()
    real = inputs["attention_mask"].bool()
    vectors = hidden[:, 0] if case.pooling == "cls" else hidden.masked_fill(~real[..., None], -9e9).amax(1)
    if case.pooling == "mean":
        vectors = F.normalize((hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True))
    close(library.SentenceTransformer(str(case.place)).encode(TEXTS, convert_to_tensor=True).cpu(), vectors)
    few = setfit.SetFitModel.from_pretrained(str(case.place))
    close(torch.as_tensor(few.encode(TEXTS, show_progress_bar=False)), vectors)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    lora = peft.get_peft_model(transformers.AutoModel.from_pretrained(case.place), config).eval()
    lora.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(transformers.AutoModel.from_pretrained(case.place), tmp_path).eval()
    close(again(**inputs)[0], lora(**inputs)[0])
    with torch.no_grad(), again.disable_adapter():
        close(again(**inputs)[0][real], hidden[real])
    if case.head not in KINDS:
        model = case.theirs()
        linear = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
        config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=[name for name in linear if ".layer" in name])
        close(peft.get_peft_model(model, config).eval()(**inputs, labels=None).logits, logits[0])
