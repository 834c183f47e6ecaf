"""Replaced-token detection: samples, losses and exports against transformers, exact resume, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from corpora import make_corpus
from torch import Tensor

from pretrain.batches.batch import MicroBatch
from pretrain.checkpoint import hf, store
from pretrain.checkpoint.released import read_released
from pretrain.config import ElectraConfig, ModelConfig, PretrainConfig
from pretrain.model.heads import PretrainingModel
from pretrain.objectives import make_objective, replaced_tokens
from pretrain.objectives.replaced_tokens import (
    ElectraModel,
    Tokens,
    discriminator_state,
    generator_state,
    sample_tokens,
)
from tests.batches_by_hand import make_batch
from tests.distributed import run_workers
from tests.starts import Start, pretraining, records, starts

SHAPE = ModelConfig(
    size="custom", layers=2, hidden=32, heads=4, intermediate=48, embedding=24, max_positions=40, hidden_dropout=0.0
)
STEPS = 4
EMBEDDINGS = ["shared", "disentangled"]


def make_model(embeddings: str = "shared", shape: ModelConfig = SHAPE, **settings: Any) -> ElectraModel:
    """A model all of whose parameters are random, so that no two of them could be swapped unseen."""
    torch.manual_seed(0)
    settings = {"generator_width": 0.5, "embeddings": embeddings, **settings}
    model = ElectraModel(shape, 60, settings=ElectraConfig.model_validate(settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def test_samples_follow_the_softmax_and_depend_on_their_key_alone() -> None:
    torch.manual_seed(0)
    word, bias, hidden = torch.randn(7, 5), torch.randn(7), torch.randn(1, 5)
    keys = torch.randint(-(2**31), 2**31 - 1, (40_000,)).int()
    samples = sample_tokens(hidden.expand(len(keys), -1), word, bias, keys)
    shares = (hidden @ word.T + bias).softmax(-1)[0]
    assert (samples.bincount(minlength=7) / len(keys)).tolist() == pytest.approx(shares.tolist(), abs=0.01)
    again = sample_tokens(hidden.expand(3, -1), word, bias, keys[[5, 100, 7]])
    assert again.tolist() == samples[[5, 100, 7]].tolist()
    assert sample_tokens(hidden[:0], word, bias, keys[:0]).shape == (0,)


def test_a_step_of_many_scores_is_sampled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    arguments = torch.randn(20, 5), torch.randn(7, 5), None, torch.arange(20).int()
    whole = sample_tokens(*arguments)
    monkeypatch.setattr(replaced_tokens, "CHUNK_LOGITS", 7 * 3)
    assert torch.equal(sample_tokens(*arguments), whole)


def padded(values: Tensor, batch: MicroBatch) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values.split(list(batch.lengths))), batch_first=True)


@pytest.mark.parametrize("embeddings", EMBEDDINGS)
def test_losses_are_those_of_transformers_classes(embeddings: str, corpus: Path, tmp_path: Path) -> None:
    """The exported discriminator and generator give the logits, and the formulas of the paper the losses."""
    from transformers import ElectraForMaskedLM, ElectraForPreTraining

    model = make_model(embeddings)
    state = model.state_dict()
    # state_dict lists shared tables twice; checkpoints keep the first name.
    own = {name: tensor for name, tensor in state.items() if name in dict(model.named_parameters())}
    small = make_corpus(tmp_path / "corpus", vocabulary_size=60)
    written = {"next_sentence": False, "card": "", "family": "electra"}
    shape = model.settings.generator(SHAPE)
    hf.export(discriminator_state(own), SHAPE, small, tmp_path / "d", class_suffix="ForPreTraining", **written)
    hf.export(generator_state(own), shape, small, tmp_path / "g", **written)
    classes: list[tuple[Any, Path]] = [(ElectraForPreTraining, tmp_path / "d"), (ElectraForMaskedLM, tmp_path / "g")]
    (discriminator, report), (generator, other) = (
        one.from_pretrained(folder, output_loading_info=True) for one, folder in classes
    )
    for one in (report, other):
        assert not one["missing_keys"]
        assert not one["unexpected_keys"]

    batch = make_batch([5, 9, 7], vocabulary_size=60)
    mask = padded(torch.ones_like(batch.input_ids), batch)
    given = {"attention_mask": mask, "token_type_ids": padded(batch.token_types, batch)}
    with torch.no_grad():
        hidden = model.generator.encode(batch, batch.masked_rows)
        weights = model.generator.heads.transform(hidden, False), model.generator.embeddings.word
        sampled = sample_tokens(*weights, model.generator.heads.mlm_bias, batch.token_keys[batch.masked_rows])
        batch.masked_labels[0] = sampled[0]  # counts as original
        output = model(batch)
        scores = generator(padded(batch.input_ids, batch), **given).logits[mask.bool()][batch.masked_rows]
        corrupted = batch.input_ids.clone()
        corrupted[batch.masked_rows] = sampled
        logits = discriminator(padded(corrupted, batch), **given).logits[mask.bool()]
        tokens = Tokens.of(batch, corrupted, batch.token_keys)
        torch.testing.assert_close(model.detection_logits(tokens), logits, atol=1e-5, rtol=1e-4)
    replaced = torch.zeros(len(corrupted))
    replaced[batch.masked_rows] = (sampled != batch.masked_labels).float()
    assert replaced.sum() > 0
    expected = {
        "mlm_loss": F.cross_entropy(scores, batch.masked_labels, reduction="sum"),
        "rtd_loss": F.binary_cross_entropy_with_logits(logits, replaced, reduction="sum"),
        "mlm_correct": (scores.argmax(-1) == batch.masked_labels).sum().float(),
        "rtd_correct": ((logits > 0).float() == replaced).sum().float(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(output, name), value, atol=1e-4, rtol=1e-4, msg=name)
    back = read_released(tmp_path / "d")
    assert all(torch.equal(tensor, discriminator_state(own)[name]) for name, tensor in back.backbone.items())


@pytest.mark.parametrize("embeddings", EMBEDDINGS)
def test_which_loss_trains_which_table(embeddings: str) -> None:
    model = make_model(embeddings)
    output = model(make_batch([5, 9, 7], vocabulary_size=60))
    tables = [model.generator.embeddings.word, model.embeddings.word]
    # No gradient goes through the samples.
    (bias,) = torch.autograd.grad(
        output.rtd_loss, [model.generator.heads.mlm_bias], retain_graph=True, allow_unused=True
    )
    assert bias is None
    of_rtd = torch.autograd.grad(output.rtd_loss, tables, retain_graph=True, allow_unused=True)
    of_mlm = torch.autograd.grad(output.mlm_loss, tables, allow_unused=True)
    assert (tables[0] is tables[1]) == (embeddings == "shared")
    assert [gradient is not None for gradient in of_rtd] == [embeddings == "shared", True]
    assert [gradient is not None for gradient in of_mlm] == [True, embeddings == "shared"]


def test_disentangled_tables_begin_as_the_generators() -> None:
    torch.manual_seed(0)
    settings = ElectraConfig(generator_width=0.5, embeddings="disentangled")
    model = ElectraModel(SHAPE, 60, settings=settings)
    ids = torch.arange(7)
    assert torch.equal(model.embeddings.embed_words(ids), model.generator.embeddings.word[:7])
    assert torch.equal(model.embeddings.embed_positions(ids), model.generator.embeddings.position[:7])


@pytest.mark.parametrize("embeddings", EMBEDDINGS)
def test_parameters_are_counted(embeddings: str) -> None:
    model = make_model(embeddings)
    names = {name: parameter.numel() for name, parameter in model.named_parameters()}
    generator = sum(count for name, count in names.items() if name.startswith("generator."))
    expected = sum(names.values()) - generator, generator
    values = settings(Path("corpus"), Path("run"), electra=model.settings.model_dump(), model=SHAPE.model_dump())
    counted = make_objective(PretrainConfig.model_validate(values), 60).parameters()
    assert tuple(count for _, count, _ in counted) == expected


def test_the_generator_has_the_shape_of_google_s() -> None:
    """ELECTRA-small and base, configure_pretraining.py: 64 of 256 with one head, 256 of 768 with four."""
    small = ModelConfig(size="custom", layers=12, hidden=256, heads=4, embedding=128)
    generator = ElectraConfig(generator_width=0.25).generator(small)
    assert (generator.hidden, generator.heads, generator.intermediate, generator.embedding) == (64, 1, 256, 128)
    generator = ElectraConfig(generator_width=1 / 3).generator(ModelConfig(size="base"))
    assert (generator.hidden, generator.heads, generator.intermediate, generator.embedding) == (256, 4, 1024, 768)
    generator = ElectraConfig(generator_width=1, generator_depth=0.5).generator(ModelConfig(size="base"))
    assert (generator.layers, generator.hidden, generator.embedding) == (6, 768, 0)


def settings(corpus: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run; section__key changes it."""
    small = {
        "engine__micro_batch_tokens": 128,
        "evaluation__every_steps": 2,
        "pairs__objective": "none",
        "model__embedding": 24,
        "electra__generator_width": 0.5,
    }
    return pretraining(corpus, folder, [(32, 8, STEPS)], **{**small, **changes})


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, str], Path]:
    """Run folders by (workers, ZeRO stage, embeddings): never interrupted; beside those of two workers, one stopped."""
    found, place = {}, tmp_path_factory.mktemp("electra")
    for world, kinds in ((1, ((0, "shared"), (1, "disentangled"))), (2, ((1, "shared"), (3, "disentangled")))):
        plan, ends = [], []
        for stage, embeddings in kinds:
            folders = [place / f"{world}-{stage}-{name}" for name in ("through", "broken")]
            changes = {"engine__zero_stage": stage, "electra__embeddings": embeddings}
            through, broken = (settings(corpus, folder, **changes) for folder in folders)
            more = [Start(broken, stop_at=2), Start(broken, resume=True)] if world == 2 else []
            plan, ends = [*plan, Start(through), *more], [*ends, "", *["StoppedError", ""][: len(more)]]
            found[world, stage, embeddings] = folders[0]
        for outcomes in run_workers(world, starts, plan):
            assert [outcome.partition(":")[0] for outcome in outcomes] == ends
    return found


