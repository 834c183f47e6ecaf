"""Runs that continue from a checkpoint: what they take over, what they add, what they refuse."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from corpora import make_corpus
from tiny_checkpoints import WORDS, add_sentence_files, make_bert

from finetune.cli import main
from pretrain.batches.replay import mixture_weights, with_replay
from pretrain.batches.sampler import Sampler
from pretrain.checkpoint import hf, store
from pretrain.checkpoint.hf import load
from pretrain.checkpoint.mapping import MappedTensor
from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.start import log_frequencies, read_start, start_overrides, weights_table
from pretrain.common.errors import InputError
from pretrain.common.settings import dump
from pretrain.common.yaml_text import Dumper
from pretrain.config import AdaptationConfig, PairsConfig, PhaseConfig, PretrainConfig, load_config, run_folder
from pretrain.corpus.extension import check_extension, extend_vocabulary, saved_share
from pretrain.corpus.shards import open_shards
from pretrain.corpus.tokenizer_files import load_vocabulary
from pretrain.corpus.vocabulary import tokenizer_digest
from pretrain.model.heads import PretrainingModel
from pretrain.run import preflight
from pretrain.run.continuation import Corpora
from pretrain.storage.runs import fetched_model
from pretrain.training.rates import lr_scales, scaled_groups
from tests.distributed import run_workers
from tests.starts import Start, losses, pretraining, records, starts, with_changes

JARGON = ["zymurgy", "quotidian", "vexillology", "jumbuck", "wyvern"]


def write_text(folder: Path, words: list[str], *, documents: int = 60, seed: int = 0) -> Path:
    """Plain-text files of sentences of these words, one document each."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    for number in range(documents):
        sentences = [" ".join(draw.choices(words, k=draw.randint(4, 12))) + "." for _ in range(draw.randint(4, 9))]
        (folder / f"{number:03d}.txt").write_text("\n\n".join(sentences), encoding="utf-8")
    return folder


