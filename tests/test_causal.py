"""Causal sequences beside masked ones: batches, attention, losses, whole runs (invariants 1 to 3)."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches_by_hand import make_batch
from corpora import make_corpus
from test_batches_objectives import maker, run_config
from torch import Tensor

from pretrain.batches.batch import MicroBatch
from pretrain.batches.loader import validation_batches
from pretrain.common.errors import InputError
from pretrain.config import ModelConfig, load_config
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.model.attention import AttentionOptions, ProjectionWeights, TokenLayout, self_attention
from pretrain.model.heads import PretrainingModel
from pretrain.objectives.masked import MaskedTokens
from pretrain.work import Flops
from tests.distributed import run_workers
from tests.starts import Start, make_starts, pretraining, records


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "c", documents=60, vocabulary_size=300)


@pytest.fixture(scope="module")
def shards(folder: Path) -> TokenShards:
    return open_shards(folder, "train")


def causal_config(share: float = 0.25, **sections: Any):
    return run_config(phases=[{"causal_share": share}], pairs={"objective": "none"}, **sections)


# ---- batches


@pytest.mark.parametrize("shifted", [False, True])
def test_causal_sequences_are_unmasked_and_predict_every_next_token(shards: TokenShards, shifted: bool) -> None:
    config = causal_config(masking={"shifted_targets": shifted})
    plain = maker(shards, run_config(pairs={"objective": "none"}))
    seen = 0
    for step in range(6):
        expected = {one[1]: one for micro in plain.make(24 * step, 24).micro_batches for one in sequences(micro)}
        for micro in maker(shards, config).make(24 * step, 24).micro_batches:
            found = list(sequences(micro))
            assert micro.lengths[: -micro.causal or None] == tuple(sorted(micro.lengths[: -micro.causal or None]))
            for number, (ids, keys, targets) in enumerate(found):
                before, _, masked = expected[keys]
                if number < len(found) - micro.causal:
                    assert (ids, [(row + shifted, label) for row, label in targets]) == (before, masked)
                    continue
                seen += 1
                original = list(before)
                for row, label in masked:
                    original[row] = label
                assert ids == tuple(original)
                assert targets == [(row - 1, ids[row]) for row in range(1, len(ids) - 1)]
    assert seen == pytest.approx(0.25 * 144, abs=18)


def sequences(micro: MicroBatch):
    """Of each sequence: its ids, its token keys, and where it predicts which tokens."""
    targets = list(zip(micro.masked_rows.tolist(), micro.masked_labels.tolist(), strict=True))
    assert [row for row, _ in targets] == sorted(row for row, _ in targets)
    for begin, end in itertools.pairwise(micro.cu_seqlens.tolist()):
        own = [(row - begin, label) for row, label in targets if begin <= row < end]
        yield tuple(micro.input_ids[begin:end].tolist()), tuple(micro.token_keys[begin:end].tolist()), own


def test_a_causal_phase_has_no_masked_token_and_evaluations_no_causal_one(folder: Path, shards: TokenShards) -> None:
    batch = maker(shards, causal_config(1.0)).make(0, 24)
    assert (batch.masked, batch.causal) == (0, 24)
    assert batch.causal_targets == batch.tokens - 2 * 24
    held_out = open_shards(folder, "validation")
    with_causal, without = (
        validation_batches(held_out, config, 0, rank=0, world_size=1)
        for config in (causal_config(1.0), run_config(pairs={"objective": "none"}))
    )
    assert [step.masked for step in with_causal] == [step.masked for step in without]
    assert all(step.causal == 0 for step in with_causal)


def test_causal_sequences_are_refused_beside_what_they_do_not_fit(tmp_path: Path) -> None:
    """[CLS] would see nothing of a pair of segments; a pair of tokens contains the one that is to be predicted."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: x\ncorpus: {dir: c}\n"
        "phases: [{sequence_length: 64, global_sequences: 8, steps: 2, peak_learning_rate: 0.1, causal_share: 0.5}]\n"
    )
    with pytest.raises(InputError, match=r"phases.0.causal_share \(0.5\) does not fit the objective nsp"):
        load_config(path)
    assert load_config(path, ["pairs.objective=none"]).has_causal
    with pytest.raises(InputError, match=r"causal_share \(0.5\) does not fit model.bigram_rows \(100\)"):
        load_config(path, ["pairs.objective=none", "model.bigram_rows=100"])


# ---- attention