def losses(run: Path, split: str = "train") -> list[tuple[float, ...]]:
    keys = ("step", "loss", "mlm_loss", "rtd_loss", "rtd_accuracy")
    return [tuple(record[key] for key in keys) for record in records(run, split)]


def test_resumed_runs_are_bitwise_those_never_interrupted(runs) -> None:
    for through in (folder for (world, *_), folder in runs.items() if world == 2):
        broken = through.with_name(through.name.replace("through", "broken"))
        assert losses(broken) == losses(through)
        assert losses(broken, "validation") == losses(through, "validation")
        assert [one[0] for one in losses(through)] == list(range(1, STEPS + 1))
        final = f"checkpoints/step-{STEPS:08d}"
        weights = {path.name: path.read_bytes() for path in (through / final).glob("*.safetensors")}
        assert weights == {path.name: path.read_bytes() for path in (broken / final).glob("*.safetensors")}


@pytest.mark.parametrize("embeddings", EMBEDDINGS)
def test_losses_do_not_depend_on_workers_or_stage(runs, embeddings: str) -> None:
    one, two = (folder for (_, _, kind), folder in runs.items() if kind == embeddings)
    for found, wanted in zip(losses(one), losses(two), strict=True):
        assert found == pytest.approx(wanted, rel=2e-5)
    for _, loss, mlm, rtd, accuracy in losses(one):
        assert loss == pytest.approx(mlm + 50 * rtd, rel=1e-5)
        assert 0 < accuracy < 1


