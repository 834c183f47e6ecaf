"""Export of pretraining runs to the Hugging Face layout: equal logits, exact round trips, refusals (invariant 6)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import SPECIALS, write_tokenizer
from safetensors.torch import load_file

from pretrain.checkpoint import hf, store, weight_files, writing
from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.tokenizer import read_tokenizer
from pretrain.common import files
from pretrain.common.errors import InputError, MachineError
from pretrain.common.settings import dump
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.corpus.vocabulary import tokenizer_digest
from pretrain.model.heads import PretrainingModel
from pretrain.training.engine import Fragment
from tests.batches_by_hand import make_batch, next_sentence_logits
from tests.bench.baselines import pad
from tests.distributed import Alone

transformers: Any = pytest.importorskip("transformers")

VOCABULARY = [*SPECIALS, *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijk"), "the", "cat", "sat"]
SHAPE = ModelConfig.model_validate(
    {"size": "custom", "layers": 3, "hidden": 32, "heads": 4, "intermediate": 48, "max_positions": 40}
)


@pytest.fixture(scope="module")
def model() -> PretrainingModel:
    return make_model(next_sentence=True)


@pytest.fixture
def exported(model: PretrainingModel, tmp_path: Path) -> Path:
    return export(model, tmp_path, next_sentence=True)


def make_model(next_sentence: bool) -> PretrainingModel:
    """A model all of whose parameters are random, so that no two of them could be swapped unseen."""
    torch.manual_seed(0)
    model = PretrainingModel(SHAPE, len(VOCABULARY), next_sentence).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def export(model: PretrainingModel, folder: Path, *, next_sentence: bool) -> Path:
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    write_tokenizer(tokenizer, VOCABULARY)
    hf.export(model.state_dict(), SHAPE, tokenizer, folder / "export", next_sentence=next_sentence, card="# a card\n")
    return folder / "export"


@pytest.mark.parametrize("next_sentence", [True, False])
def test_transformers_loads_an_export_whole_and_gives_the_same_logits(tmp_path: Path, next_sentence: bool) -> None:
    model = make_model(next_sentence)
    folder, state = export(model, tmp_path, next_sentence=next_sentence), model.state_dict()
    kind = transformers.BertForPreTraining if next_sentence else transformers.AutoModelForMaskedLM
    theirs, report = kind.from_pretrained(folder, output_loading_info=True)
    assert isinstance(theirs, transformers.BertForPreTraining if next_sentence else transformers.BertForMaskedLM)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    batch = make_batch((9, 37), len(VOCABULARY))
    inputs = pad(batch)
    with torch.no_grad():
        output = theirs.eval()(**{name: inputs[name] for name in ("input_ids", "token_type_ids", "attention_mask")})
        logits = output.prediction_logits if next_sentence else output.logits
        flat = logits[inputs["attention_mask"].bool()]
        torch.testing.assert_close(model.masked_logits(batch), flat[batch.masked_rows], atol=1e-4, rtol=0)
        if next_sentence:
            ours = next_sentence_logits(model, batch)
            torch.testing.assert_close(ours, output.seq_relationship_logits, atol=1e-4, rtol=0)
    assert flat.std() > 0.5  # the comparison above would pass on logits that are all near 0
    names = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}
    assert set(files.verify_manifest(folder)["files"]) == names
    assert (folder / "README.md").read_text() == "# a card\n"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.tokenize("The cat"), tokenizer.model_max_length) == (["the", "cat"], SHAPE.max_positions)
    # There and back is exact.
    shape, returned, has_pair = hf.load(folder)
    assert (shape, has_pair, list(returned)) == (SHAPE, next_sentence, list(state))
    assert all(torch.equal(returned[name], state[name]) for name in state)


def test_the_config_is_what_transformers_itself_would_write(exported: Path, tmp_path: Path) -> None:
    transformers.BertForPreTraining.from_pretrained(exported).save_pretrained(tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    ours = json.loads((exported / "config.json").read_text())
    assert theirs.pop("transformers_version")
    assert {key: ours[key] for key in theirs} == theirs
    assert set(load_file(tmp_path / "theirs" / "model.safetensors")) == set(load_file(exported / "model.safetensors"))


def test_an_export_replaces_an_export_and_nothing_else(model: PretrainingModel, exported: Path, tmp_path: Path) -> None:
    (exported / "old").write_text("from before")
    assert export(model, tmp_path, next_sentence=True) == exported
    assert (exported / "old").read_text() == "from before"
    files.verify_manifest(exported)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "tokenizer"]
    (exported / "README.md").rename(exported / "notes.md")
    manifest = json.loads((exported / "manifest.json").read_text())
    del manifest["files"]["model.safetensors"]
    (exported / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"model\.safetensors: no export wrote it"):
        export(model, tmp_path, next_sentence=True)
    assert {"old", "notes.md", "model.safetensors"} < {path.name for path in exported.iterdir()}
    # A corpus or a checkpoint has a manifest, too.
    (exported / "manifest.json").write_text(json.dumps({"format": 1, "files": {"old": {}}}))
    for change in (lambda: None, (exported / "manifest.json").unlink, lambda: shutil.rmtree(exported)):
        change()
        if not exported.exists():
            exported.write_text("a file")
        with pytest.raises(InputError, match="exists and is not an export"):
            export(model, tmp_path, next_sentence=True)
        assert exported.is_file() or (exported / "config.json").exists()


def test_a_failure_leaves_the_earlier_export(
    model: PretrainingModel, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def full_disk(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weight_files, "save_file", full_disk)
    with pytest.raises(MachineError, match="disk full"):
        export(model, tmp_path, next_sentence=True)
    files.verify_manifest(exported)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "tokenizer"]


def test_a_tokenizer_or_parameters_that_do_not_fit_are_refused(model: PretrainingModel, tmp_path: Path) -> None:
    refused = [
        (VOCABULARY[:-1], {}, "44 entries, but the model has 45"),
        (VOCABULARY, {"place_weight": torch.zeros(2)}, r"^place_weight: the layout of bert has no such parameter"),
    ]
    for vocabulary, more, message in refused:
        write_tokenizer(tmp_path, vocabulary)
        state = {**model.state_dict(), **more}
        with pytest.raises(InputError, match=message):
            hf.export(state, SHAPE, tmp_path, tmp_path / "out", next_sentence=True, card="")
        assert not (tmp_path / "out").exists()


class TestExportRun:
    """From a run folder: which checkpoint is taken, and what its model card says."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        corpus = tmp_path / "corpus"
        corpus.mkdir()
        write_tokenizer(corpus, VOCABULARY)
        (corpus / "card.md").write_text("# Two novels\n\nwith 20,000 words\n")
        phase = {"sequence_length": 32, "global_sequences": 4, "steps": 3000, "peak_learning_rate": 1e-3}
        values = {"name": "tiny", "corpus": {"dir": str(corpus)}, "model": SHAPE.model_dump(), "phases": [phase]}
        config = PretrainConfig.model_validate({**values, "optimizer": {"decay_timescale": 0.5}})
        run = tmp_path / "run"
        run.mkdir()
        (run / "config.yaml").write_text(dump(config))
        records = [
            {"step": 1000, "split": "validation", "mlm_loss": 3.25, "mlm_accuracy": 0.4},
            {"step": 2000, "split": "validation", "mlm_loss": 2.5, "mlm_accuracy": 0.5, "nsp_accuracy": 0.75},
            {"step": 2500, "mlm_loss": 1.0},
            {"step": 3000, "split": "validation", "mlm_loss": 2.75, "mlm_accuracy": 0.45},
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        for record in records[:2] + records[3:]:
            write_checkpoint(run, record["step"], record["mlm_loss"])
        return run

    @pytest.mark.parametrize(("checkpoint", "step"), [(None, 3000), ("best", 2000), ("step-00001000", 1000)])
    def test_exports_the_requested_checkpoint(self, run: Path, checkpoint: str | None, step: int) -> None:
        hf.export_run(run, run / "export", checkpoint)
        # write_checkpoint marks the weights by their step
        assert hf.load(run / "export")[1]["heads.mlm_bias"][0] == step

    def test_a_run_is_read_as_its_export_is(self, run: Path) -> None:
        (run / "checkpoints" / "step-00003000" / "state.json").write_text("{}")  # damaged, so the one before
        ours = read_released(run)
        hf.export_run(run, run / "export", "step-00002000")
        theirs = read_released(run / "export")
        assert ours.pretraining["heads.mlm_bias"][0] == 2000
        assert (ours.family, ours.model, ours.config) == ("bert", theirs.model, {})
        for state in ("backbone", "head", "pretraining"):
            found, expected = getattr(ours, state), getattr(theirs, state)
            assert list(found) == list(expected) != []
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        # The pooler of pretraining is also the dense layer of a sequence's head.
        pooler = {"heads.pooler_weight": "head.dense_weight", "heads.pooler_bias": "head.dense_bias"}
        names = {*ours.backbone, *ours.pretraining}
        assert {tensor.target for tensor in ours.mapping} == {pooler.get(name, name) for name in names}
        text = "The cat sat [MASK]"
        assert read_tokenizer(run).encode(text).ids == read_tokenizer(run / "export").encode(text).ids

    @pytest.mark.parametrize("damage", ["{", None])
    def test_a_corpus_prepared_again_is_not_the_runs(
        self, run: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None
    ) -> None:
        """It has as many entries."""
        monkeypatch.setattr(store.time, "sleep", lambda _: pytest.fail("what is missing does not come"))
        corpus, newest = run.parent / "corpus", run / "checkpoints/step-00003000/state.json"
        trained_on = tokenizer_digest(corpus)
        write_tokenizer(corpus, [*VOCABULARY[:-2], *reversed(VOCABULARY[-2:])])
        hf.export_run(run, run / "export")
        write_checkpoint(run, 2900, 1.0, tokenizer=trained_on)
        newest.unlink() if damage is None else newest.write_text(damage)
        refuse_tokenizer(run)
        write_tokenizer(corpus, VOCABULARY)
        hf.export_run(run, run / "export")
        assert read_tokenizer(run).encode("cat").ids == read_tokenizer(run / "export").encode("cat").ids

    def test_a_corpus_prepared_again_with_another_casing_is_not_the_runs(self, run: Path) -> None:
        corpus = run.parent / "corpus"
        write_checkpoint(run, 3100, 1.0, tokenizer=tokenizer_digest(corpus))
        hf.export_run(run, run / "export")
        declared, described = (corpus / name for name in ("tokenizer_config.json", "tokenizer.json"))
        before = declared.read_text(), described.read_text()
        declared.write_text(before[0].replace('"do_lower_case": true', '"do_lower_case": false'))
        refuse_tokenizer(run)
        declared.write_text(before[0])
        described.write_text(before[1].replace('"lowercase": true', '"lowercase": false'))
        assert described.read_text() != before[1]
        refuse_tokenizer(run)

    def test_the_card_has_what_was_measured(self, run: Path) -> None:
        hf.export_run(run, run / "export", "best")
        card = (run / "export" / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: transformers\n")
        assert "A BERT encoder of" in card
        assert "pretrained from random initialization" in card
        assert "checkpoint after step 2,000 of 3,000" in card
        assert "| MLM loss | 2.5000 |" in card
        assert "| NSP accuracy | 75.00% |" in card
        assert "### Two novels" in card
        assert "global_sequences: 4" in card
        assert "france is [MASK]." in card
        assert "weight decay\n0.6667, " in card

    def test_refusals(self, run: Path, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"no such checkpoint\. Available: step-00001000, step-00002000"):
            hf.export_run(run, run / "export", "step-00000001")
        (run / "checkpoints" / "step-00001000" / "state.json").write_text("{}")
        with pytest.raises(InputError, match=r"step-00001000/state\.json"):
            hf.export_run(run, run / "export", "step-00001000")
        with pytest.raises(InputError, match="not a run folder"):
            hf.export_run(tmp_path, run / "export")
        (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
        with pytest.raises(InputError, match="no complete checkpoint"):
            hf.export_run(tmp_path, run / "export")


def refuse_tokenizer(run: Path) -> None:
    for read in (read_tokenizer, lambda run: hf.export_run(run, run / "export")):
        with pytest.raises(InputError, match=r"corpus: its tokenizer is not the one that .*run was trained with\."):
            read(run)


def write_checkpoint(run: Path, step: int, loss: float, **more: Any) -> None:
    state = make_model(next_sentence=True).state_dict()
    state["heads.mlm_bias"][0] = step
    fragments = [Fragment(name, 0, {"weight": tensor.flatten()}, replicated=True) for name, tensor in state.items()]
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    told = {"step": step, "shapes": shapes, "validation_loss": loss, "validation_set": "phase 0", **more}
    writing.save(run / "checkpoints", step, fragments, told, Alone())