def reference(qkv: Tensor, lengths: tuple[int, ...], heads: int, causal: int, window: int) -> Tensor:
    """One sequence at a time, with a whole matrix of what each token sees."""
    contexts, first = [], 0
    for number, length in enumerate(lengths):
        q, k, v = qkv[first : first + length].unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        sees = torch.ones(length, length, dtype=torch.bool) if not window else distance.abs() <= window
        if number >= len(lengths) - causal:
            sees = sees & (distance >= 0)
        contexts.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, sees).transpose(0, 1).flatten(1))
        first += length
    return torch.cat(contexts)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("causal", [0, 2, 5])
@pytest.mark.parametrize("asked", [None, (0, 2, 5, 12, 13, 40, 41, 41, 76), (70, 71)])
def test_attention_is_causal_in_the_last_sequences(asked: tuple[int, ...] | None, causal: int, window: int) -> None:
    torch.manual_seed(0)
    lengths = (5, 7, 21, 19, 25)
    batch, hidden = make_batch(lengths), torch.randn(77, 24, requires_grad=True)
    weight, bias = torch.randn(72, 24, requires_grad=True), torch.randn(72, requires_grad=True)
    rows = None if asked is None else torch.tensor(asked)
    begin = sum(lengths[: len(lengths) - causal])
    layout = TokenLayout(batch.cu_seqlens, lengths, rows, batch.token_keys, causal=causal, causal_begin=begin)
    layout = layout._replace(causal_rows=sum(row >= begin for row in asked or ()))
    ours = self_attention(hidden, ProjectionWeights((weight,), (bias,)), layout, AttentionOptions(3, window=window))
    theirs = reference(torch.nn.functional.linear(hidden, weight, bias), lengths, 3, causal, window)
    theirs = theirs if rows is None else theirs[rows]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    probe = torch.randn_like(ours)
    gradients = [torch.autograd.grad((out * probe).sum(), (hidden, weight, bias)) for out in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-4)


def small_model(**more: Any) -> PretrainingModel:
    torch.manual_seed(0)
    shape = {"size": "custom", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64, **more}
    return PretrainingModel(ModelConfig.model_validate(shape), 101, False)


def test_a_causal_sequence_does_not_see_what_follows() -> None:
    model = small_model().eval()
    batch = dataclasses.replace(make_batch((9, 12, 15)), causal=2)
    changed = dataclasses.replace(batch, input_ids=batch.input_ids.clone())
    changed.input_ids[[8, 20, 35]] += 1  # the last token of each
    before, after = (model.encode(one, causal=2) for one in (batch, changed))
    same = (before == after).all(1)
    assert not same[:9].any()
    assert same[9:20].all()
    assert same[21:35].all()
    assert not same[[20, 35]].any()


@pytest.mark.parametrize("window", [0, 4])
def test_keys_behind_the_query_are_not_counted_as_work(window: int) -> None:
    shape = {"local_attention": 2 * window, "global_every": 2} if window else {}
    model = {"size": "custom", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64, **shape}
    config, (masked, causal) = causal_config(0.5, model=model), (21, 25)
    distance = torch.arange(causal)[:, None] - torch.arange(causal)
    layers = [distance.abs() <= w if w else distance.abs() >= 0 for w in (0, window)]
    unseen = 12 * 32 * sum(int((sees & (distance < 0)).sum()) for sees in layers)
    counted = Flops(config, 300)
    for count, part in ((counted.useful, 1), (counted.of_models, 1), (counted.executed, 7 / 6)):
        whole, less = count([masked, causal], 30), count([masked, causal], 30, [causal])
        assert whole - less == pytest.approx(part * unseen)
    batch = dataclasses.replace(make_batch((masked, causal)), causal=1)
    assert MaskedTokens(config, 300).flops(batch) == counted.of_models((masked, causal), batch.targets, (causal,))


# ---- losses


def gradients(shards: TokenShards, config: Any) -> tuple[list[Tensor], dict[str, float]]:
    """Of one global batch: gradients, and metrics."""
    model = small_model(hidden_dropout=0.1, attention_dropout=0.1).train()
    model.embeddings.word.data = torch.randn(300, 32, generator=torch.Generator().manual_seed(1)) * 0.3
    model.heads.mlm_bias.data = torch.zeros(300)
    objective = MaskedTokens(config, 300)
    model.heads.z_loss = objective.model.heads.z_loss
    step = maker(shards, config).make(0, 24)
    total = torch.zeros(8 if config.masking.z_loss else 6)
    for micro in step.micro_batches:
        output = model(micro)
        objective.loss(output, objective.loss_weights(step)).backward()
        total = total + objective.totals(output).detach()
    metrics = objective.metrics(total.tolist(), objective.counts(step).tolist())
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], metrics