def test_a_run_is_exported_as_two_models_and_read_as_the_discriminator(runs, corpus: Path, tmp_path: Path) -> None:
    from transformers import ElectraForMaskedLM, ElectraForPreTraining

    for (_, stage, embeddings), folder in list(runs.items())[:2]:
        values = settings(corpus, folder, engine__zero_stage=stage, electra__embeddings=embeddings)
        (folder / "config.yaml").write_text(yaml.safe_dump(values))
        hf.export_run(folder, tmp_path / embeddings)
        assert ElectraForPreTraining.from_pretrained(tmp_path / embeddings).config.embedding_size == 24
        generator = ElectraForMaskedLM.from_pretrained(tmp_path / f"{embeddings}-generator")
        assert generator.config.hidden_size == 16
        cards = [(tmp_path / f"{embeddings}{kind}" / "README.md").read_text() for kind in ("", "-generator")]
        assert [card.count("fill-mask") for card in cards] == [0, 3]
        for card, width, kind in zip(cards, (32, 16), ("discriminator", "generator"), strict=True):
            assert f"hidden width {width} " in card
            assert f"as the {kind} of ELECTRA" in card
        whole = PretrainConfig.model_validate(values)
        state = store.read_weights(store.latest(folder / "checkpoints") or Path())
        PretrainingModel(whole.electra.generator(whole.model), 300, False).load_state_dict(generator_state(state))
        run, exported = read_released(folder), read_released(tmp_path / embeddings)
        assert run.family == exported.family == "electra"
        assert run.backbone.keys() == exported.backbone.keys()
        assert all(torch.equal(run.backbone[name], exported.backbone[name]) for name in run.backbone)