def make_pretrained(folder: Path) -> Path:
    """A released BertForPreTraining of random weights, with the tokenizer of `make_bert`."""
    from transformers import BertConfig, BertForPreTraining

    make_bert(folder)
    torch.manual_seed(1)
    BertForPreTraining(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def make_pooled(folder: Path) -> Path:
    """A model of sentence-transformers without a head for masked language modeling."""
    return add_sentence_files(make_bert(folder), {"pooling_mode_mean_tokens": True}, "Dense", "Normalize")


def write_config(path: Path, corpus: Path, text: Path, start: Path, **changes: Any) -> Path:
    """A config that continues from `start`; section__key changes it."""
    import yaml

    values = pretraining(corpus, path.with_suffix(""), [(32, 8, 4)], engine__micro_batch_tokens=128)
    del values["model"], values["corpus"]["vocabulary"]
    values |= {"start_from": str(start), "evaluation": {"every_steps": 2, "sequences": 16}}
    sources = [{"kind": "books", "path": str(text)}]
    values["corpus"] |= {"sources": sources, "validation_fraction": 0.2, "processes": 1}
    path.write_text(yaml.dump(with_changes(values, changes), Dumper=Dumper))
    return path


def resolved(path: Path, *overrides: str) -> PretrainConfig:
    return load_config(path, [*overrides, *start_overrides(path, overrides, resume=False)])


def start_of(path: Path, **options: Any) -> Start:
    config = resolved(path)
    config.folder.mkdir(parents=True, exist_ok=True)
    return Start(config.model_dump(mode="json"), **options)


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return store.read_weights(run / "checkpoints" / f"step-{step:08d}")


class Place:
    """A checkpoint, and the corpora that are prepared with its tokenizer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.start = make_pretrained(root / "start")
        self.text = write_text(root / "text", [*WORDS, *JARGON])
        self.corpus, self.extended, self.replay_corpus = (root / name for name in ("corpus", "extended", "general"))
        self.config = write_config(root / "run.yaml", self.corpus, self.text, self.start)
        other = write_text(root / "other", WORDS, seed=7)
        assert main(["prepare", str(self.config)]) == 0
        assert main(["prepare", str(self.changed("g", self.replay_corpus, corpus__sources__0__path=str(other)))]) == 0
        assert main(["prepare", str(self.changed("x", self.extended, corpus__vocabulary__added_words=3))]) == 0

    def changed(self, name: str, corpus: Path | None = None, **changes: Any) -> Path:
        """The config of another run."""
        path = changes.pop("corpus__sources__0__path", str(self.text))
        return write_config(self.root / f"{name}.yaml", corpus or self.corpus, Path(path), self.start, **changes)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("start"))


WORDS_ADDED: dict[str, Any] = {"corpus__vocabulary__added_words": 3}
ONE_STEP = [{"sequence_length": 32, "global_sequences": 8, "steps": 1, "peak_learning_rate": 1e-3}]


@pytest.fixture(scope="module")
def runs(place: Place) -> dict[str, Path]:
    """Run folders by name, all trained on one worker in one process: to start one costs more than to train."""
    general = {"adaptation__replay_corpus": str(place.replay_corpus), "adaptation__replay_share": 0.5}
    once = {"phases": ONE_STEP, "optimizer__weight_decay": 0.0, **WORDS_ADDED}
    paths = {
        "through": place.changed("through"),
        "bare": place.changed("bare", start_from=str(make_pooled(place.root / "headless"))),
        "rows": place.changed("rows", place.extended, **WORDS_ADDED),
        "replay": place.changed("replay", place.extended, **WORDS_ADDED, **general),
        "full": place.changed("full", place.extended, **once),
        "slow": place.changed("slow", place.extended, adaptation__layer_decay=0.5, **once),
    }
    for stage in (1, 3):
        slow = {"engine__zero_stage": stage, "adaptation__layer_decay": 0.5}
        paths[f"one{stage}"] = place.changed(f"one{stage}", **slow)
    assert run_workers(1, starts, [start_of(path) for path in paths.values()]) == [[""] * len(paths)]
    return {name: path.with_suffix("") for name, path in paths.items()}


# ---- weights


def test_a_run_begins_with_the_checkpoint_and_resumes_without_it(place: Place, runs: dict[str, Path]) -> None:
    """Bitwise as one that was never stopped; the held-out loss before the first step is recorded once."""
    gone = shutil.copytree(place.start, place.root / "gone")
    through, broken = runs["through"], place.changed("broken", start_from=str(gone))
    again = start_of(broken)
    assert run_workers(1, stopped_and_resumed, again.config, str(gone)) == [
        ["StoppedError: stopped at step 2 of 4; checkpoint step-00000002 is saved. Continue with --resume.", ""]
    ]
    broken = broken.with_suffix("")
    assert losses(through) == losses(broken)
    assert losses(through, "validation") == losses(broken, "validation")
    assert [step for step, _ in losses(through, "validation")] == [0, 2, 4]
    last = weights(broken, 4)
    for name, tensor in weights(through, 4).items():
        assert torch.equal(tensor, last[name]), name
    states = [store.read_state(run / "checkpoints/step-00000004") for run in (through, broken)]
    assert states[0]["start"]["fingerprint"] == states[1]["start"]["fingerprint"]
    begun = weights(through, 0)
    for name, tensor in load(place.start)[1].items():
        assert torch.equal(begun[name], tensor), name


def test_a_pooled_checkpoint_keeps_its_pooling(place: Place, runs: dict[str, Path], tmp_path: Path) -> None:
    run, start = runs["bare"], read_released(place.root / "headless")
    first = json.loads((run / "start.json").read_text())
    assert "exports leave out its modules Dense." in first["table"][-1]
    (run / "config.yaml").write_text(dump(resolved(run.with_suffix(".yaml"))))
    hf.export_run(run, tmp_path / "out")
    assert hf.load(tmp_path / "out")[0] == start.model
    # A run that continues a run knows no config.json.
    shutil.copytree(run, tmp_path / "again")
    (tmp_path / "again" / "start.json").write_text(json.dumps({**first, "config": {}}))
    hf.export_run(tmp_path / "again", tmp_path / "other")
    assert len(start.sentence_files) == 4
    for folder in (tmp_path / "out", tmp_path / "other"):
        assert {name: json.loads((folder / name).read_text()) for name in start.sentence_files} == start.sentence_files
    for released in (start, read_released(run), read_released(tmp_path / "out"), read_released(tmp_path / "other")):
        assert (released.task_head("sequence").pooling, released.sentence_files) == ("mean", start.sentence_files)
    assert read_released(run).config == {"classifier_pooling": "mean"}


def stopped_and_resumed(config: dict[str, Any], checkpoint: str) -> list[str]:
    """Two starts of a run, between which the checkpoint that it continues is deleted."""
    outcomes = starts([Start(config, stop_at=2)])
    shutil.rmtree(checkpoint)
    return outcomes + starts([Start(config, resume=True)])


def test_two_workers_train_alike(place: Place, runs: dict[str, Path]) -> None:
    slow: dict[str, Any] = {"adaptation__layer_decay": 0.5}
    paths = {stage: place.changed(f"two{stage}", engine__zero_stage=stage, **slow) for stage in (1, 3)}
    assert run_workers(2, starts, [start_of(path) for path in paths.values()]) == [["", ""]] * 2
    for stage, path in paths.items():
        for (_, loss), (_, other) in zip(losses(runs[f"one{stage}"]), losses(path.with_suffix("")), strict=True):
            assert loss == pytest.approx(other, abs=1e-5)


def test_missing_heads_are_named_and_the_decoder_begins_with_frequencies(place: Place, runs: dict[str, Path]) -> None:
    from pretrain.checkpoint.start import start_table

    table = start_table(resolved(place.root / "bare.yaml"))
    assert "initialized as in a new run: heads.nsp.*, heads.mlm_transform.*, heads.mlm_norm.*" in table
    assert "initialized from the frequencies of tokens in the corpus: heads.mlm_bias" in table
    assert "pooler.dense.*    2 tensors -> head.dense.*" in table
    shards = open_shards(place.corpus, "train")
    bias = weights(runs["bare"], 0)["heads.mlm_bias"]
    counts = np.bincount(np.concatenate([shard.tokens for shard in shards.shards]), minlength=len(bias)) + 1
    torch.testing.assert_close(bias, torch.from_numpy(np.log(counts / counts.sum())).float())
    assert torch.equal(bias, log_frequencies(shards, rows=shards.vocabulary_size))


def test_a_transform_that_a_layout_shares_with_task_heads_is_not_left_out() -> None:
    """ModernBERT's `head` is both, and BERT's pooler is of no use without pairs."""
    dense, norm = MappedTensor("head.dense.weight", (8, 8), "head.dense_weight"), "heads.mlm_norm_weight"
    mapping = [dense, MappedTensor("head.norm.weight", (8,), "head.norm_weight")]
    shapes = {"heads.mlm_transform_weight": (8, 8), norm: (8,)}
    released: Any = SimpleNamespace(mapping=mapping)
    assert "left out" not in weights_table(released, shapes, (), bias_from_corpus=False, added_words=0)
    released.mapping = [dense, MappedTensor("transform", (8, 8), "heads.mlm_transform_weight")]
    table = weights_table(released, shapes, (norm,), bias_from_corpus=False, added_words=0)
    assert "head.dense.weight: 1 tensor left out: this run has no such head" in table


# ---- slow parts


def test_old_rows_move_by_their_share_of_the_rate(runs: dict[str, Path]) -> None:
    """One step of AdamW from the same state: the change of a row is proportional to its rate."""

    def change(run: Path) -> dict[str, torch.Tensor]:
        before = weights(run, 0)
        return {name: value - before[name] for name, value in weights(run, 1).items()}

    full, slow = change(runs["full"]), change(runs["slow"])
    word, old = "embeddings.word", len(full["embeddings.word"]) - 3
    close: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-7}
    torch.testing.assert_close(slow[word][:old], full[word][:old] * 0.5**3, **close)
    torch.testing.assert_close(slow[word][old:], full[word][old:], **close)
    torch.testing.assert_close(slow["layers.0.ffn_in_weight"], full["layers.0.ffn_in_weight"] * 0.5**2, **close)
    torch.testing.assert_close(slow["heads.mlm_transform_weight"], full["heads.mlm_transform_weight"], **close)


def test_without_an_adaptation_the_optimizer_groups_are_as_ever() -> None:
    named = [(name, torch.ones(1)) for name in ("embeddings.word", "layers.0.qkv_bias", "heads.mlm_bias")]
    shares = lr_scales([name for name, _ in named], AdaptationConfig(), 1)
    keys = ["decays", "layer_adaptation", "names", "params", "weight_decay"]
    assert [sorted(group) for group in scaled_groups(named, 0.1, shares)] == [keys] * 2


# ---- extension of the vocabulary


def test_added_words_save_tokens_and_leave_other_logits(place: Place, runs: dict[str, Path]) -> None:
    from pretrain.checkpoint.start import start_tokenizer

    old = start_tokenizer(place.start)
    new = load_vocabulary(place.extended, lowercase=True)
    size = old.get_vocab_size()
    words = [new.id_to_token(number) for number in range(size, new.get_vocab_size())]
    assert len(words) == 3
    assert set(words) < set(JARGON)
    assert {token: new.token_to_id(token) for token in old.get_vocab()} == old.get_vocab()
    card = json.loads((place.extended / "card.json").read_text())["vocabulary"]
    shards = [open_shards(folder, "train").shards for folder in (place.corpus, place.extended)]
    tokens = [sum(len(shard.tokens) for shard in each) for each in shards]
    assert card["added"] == 3
    assert 0.1 < card["saved_share"] == pytest.approx(1 - tokens[1] / tokens[0], abs=0.02)
    before, after = load(place.start)[1], weights(runs["rows"], 0)
    for number, word in enumerate(words):
        ids = old.encode(word, add_special_tokens=False).ids
        for name in ("embeddings.word", "heads.mlm_bias"):
            torch.testing.assert_close(after[name][size + number], before[name][ids].mean(0))
    for name, tensor in before.items():
        assert torch.equal(after[name][: len(tensor)], tensor), name


def test_an_extension_depends_on_counts_alone_and_breaks_no_word(place: Place) -> None:
    tokenizer = load_vocabulary(place.start, lowercase=True)
    counts = {"zebra": 9, "zebras": 2, "quagga": 5, "once": 1, "film": 99, "1234": 50, "\u00e6on": 7}
    extension = extend_vocabulary(tokenizer, counts, 10)
    assert extension.words == ["zebra", "quagga"]
    text = "zebra " * 9 + "zebras " * 2 + "quagga " * 5
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert saved_share(tokenizer, extension.tokenizer, [text]) == pytest.approx((9 * 4 + 2 * 4 + 5 * 5) / tokens)
    again = extend_vocabulary(tokenizer, dict(reversed(counts.items())), 10)
    assert again.tokenizer.to_str() == extension.tokenizer.to_str()
    assert extend_vocabulary(tokenizer, counts, 1).words == ["zebra"]


def test_an_extension_that_exceeds_16_bits_is_refused(place: Place) -> None:
    tokenizer = load_vocabulary(place.start, lowercase=True)
    most = (1 << 16) - tokenizer.get_vocab_size()
    check_extension(tokenizer, most)
    with pytest.raises(InputError, match=rf"would exceed the 16 bits .* Lower it to {most} or less"):
        check_extension(tokenizer, most + 1)


# ---- replay


def test_replayed_text_has_its_share_of_every_epoch(tmp_path: Path) -> None:
    own = open_shards(make_corpus(tmp_path / "own", documents=40), "train")
    general = open_shards(make_corpus(tmp_path / "general", documents=150, seed=3, sources=2), "train")
    mixed = with_replay(own, general, 0.25)
    assert mixed.fingerprint not in (own.fingerprint, general.fingerprint)
    assert with_replay(own, general, 0.3).fingerprint != mixed.fingerprint
    sampler = Sampler(mixed, PairsConfig(objective="none"), sequence_length=64, seed=0)
    alone = Sampler(own, PairsConfig(objective="none"), sequence_length=64, seed=0)
    whole = np.arange(sampler.samples_per_epoch)
    source = np.array([shard.source for shard in mixed.shards])[sampler.plan(whole).shard_a]
    assert (source > 0).mean() == pytest.approx(0.25, abs=0.002)
    assert (source == 0).sum() == alone.samples_per_epoch
    assert sampler.plan(whole[5:9]).start_a.tolist() == sampler.plan(whole).start_a[5:9].tolist()


def test_sources_without_replay_keep_their_weights() -> None:
    assert mixture_weights([{}, {}], [0.5, 1.0], [10, 20]) == [0.5, 1.0]
    assert mixture_weights([{}, {"replay_share": 0.5}], [1.0, 1.0], [10, 40]) == [1.0, 0.25]
    with pytest.raises(InputError, match=r"adaptation\.replay_corpus: none of its documents has the sentences"):
        mixture_weights([{}, {"replay_share": 0.5}], [1.0, 1.0], [10, 0])


@pytest.mark.parametrize("weights", [{"source-0": 2.0}, {"source-0": 0.0}])
def test_weights_of_a_phase_leave_replayed_sources_of_the_same_name_alone(
    tmp_path: Path, weights: dict[str, float]
) -> None:
    own, general = (make_corpus(tmp_path / str(n), documents=40, seed=n, sources=n) for n in (2, 1))
    mixed = with_replay(open_shards(own, "train"), open_shards(general, "train"), 0.2)

    def shares(weights: dict[str, float]) -> tuple[int, ...]:
        pairs = PairsConfig(objective="none")
        phase = PhaseConfig(sequence_length=64, global_sequences=1, steps=1, peak_learning_rate=1e-3, weights=weights)
        return Sampler(mixed, pairs, sequence_length=64, seed=0, phase=phase).mix.shares

    first, second, _ = shares({})
    found = shares(weights)
    assert found[0] / found[1] == pytest.approx(weights["source-0"] * first / second)
    assert found[2] / sum(found) == pytest.approx(0.2, abs=0.001)
    with pytest.raises(InputError, match=r"all weights are 0\. Give one of source-0, source-1 a positive weight"):
        shares({"source-0": 0.0, "source-1": 0.0})


def test_without_own_held_out_text_a_run_says_that_general_text_is_not_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, held_out in (("own", 0), ("general", 5)):
        make_corpus(tmp_path / name, documents=10, vocabulary_size=300, validation_documents=held_out, seed=held_out)
    values = pretraining(tmp_path / "own", tmp_path / "run", [(32, 8, 4)])
    adaptation = {"replay_corpus": str(tmp_path / "general"), "replay_share": 0.2}
    config = PretrainConfig.model_validate({**values, "start_from": "start", "adaptation": adaptation})
    corpora = Corpora.open(config)
    assert corpora.general_held_out is None
    # Workers with another text to replay are refused all the same.
    assert corpora.training.fingerprint != corpora.domain.fingerprint
    assert corpora.training.fingerprint in corpora.fingerprints().values()
    preflight.check_corpus(config)
    assert "warning: adaptation.replay_corpus is not evaluated" in capsys.readouterr().err


def test_general_text_is_replayed_and_scored(place: Place, runs: dict[str, Path]) -> None:
    found = records(runs["replay"], "validation")
    assert [record["step"] for record in found] == [0, 2, 4]
    assert all(record["general_mlm_loss"] > 0 for record in found)
    assert found[0]["general_mlm_loss"] != found[0]["mlm_loss"]
    state = store.read_state(runs["replay"] / "checkpoints/step-00000004")
    assert state["fingerprint"] != open_shards(place.extended, "train").fingerprint
    assert state["tokenizer"] == tokenizer_digest(place.extended)


# ---- settings


def test_paths_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own, general = (make_corpus(tmp_path / name, documents=20, vocabulary_size=300) for name in ("own", "general"))
    paths = {"start_from": "~/start", "adaptation__replay_corpus": "~/general"}
    config = pretraining(own, tmp_path / "run", [(32, 8, 2)], **paths)
    general_of_run = Corpora.open(PretrainConfig.model_validate(config)).general_held_out
    assert general_of_run is not None
    assert general_of_run.folder == general
    assert fetched_model("~/start") == tmp_path / "start"
    assert run_folder({"run_dir": "~/run"}) == tmp_path / "run"


def test_the_checkpoint_decides_the_model(place: Place) -> None:
    config = resolved(place.config, "model.hidden_dropout=0.0")
    assert (config.model.layers, config.model.hidden, config.model.max_positions) == (2, 32, 64)
    assert config.model.hidden_dropout == 0.0
    assert config.corpus.vocabulary.size == open_shards(place.corpus, "train").vocabulary_size
    assert resolved(place.config, "model.hidden=32").model == resolved(place.config).model


def test_a_checkpoint_with_narrow_embeddings_can_be_continued(place: Place, tmp_path: Path) -> None:
    """ELECTRA's generator has a head with a tied decoder (test_parity.py has its logits)."""
    from transformers import ElectraConfig, ElectraForMaskedLM

    shutil.copytree(place.start, tmp_path / "start")
    (tmp_path / "start" / "model.safetensors").unlink()
    known = json.loads((place.start / "config.json").read_text())
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    torch.manual_seed(2)
    sizes = {"embedding_size": 16, "vocab_size": known["vocab_size"], "max_position_embeddings": 64}
    ElectraForMaskedLM(ElectraConfig(**shape, **sizes)).save_pretrained(tmp_path / "start")
    path = write_config(tmp_path / "run.yaml", place.corpus, place.text, tmp_path / "start", pairs__objective="none")
    config = resolved(path)
    assert (config.model.embedding, config.model.hidden) == (16, 32)
    model = PretrainingModel(config.model, known["vocab_size"], False).eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    start = read_start(config, shapes, open_shards(place.corpus, "train"))
    assert not start.initialized
    model.load_state_dict(start.state)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.hidden=64", "model.hidden: 64, but the checkpoint in start_from"),
        ("model.size=mini", "model.size: mini has layers 4, but the checkpoint in start_from"),
        ("model.norm=rms_norm", "model.norm: 'rms_norm', but the checkpoint"),
        ("model.attention_bias=false", "model.attention_bias: False, but the checkpoint"),
        ("model.hiden=32", r"model.hiden is not a known setting; did you mean hidden\?"),
        ("corpus.vocabulary.path=vocab.txt", "corpus.vocabulary.path: vocab.txt, but start_from"),
        ("corpus.vocabulary.lowercase=false", "lowercase: false, but the tokenizer of start_from .* has true"),
        ("corpus.vocabulary.strip_accents=false", "but the tokenizer of start_from .* has true"),
        ("phases.0.sequence_length=128", "exceeds model.max_positions"),
        ("start_from=nowhere", "nowhere: no such folder"),
    ],
)
def test_contradictions_name_the_setting(place: Place, setting: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(place.config, setting)


@pytest.mark.parametrize(
    "setting", ["adaptation.layer_decay=0.9", "adaptation.replay_corpus=x", "corpus.vocabulary.added_words=5"]
)
def test_options_of_a_continuation_need_a_checkpoint(place: Place, setting: str) -> None:
    name = setting.partition("=")[0]
    with pytest.raises(InputError, match=rf"{name} \(.*\) needs start_from"):
        load_config(place.config, ["start_from=", setting])


def test_a_corpus_of_another_tokenizer_is_refused(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_corpus(place.root / "foreign")
    path = place.changed("foreign-run", other)
    assert main(["pretrain", str(path), "--no-ray"]) == 2
    assert "prepared with a different tokenizer than in start_from" in capsys.readouterr().err
    assert not path.with_suffix("").exists()


def test_a_resumed_run_takes_its_settings_from_its_folder(place: Place) -> None:
    path = place.changed("kept")
    config = resolved(path)
    (config.folder / "checkpoints/step-00000002").mkdir(parents=True)
    (config.folder / "checkpoints/step-00000002/manifest.json").write_text("{}")
    preflight.record_config(config)
    found = load_config(path, ["start_from=", *start_overrides(path, ["start_from="], resume=True)])
    assert found == config