def test_losses_are_normalised_over_the_global_batch(shards: TokenShards) -> None:
    """The same gradients, whatever the micro-batches are; sequences of both kinds weigh the same."""
    whole, metrics = gradients(shards, causal_config(budget=4096))
    parts, again = gradients(shards, causal_config(budget=64))
    torch.testing.assert_close(whole, parts, atol=1e-5, rtol=1e-3)
    assert metrics == pytest.approx(again, rel=1e-4)
    step = maker(shards, causal_config()).make(0, 24)
    assert 0 < step.causal < 24
    share = step.causal / 24
    assert metrics["loss"] == pytest.approx((1 - share) * metrics["mlm_loss"] + share * metrics["causal_loss"])


def with_z_loss(config: Any) -> Any:
    return config.model_copy(update={"masking": config.masking.model_copy(update={"z_loss": 0.01})})


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_z_loss_is_part_of_the_loss_and_of_no_cross_entropy(shards: TokenShards, share: float) -> None:
    """Normalised over the global batch, as the losses that it belongs to."""
    plain, without = gradients(shards, causal_config(share))
    whole, metrics = gradients(shards, with_z_loss(causal_config(share, budget=4096)))
    parts, again = gradients(shards, with_z_loss(causal_config(share, budget=64)))
    torch.testing.assert_close(whole, parts, atol=1e-5, rtol=1e-3)
    assert metrics == pytest.approx(again, rel=1e-4)
    assert any((one - other).abs().max() > 1e-4 for one, other in zip(plain, whole, strict=True))
    z_loss = metrics.pop("z_loss")
    assert z_loss > 0
    assert metrics.pop("loss") == pytest.approx(without.pop("loss") + z_loss)
    assert metrics == pytest.approx(without, rel=1e-4)


def test_a_causal_phase_trains_on_causal_losses_alone(shards: TokenShards) -> None:
    found, metrics = gradients(shards, causal_config(1.0))
    assert set(metrics) == {"loss", "causal_loss", "causal_accuracy"}
    assert metrics["loss"] == metrics["causal_loss"]
    assert all(torch.isfinite(gradient).all() for gradient in found)


# ---- whole runs


def starts(given: list[Start]) -> list[str]:
    from pretrain import train

    return make_starts(train.main, given)


def test_a_run_with_every_schedule_resumes_bitwise(folder: Path, tmp_path: Path) -> None:
    def settings(name: str) -> dict[str, Any]:
        run = pretraining(
            folder,
            tmp_path / name,
            [(32, 12, 3), (64, 6, 3)],
            engine__micro_batch_tokens=256,
            evaluation__every_steps=3,
            pairs={"objective": "none", "input_format": "full_sentences"},
            masking={"probability": 0.3, "final_probability": 0.15, "scheme": "spans", "whole_word": True},
        )
        run["phases"][0]["causal_share"] = 1.0
        run["phases"][1]["causal_share"] = 0.5
        return run

    through, broken = settings("through"), settings("broken")
    plan = [Start(through), Start(broken, stop_at=2), Start(broken, resume=True)]
    for outcomes in run_workers(2, starts, plan):
        assert [outcome.partition(":")[0] for outcome in outcomes] == ["", "StoppedError", ""]
    kept = ("step", "loss", "mlm_loss", "causal_loss", "causal_accuracy", "tokens")
    for split in ("train", "validation"):
        first, second = (
            [{key: record.get(key) for key in kept} for record in records(Path(run["run_dir"]), split)]
            for run in (through, broken)
        )
        assert first == second
    made = records(Path(through["run_dir"]))
    assert ["mlm_loss" in record for record in made] == [False] * 3 + [True] * 3
    assert all(np.isfinite(record["causal_loss"]) for record in made)


def test_micro_batches_of_one_kind_and_of_both_train_alike_at_every_stage(folder: Path, tmp_path: Path) -> None:
    """ZeRO 3 gathers parameters for each loss that is differentiated, on all ranks at once."""
    plan = []
    for stage in (1, 3):
        small = {"zero_stage": stage, "precision": "fp32", "compile": False, "micro_batch_tokens": 128}
        run = pretraining(folder, tmp_path / f"{stage}", [(32, 8, 6)], pairs__objective="none", engine=small)
        run["phases"][0]["causal_share"] = 0.25
        plan.append(Start(run))
    assert run_workers(2, starts, plan) == [["", ""]] * 2
    first, second = ([record["loss"] for record in records(tmp_path / f"{stage}")] for stage in (1, 3))
    assert len(first) == 6
    assert first == pytest.approx(second, rel=1e-5)
