"""The scaling law and the recommendation: planted laws are found again, and what is recommended is the best of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import make_corpus, make_vocabulary, write_corpus
from planned_laws import PLANTED, planted_law, planted_points
from scipy.optimize import minimize

from finetune.cli import main
from pretrain.batches.loader import BatchMaker
from pretrain.common.errors import InputError
from pretrain.common.files import write_json
from pretrain.common.settings import dump
from pretrain.config import PretrainConfig, load_config
from pretrain.planning import estimate, pace, published, recommend, speed, table, work
from pretrain.planning.budget import Budget, parse_budget
from pretrain.planning.candidates import effective_size, plan, with_batch, with_shape, with_workers, works
from pretrain.planning.law import MOST_REPETITIONS, Law, effective_tokens, interval, useful_size
from pretrain.planning.published import Recipe
from pretrain.planning.recommend import choose, recommendation
from pretrain.planning.speed import ThisMachine
from pretrain.planning.text import PhaseText, RunText, read_text
from pretrain.planning.work import optimizer_flops
from pretrain.run.continuation import Corpora
from tests.bench.law.fitting import EXPONENT, FEWEST, Points, as_points, best_size, fit, objective
from tests.tasks.refusals import refused

CONFIGS = Path(__file__).parents[2] / "configs" / "pretrain"
ONE_SEQUENCE = {"micro_batch_tokens": 128}  # in a micro-batch
ENDLESS = RunText((PhaseText(100.0, math.inf),), "a text that does not repeat", False)


def mini(**values: Any) -> PretrainConfig:
    config = load_config(CONFIGS / "mini.yaml")
    return PretrainConfig.model_validate({**config.model_dump(), "corpus": {"dir": "nowhere"}, **values})


# ---- the law


def test_repeated_tokens_saturate() -> None:
    assert effective_tokens(5e6, 10e6) == pytest.approx(5e6)  # not even read once
    assert effective_tokens(10e6, 10e6) == pytest.approx(10e6)
    ten = float(effective_tokens(100e6, 10e6))
    assert ten == pytest.approx(10e6 * (1 + 15.4 * (1 - math.exp(-9 / 15.4))))
    assert 20e6 < ten < 100e6
    assert effective_tokens(1e12, 10e6) == pytest.approx(10e6 * (1 + MOST_REPETITIONS))
    np.testing.assert_allclose(effective_tokens(np.array([1e6, 1e9]), np.inf), [1e6, 1e9])


@pytest.mark.parametrize(
    ("tokens", "unique", "worth"), [(21.5e6, 1.56e6, 11.6e6), (21.4e6, 4.13e6, 18.9e6), (4.3e6, 0.38e6, 1.76e6)]
)
def test_little_text_saturates_as_measured(tokens: float, unique: float, worth: float) -> None:
    """By the losses of 4x256 in docs/benchmarks/scaling-law.md; with 15.4 repetitions the last is worth 3.2 million."""
    assert float(effective_tokens(tokens, unique)) == pytest.approx(worth, rel=0.06)
    assert float(effective_tokens(2 * tokens, unique)) > float(effective_tokens(tokens, unique))
    texts = np.geomspace(1e5, 1e9, 50)
    worths = effective_tokens(20 * texts, texts) / texts
    assert (np.diff(worths) > -1e-9).all(), "more text saturates later"
    assert worths[0] < 3 < 11 < worths[-1]


def test_excess_parameters_saturate_where_text_repeats() -> None:
    assert useful_size(1e9, 5e6, 10e6) == useful_size(1e9, 10e6, 10e6) == useful_size(1e9, 1e9, np.inf) == 1e9
    assert useful_size(5e6, 100e6, 10e6) == 5e6, "fewer parameters than unique tokens are no excess"
    enough = 1e6 * 10 / 9  # with 9 repetitions of a million tokens
    assert useful_size(4e6, 10e6, 1e6) == pytest.approx(
        enough * (1 + 5.31 * (1 - math.exp(-(4e6 / enough - 1) / 5.31)))
    )
    assert useful_size(1e12, 10e6, 1e6) == pytest.approx(enough * 6.31)
    sizes = np.asarray(useful_size(np.geomspace(1e5, 1e9, 50), 10e6, 1e6))
    assert (np.diff(sizes) > -1e-6).all()


def test_predictions_without_repetition_know_no_excess() -> None:
    law = published.read().law
    for size in (7e5, 9e6, 1e9):
        for tokens in (1e6, 3e7):
            expected = law.floor + law.size_scale / size**law.size_exponent + law.data_scale / tokens**law.data_exponent
            assert law.loss(size, tokens, tokens) == law.loss(size, tokens) == pytest.approx(expected)
    points = published.read().points
    np.testing.assert_array_equal(as_points(points).size, [point.size for point in points])


@pytest.mark.parametrize("flops", [1e13, 1e15, 1e18])
def test_the_best_size_is_the_minimum(flops: float) -> None:
    sizes = np.geomspace(1e4, 1e10, 20001)
    losses = np.asarray(PLANTED.loss(sizes, flops / 6 / sizes))
    assert best_size(PLANTED, flops) == pytest.approx(sizes[losses.argmin()], rel=2e-3)


def test_a_planted_law_is_found_again() -> None:
    """Without noise, the priors move the coefficients by little and the predictions by less."""
    found = fit(as_points(planted_points()), resamples=0).law
    assert found.floor == pytest.approx(PLANTED.floor, rel=0.03)
    assert found.size_exponent == pytest.approx(PLANTED.size_exponent, rel=0.02)
    assert found.data_exponent == pytest.approx(PLANTED.data_exponent, rel=0.02)
    for size, tokens in ((1e6, 5e6), (5e6, 5e7), (1e7, 1e8)):
        assert float(found.loss(size, tokens)) == pytest.approx(float(PLANTED.loss(size, tokens)), rel=2e-3)


def test_a_noisy_law_predicts_and_says_how_well() -> None:
    """1 % of noise: ten times the largest budget is predicted within 3 %, and the interval holds the truth."""
    found = fit(as_points(planted_points(0.01)))
    size = best_size(PLANTED, 2e15)
    truth = float(PLANTED.loss(size, 2e15 / 6 / size))
    assert float(found.law.loss(size, 2e15 / 6 / size)) == pytest.approx(truth, rel=0.03)
    low, high = interval(found.resampled, size, 2e15 / 6 / size)
    assert low < truth < high
    near, far = (high - low for low, high in (interval(found.resampled, size, tokens) for tokens in (1e7, 1e9)))
    assert far > 1.5 * near, "farther from the points, less is known"


def test_what_the_points_do_not_determine_varies_as_its_prior() -> None:
    """Runs of one size say nothing of alpha."""
    points = as_points([point for point in planted_points(0.002) if point.shape == "4x256"] * 3)
    exponents = [law.size_exponent for law in fit(points).resampled]
    assert np.std(exponents) == pytest.approx(EXPONENT.deviation, rel=0.25)
    assert np.mean(exponents) == pytest.approx(EXPONENT.mean, abs=0.05)


def test_one_outlier_moves_a_huber_fit_little() -> None:
    points = as_points(planted_points(0.002))
    loss = points.loss.copy()
    loss[5] *= 1.2
    found = fit(Points(points.size, points.tokens, loss), resamples=0).law
    assert float(found.loss(3e6, 1e7)) == pytest.approx(float(PLANTED.loss(3e6, 1e7)), rel=0.01)


def test_the_minimum_is_that_of_lbfgs() -> None:
    points = as_points(planted_points(0.01))

    def value(x: np.ndarray) -> float:
        return 1e5 * objective(Law(np.exp(x[2]), np.exp(x[0]), x[3], np.exp(x[1]), x[4]), points)

    starts = [(math.log(a), math.log(a), math.log(e), x, x) for a in (20, 80) for e in (0.2, 0.6) for x in (0.25, 0.4)]
    lbfgs = min(float(minimize(value, start, method="L-BFGS-B").fun) for start in starts)
    ours = 1e5 * objective(fit(points, resamples=0).law, points)
    assert ours <= lbfgs * (1 + 1e-3)


def test_too_few_points_are_refused() -> None:
    points = as_points(planted_points()[: FEWEST - 1])
    with pytest.raises(ValueError, match=f"5 points; expected at least {FEWEST}"):
        fit(points)


# ---- the file


def test_a_law_is_written_and_read(tmp_path: Path) -> None:
    law = planted_law(0.01)
    write_json(tmp_path / "law.json", law.model_dump(mode="json"))
    assert published.read(tmp_path / "law.json") == law
    assert law.error(law.fitted) < 0.04
    (tmp_path / "law.json").write_text('{"format": 1}')
    refused(r"law.json: not a law of `bench law` \(coefficients: ", published.read, tmp_path / "law.json")
    refused(r"cannot be read .*bench law", published.read, tmp_path / "none.json")


def test_a_recipe_names_what_differs() -> None:
    constant = {"masking_probability": 0.15, "final_masking_probability": 0.0}
    masked = mini(phases=[{**mini().phases[0].model_dump(), **constant}])
    law = Recipe.of(mini(), masked)
    assert law.values["masking"] == "0.3 to 0.15, 0.15"
    assert law.differing(Recipe.of(masked)) == []
    adam = mini(optimizer={"name": "adamw"})
    assert law.differing(Recipe.of(adam)) == ["optimizer adamw"]


def test_a_recipe_has_the_objectives_of_phases_and_the_vocabulary_that_is_used(tmp_path: Path) -> None:
    law, phase = Recipe.of(mini()), mini().phases[0].model_dump()
    own = {**phase, "steps": 10, "ramp_from": 0, "ramp_steps": 0, "warmup_steps": 0, "decay_steps": 0}
    assert law.differing(Recipe.of(mini(phases=[own, own]))) == ["sequence length 128 and 128"]
    masked = [{**phase, "masking_probability": 0.6, "final_masking_probability": 0.0}]
    assert law.differing(Recipe.of(mini(phases=masked))) == ["masking 0.6"]
    assert law.differing(Recipe.of(mini(pairs={"objective": "sop"}))) == ["masking 0.3 to 0.15 with sop"]
    repeated = mini(model={**mini().model.model_dump(), "recursions": 2})
    assert law.differing(Recipe.of(repeated)) == ["family modernbert with recursions 2"]
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(100))]
    (tmp_path / "vocab.txt").write_text("\n".join(entries))
    given = {"dir": "nowhere", "vocabulary": {"path": str(tmp_path / "vocab.txt")}}
    assert law.differing(Recipe.of(mini(corpus=given))) == ["vocabulary 105"]


# ---- budgets


@pytest.mark.parametrize(
    ("text", "seconds", "flops"),
    [("2h", 7200, 0), ("30m", 1800, 0), ("90s", 90, 0), ("1h30m", 5400, 0), ("1.5H", 5400, 0), ("0.5e15", 0, 5e14)],
)
def test_budgets(text: str, seconds: float, flops: float) -> None:
    assert parse_budget(text) == Budget(text, seconds, flops)


@pytest.mark.parametrize("text", ["", "0s", "120", "2 hours", "-1h", "nan", "inf", "1e40", "h", "30m2h", "9999d"])
def test_budgets_that_say_nothing(text: str) -> None:
    refused(r"expected a time such as 2h, 30m", parse_budget, text)


# ---- candidates


def test_sizes_count_what_every_token_uses() -> None:
    """The layers' matrices and attention count whole, the decoder by the share of masked tokens, Muon not at all."""
    config = mini()
    one = works(config, ENDLESS)
    size = effective_size(config, one)
    adam = mini(optimizer={"name": "adamw"})
    assert effective_size(adam, works(adam, ENDLESS)) == pytest.approx(size)
    larger = with_batch(config, 1e9)
    assert effective_size(larger, works(larger, ENDLESS)) == pytest.approx(size), "a batch has no size"
    model = config.model
    matrices = model.layers * (4 * model.hidden**2 + 3 * model.hidden * model.intermediate)
    decoder = 0.225 * model.hidden * config.corpus.vocabulary.size
    assert 0.85 * (matrices + decoder) < size < 1.15 * (matrices + decoder)


def test_layers_that_run_again_make_no_larger_model() -> None:
    plain, again = (mini(engine={"activation_checkpointing": on}) for on in (False, True))
    sizes = [effective_size(config, works(config, ENDLESS)) for config in (plain, again)]
    assert sizes[0] == pytest.approx(sizes[1])
    flops = [sum(one.executed for one in works(config, ENDLESS)) for config in (plain, again)]
    assert flops[1] > 1.1 * flops[0], "they are paid for"


def test_shapes_keep_the_block() -> None:
    config = mini()
    other = with_shape(config, 6, 320)
    assert (other.model.layers, other.model.heads, other.model.intermediate) == (6, 5, 480)
    assert other.phases[0].peak_learning_rate == pytest.approx(config.phases[0].peak_learning_rate * 256 / 320)
    same = {"size", "layers", "hidden", "heads", "intermediate"}
    assert other.model.model_dump(exclude=same) == config.model.model_dump(exclude=same)
    assert with_shape(config, 4, 256) == config


def test_batches_grow_with_the_square_root_of_the_tokens() -> None:
    sizes = [with_batch(mini(), tokens).phases[0].global_sequences for tokens in (1e3, 1.2e7, 4 * 1.2e7, 1e15)]
    assert sizes == [16, 64, 128, 2048]
    config = mini(optimizer={"name": "adamw"})
    larger = with_batch(config, 16 * 1.2e7).phases[0]
    assert larger.global_sequences == 256
    assert larger.peak_learning_rate == pytest.approx(2 * config.phases[0].peak_learning_rate)
    assert with_batch(mini(), 1e15).phases[0].peak_learning_rate == mini().phases[0].peak_learning_rate


def test_longer_runs_have_lower_rates() -> None:
    """By the power -0.32 of the tokens, from those of the config's own steps."""
    own = sum(one.tokens for one in works(mini(), ENDLESS))
    for factor in (0.25, 1.0, 30.0):
        flops = factor * sum(one.executed for one in works(mini(), ENDLESS))
        found = plan(mini(), Budget("", flops=flops), ENDLESS, None)
        expected = mini().phases[0].peak_learning_rate * (found.tokens / own) ** -0.32
        assert found.config.phases[0].peak_learning_rate == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("scheduling", "expected"), [({"workers": 3}, 66), ({"workers": 4, "min_workers": 3}, 72)])
def test_batches_can_be_balanced_across_the_workers(scheduling: dict[str, int], expected: int) -> None:
    """If a micro-batch holds one sequence, a batch is a multiple of every number of workers."""
    phase = {"sequence_length": 128, "global_sequences": 36, "steps": 10, "peak_learning_rate": 1e-3}
    config = mini(phases=[phase], scheduling=scheduling, engine={"micro_batch_tokens": 128})
    assert with_batch(config, 1.2e7).phases[0].global_sequences == expected
    roomy = mini(phases=[phase], scheduling=scheduling, engine={"micro_batch_tokens": 256})
    assert with_batch(roomy, 1.2e7).phases[0].global_sequences == 64


def test_rates_follow_the_batch_that_workers_need() -> None:
    phase = {**mini().phases[0].model_dump(), "global_sequences": 64, "ramp_from": 0, "ramp_steps": 0}
    config = mini(phases=[phase, {**phase, "global_sequences": 16}], optimizer={"name": "adamw"})
    rate = config.phases[0].peak_learning_rate
    for workers, batches in ((1, [64, 16]), (16, [64, 16]), (512, [2048, 512])):
        found = with_batch(with_workers(config, workers), 1.2e7).phases
        assert [one.global_sequences for one in found] == batches
        expected = rate * math.sqrt(batches[0] / 64)
        assert [one.peak_learning_rate for one in found] == pytest.approx([expected] * 2, rel=1e-2)
    # A micro-batch holds one sequence: the batch of the second phase is rounded up to a multiple of the workers.
    tight = mini(phases=[phase, {**phase, "global_sequences": 20}], optimizer={"name": "adamw"}, engine=ONE_SEQUENCE)
    found = with_batch(with_workers(tight, 16), 1.2e7).phases
    assert [one.global_sequences for one in found] == [64, 32]
    assert found[1].peak_learning_rate == pytest.approx(rate * math.sqrt(32 / 20), rel=1e-2)


def test_a_size_that_the_config_cannot_have_is_named() -> None:
    config = mini(distillation={"teacher": "runs/x", "layers": (0, 1, 2, 3)})
    refused(r"^--budget: this config has no size 2x128: distillation.layers .* 4 numbers", with_shape, config, 2, 128)


def test_phases_keep_their_proportions() -> None:
    phase = {**mini().phases[0].model_dump(), "ramp_from": 0, "ramp_steps": 0}
    long = {**phase, "sequence_length": 64, "global_sequences": 32, "ramp_from": 8, "ramp_steps": 40}
    config = mini(phases=[phase, long])
    text = RunText((PhaseText(100.0, math.inf), PhaseText(50.0, math.inf)), "", False)
    flat = mini(phases=[phase, {**long, "ramp_from": 0, "ramp_steps": 0}])
    before = [one.tokens for one in works(flat, text)]
    found = plan(config, Budget("", flops=3e14), text, None)
    after = [one.tokens for one in works(found.config, text)]
    assert after[1] / after[0] == pytest.approx(before[1] / before[0], rel=0.02)
    assert found.flops == pytest.approx(3e14, rel=0.02)


class Steady:
    """A machine of 1 TFLOP/s."""

    source = "a steady machine"

    def seconds(self, config: PretrainConfig, work: Any) -> float:
        return sum(one.executed for one in work) / 1e12


def test_a_time_is_filled_and_a_text_read_ten_times_at_most() -> None:
    found = plan(mini(), Budget("", seconds=3600), ENDLESS, Steady())
    assert found.seconds == pytest.approx(3600, rel=0.01)
    assert found.flops == pytest.approx(0.95 * 3600e12, rel=0.01)
    assert not found.is_capped
    short = RunText((PhaseText(100.0, 1e4),), "", False)
    capped = plan(mini(), Budget("", seconds=3600), short, Steady())
    assert capped.is_capped
    assert capped.epochs == pytest.approx(10, rel=0.01)
    assert capped.unique == pytest.approx(1e6)
    assert capped.seconds < 1800


def test_this_machines_speed_is_calibrated_by_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibrated shape has the measured time, and what lies between products weighs more in narrow models."""
    monkeypatch.setattr(speed, "product_times", lambda shapes, *_: [6 * a * b / 1e12 for a, b in shapes])
    here, config = ThisMachine("cpu", "fp32"), mini()
    one = works(config, ENDLESS)
    assert here.seconds(config, one) == pytest.approx(one[0].executed / 1e12 / 0.5)
    step = 3 * one[0].executed / one[0].steps / 1e12
    here.calibrate(config, one[0], step)
    assert here.seconds(config, one) == pytest.approx(step * one[0].steps)
    narrow, wide = with_shape(config, 2, 128), with_shape(config, 12, 768)
    ratios = [here.seconds(c, works(c, ENDLESS)) / (works(c, ENDLESS)[0].executed / 1e12) for c in (narrow, wide)]
    assert ratios[0] > 3 > ratios[1] > 1
    here.calibrate(config, one[0], step / 6)  # faster than the products alone
    assert here.seconds(config, one) == pytest.approx(step / 6 * one[0].steps)


def test_a_run_uses_one_gpu_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine's eight."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr(speed, "product_times", lambda shapes, *_: [6 * a * b / 1e12 for a, b in shapes])
    monkeypatch.setattr(estimate, "measure_peak", lambda *_: ("cuda", 7e14))
    for workers, used in ((1, 1), (4, 4), (16, 8)):
        config = mini(scheduling={"workers": workers}, engine={"precision": "bf16"})
        assert estimate.parse_cluster("here", config).peak_flops == used * 7e14
        assert ThisMachine("cuda", "bf16").rate(config, works(config, ENDLESS)) == pytest.approx(used * 1e12)


def test_products_are_timed() -> None:
    times = speed.product_times([(64, 64), (512, 512)], "cpu", "fp32")
    assert len(times) == 2
    assert 0 < times[0] < times[1]


# ---- text


def test_a_text_is_measured_estimated_or_unknown(tmp_path: Path) -> None:
    config = mini(corpus={"dir": str(make_corpus(tmp_path / "corpus"))})
    found = read_text(config)
    assert found.is_prepared
    assert 10 < found.phases[0].mean_length <= 128
    assert found.phases[0].samples_per_epoch > 100
    (tmp_path / "a.jsonl").write_text("x" * 22000)
    source = {"kind": "jsonl", "name": "a", "path": str(tmp_path / "a.jsonl")}
    guessed = read_text(mini(corpus={"dir": str(tmp_path / "new"), "sources": [source]}))
    tokens = guessed.phases[0].samples_per_epoch * guessed.phases[0].mean_length
    assert tokens == pytest.approx(5 * 4400 / 4.4)
    assert "not prepared. Assumed: 0.005 million tokens" in guessed.source
    (tmp_path / "a.jsonl.gz").write_bytes((tmp_path / "a.jsonl").read_bytes())  # a size, not a content
    source["path"] = str(tmp_path / "a.jsonl.gz")
    packed = read_text(mini(corpus={"dir": str(tmp_path / "new"), "sources": [source]}))
    assert packed.phases[0].samples_per_epoch == pytest.approx(3 * guessed.phases[0].samples_per_epoch)
    dump = {"kind": "mediawiki", "name": "a", "path": str(tmp_path / "a.xml.bz2")}
    (tmp_path / "a.xml.bz2").write_bytes((tmp_path / "a.jsonl").read_bytes())
    markup = read_text(mini(corpus={"dir": str(tmp_path / "new"), "sources": [dump]}))
    assert markup.phases[0].samples_per_epoch == pytest.approx(guessed.phases[0].samples_per_epoch)
    assert read_text(mini()).phases[0].samples_per_epoch == math.inf
    source["path"] = str(tmp_path / "none.jsonl")
    unknown = read_text(mini(corpus={"dir": str(tmp_path / "new"), "sources": [source]}))
    assert unknown.phases[0].samples_per_epoch == math.inf
    assert "none.jsonl" in unknown.source


def test_a_dry_run_has_the_tokens_of_the_prepared_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within 1 % of those of all batches, in each phase. Without a corpus they are assumed."""
    config = two_lengths(corpus={"dir": str(make_corpus(tmp_path / "corpus"))})
    (tmp_path / "run.yaml").write_text(dump(config))
    printed = dry_run_tokens(tmp_path / "run.yaml", capsys, "measured on ")
    assert printed == pytest.approx([length * 12800 for length in counted_lengths(config)], rel=0.01)
    most = [one.sequences * one.sequence_length for one in config.phases]
    assert printed[0] < 0.94 * most[0], "it is not what is assumed"
    (tmp_path / "run.yaml").write_text(dump(two_lengths()))
    assumed = dry_run_tokens(tmp_path / "run.yaml", capsys, "assumed, 0.8 of the length; `prepare` ")
    assert assumed == pytest.approx([work.ASSUMED_FILL * one for one in most], rel=1e-3)


def test_replayed_text_counts_in_the_mean_length(tmp_path: Path) -> None:
    """A text of questions, half replaced by long documents."""
    short = [[np.arange(10, 30)] for _ in range(3000)]
    own = write_corpus(
        tmp_path / "own", {"train": [(0, short)], "validation": [(0, short[:20])]}, make_vocabulary(1000)
    )
    replay = {"replay_corpus": str(make_corpus(tmp_path / "general")), "replay_share": 0.5}
    config = two_lengths(corpus={"dir": str(own)}, start_from="start", adaptation=replay)
    assert read_text(config).lengths == pytest.approx(counted_lengths(config), rel=0.01)
    assert read_text(config).lengths[0] > 1.5 * read_text(two_lengths(corpus={"dir": str(own)})).lengths[0]


def two_lengths(**values: Any) -> PretrainConfig:
    """Phases of 128 and 32 tokens, of 12,800 sequences each."""
    phase = {**mini().phases[0].model_dump(), "ramp_from": 0, "ramp_steps": 0, "steps": 200}
    return mini(phases=[{**phase, "sequence_length": length} for length in (128, 32)], **values)


def counted_lengths(config: PretrainConfig) -> list[float]:
    """Mean tokens of all sequences that a run trains on, of each phase."""
    shards, means = Corpora.open(config).training, []
    for number, phase in enumerate(config.phases):
        maker = BatchMaker(shards, config, number, seed=config.seed, rank=0, world_size=1)
        size = phase.global_sequences
        means.append(sum(maker.make(size * step, size).tokens for step in range(phase.steps)) / phase.sequences)
    return means


def dry_run_tokens(path: Path, capsys: pytest.CaptureFixture[str], source: str) -> list[float]:
    """Of each phase, as printed with where the mean lengths come from."""
    assert main(["pretrain", str(path), "--dry-run"]) == 0
    table = capsys.readouterr().out.partition("Work\n")[2]
    assert f"mean: tokens per sequence, {source}" in table
    return [float(row.split()[5]) for row in table.splitlines()[1:3]]


# ---- the recommendation


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_settings_of_every_size_give_its_config(path: Path) -> None:
    """They are whole, also where a value of the new shape is that of the config's named size."""
    config = load_config(path)
    if config.start_from or config.distillation.teacher or config.electra.is_on:
        pytest.skip("--budget plans nothing for it")
    text = RunText((PhaseText(100.0, math.inf),) * len(config.phases), "", False)
    for shape in recommend.SHAPES:
        after = plan(with_shape(config, *shape), Budget("", flops=3e15), text, None).config
        words = table.settings_line(config, after).split()
        assert load_config(path, [word for word in words if word != "--set"]) == after


def test_the_best_candidate_has_the_lowest_loss() -> None:
    """Each candidate's loss is the law's, and the best is next to the best size of all."""
    law = planted_law()
    plans = [plan(with_shape(mini(), *shape), Budget("", flops=1e14), ENDLESS, None) for shape in recommend.SHAPES]
    choices = choose(plans, law)
    losses = [float(PLANTED.loss(one.size, one.tokens)) for one in plans]
    assert choices[0].plan is plans[int(np.argmin(losses))]
    assert [choice.loss for choice in choices] == sorted(choice.loss for choice in choices)
    assert choices[0].loss == pytest.approx(min(losses), rel=5e-3)
    assert sum(choice.wins for choice in choices) == pytest.approx(1)
    assert choices[0].low < choices[0].loss < choices[0].high
    assert not choices[0].beyond
    beyond = {choice.plan.shape: choice.beyond for choice in choices}
    assert beyond["24x1024"].startswith("size 2")
    assert "tokens 0." in beyond["24x1024"]


def recommended(budget: float, unique: float) -> str:
    """The shape for a budget in FLOPs and text of `unique` tokens."""
    text = RunText((PhaseText(104.0, unique / 104),), "", False)
    plans = [plan(with_shape(mini(), *shape), Budget("", flops=budget), text, None) for shape in recommend.SHAPES]
    return choose(plans, published.read())[0].plan.shape


@pytest.fixture
def few_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the recommended shape does not depend on takes no time."""
    monkeypatch.setattr(published.PublishedLaw, "likely", property(lambda found: (found.law,)))


@pytest.mark.usefixtures("few_laws")
@pytest.mark.parametrize("budget", [4e15, 1e17, 1e20])
def test_beyond_the_measured_budgets_more_text_wants_no_smaller_model(budget: float) -> None:
    order = [f"{layers}x{hidden}" for layers, hidden in recommend.SHAPES]
    texts = (1e5, 4e5, 2.2e6, 1e7, 4e7, 1e9, math.inf)
    found = [order.index(recommended(budget, unique)) for unique in texts]
    assert found == sorted(found)
    assert found[0] <= order.index("4x192"), "little text"
    assert found[2] <= order.index("6x384"), "2.2 million tokens: no larger than measured models"
    assert found[-1] <= order.index("8x512"), "one size past the measured ones"
    assert found[-1] >= order.index("6x384"), "the law expects too much of small models in long runs"


@pytest.mark.usefixtures("few_laws")
def test_within_the_measured_budgets_the_law_decides() -> None:
    assert [recommended(budget, 1e7) for budget in (1e14, 5e14, 2e15)] == ["2x128", "2x128", "4x256"]


def test_a_size_that_is_too_far_from_the_points_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("x" * int(2.2e6 * 4.4))
    source = {"kind": "jsonl", "name": "a", "path": str(tmp_path / "a.jsonl")}
    text = recommendation(mini(corpus={"dir": str(tmp_path / "new"), "sources": [source]}), "2h", "1xH100")
    assert "24x1024 has the lowest loss by the law, but is more than one size past the measured runs" in text
    assert "8x512: lower losses by the law, but by less than chance" in text
    assert "Settings of 6x384" in text


@pytest.fixture
def law_file(tmp_path: Path) -> Path:
    write_json(tmp_path / "law.json", planted_law(0.005).model_dump(mode="json"))
    return tmp_path / "law.json"


def test_the_settings_are_those_of_a_run(law_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line of settings, given to --dry-run, has the size, steps and FLOPs of the table."""
    config = str(CONFIGS / "mini.yaml")
    assert main(["pretrain", config, "--dry-run", "--budget", "0.5e15", "--law", str(law_file)]) == 0
    printed = capsys.readouterr().out
    best = next(line.split() for line in printed.splitlines() if line.startswith("  >"))
    line = printed.splitlines()[-1].split()
    assert line[::2] == ["--set"] * (len(line) // 2)
    assert main(["pretrain", config, "--dry-run", *line, "--show-config"]) == 0
    resolved = capsys.readouterr().out
    layers, hidden = best[1].split("x")
    for expected in (f"layers: {layers}", f"hidden: {hidden}", "warmup_steps: ", "peak_learning_rate: "):
        assert expected in resolved
    rows = [row.split() for row in resolved.splitlines() if row.startswith("  total ") and "e+" in row]
    assert rows[0][1] in best
    assert "5e+14" in resolved
    assert "outside of the points" in printed
    assert "fitted to 16 runs of 4e+12 to 2e+14 FLOP (modernbert, muon" in printed


def test_other_settings_than_the_laws_are_named(law_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", str(CONFIGS / "bert-mini.yaml"), "--dry-run", "--budget", "1e14", "--law", str(law_file)]
    assert main(words) == 0
    assert "this config has family bert, optimizer adamw" in capsys.readouterr().out


def test_every_worker_of_a_cluster_has_a_sequence(law_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is of a run with so many workers, whatever the config has, and its settings say so."""
    phase = {**mini().phases[0].model_dump(), "global_sequences": 48, "ramp_from": 0, "ramp_steps": 0}
    config = mini(phases=[phase, {**phase, "global_sequences": 4}], scheduling={"workers": 2, "min_workers": 1})
    text = RunText((PhaseText(100.0, math.inf),) * 2, "", False)
    found = plan(with_workers(config, 16), Budget("", flops=1e13), text, None).config
    assert [one.global_sequences for one in found.phases] == [192, 16]
    assert (found.scheduling.workers, found.scheduling.min_workers) == (16, 1)
    assert "--set scheduling.workers=16" in table.settings_line(config, found)
    assert with_workers(found, 8).scheduling.min_workers == 1

    line = recommendation(mini(), "90s", "128xA100", law_file).splitlines()[-1].split()
    capsys.readouterr()
    assert main(["pretrain", str(CONFIGS / "mini.yaml"), "--dry-run", *line]) == 0, capsys.readouterr().err


def test_a_cluster_is_planned_by_arithmetic(law_file: Path) -> None:
    one, eight = (recommendation(mini(), "1h", on, law_file) for on in ("L4", "8xH100"))
    assert "1 x L4: by arithmetic" in one
    assert f"of which {1 - pace.TRAINING_SHARE:.0%} is for evaluations and checkpoints" in one
    assert "too large" not in eight
    best = [next(line.split()[1] for line in text.splitlines() if line.startswith("  >")) for text in (one, eight)]
    order = [f"{layers}x{hidden}" for layers, hidden in recommend.SHAPES]
    assert order.index(best[0]) <= order.index(best[1])
    assert "is an extrapolation" in eight


def test_sizes_that_the_budget_does_not_pay_for_are_left_out(law_file: Path) -> None:
    """Every phase has a step at least, whatever it costs."""
    text = recommendation(mini(), "5e11", law=law_file)
    rows = text.split("Candidates\n")[1].split("\n\n")[0].splitlines()[1:]
    assert rows
    assert not any("24x1024" in row for row in rows)
    assert "24x1024 (" in text.split("too costly, with a step at least of each phase: ")[1].splitlines()[0]
    with pytest.raises(InputError, match=r"--budget 1e9: pays for no size\. .*2x128 \(.* FLOP\).*larger budget"):
        recommendation(mini(), "1e9", law=law_file)


def test_the_memory_is_that_of_the_planned_batch(law_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config of few sequences has small micro-batches, the plan has whole ones."""
    phase = {**mini().phases[0].model_dump(), "global_sequences": 2, "ramp_from": 0, "ramp_steps": 0}
    asked: list[int] = []

    def memory(config: PretrainConfig, *_: Any) -> dict[str, int]:
        asked.append(config.phases[0].global_sequences)
        return {"weights": 1}

    monkeypatch.setattr(recommend, "memory_bytes", memory)
    recommendation(mini(phases=[phase]), "90s", "L4", law_file)
    assert min(asked) >= 16


def test_this_machine_times_the_best_candidate(tmp_path: Path, law_file: Path, monkeypatch: Any, capsys: Any) -> None:
    timed: list[PretrainConfig] = []
    monkeypatch.setattr(speed, "product_times", lambda shapes, *_: [6 * a * b / 2e11 for a, b in shapes])
    monkeypatch.setattr(estimate, "measure_peak", lambda *_: ("cpu", 2e11))
    monkeypatch.setattr(recommend, "machine_memory", lambda: (8 << 30, 3 << 30))
    monkeypatch.setattr(pace, "measure", lambda config, _: timed.append(config) or pace.Pace(9, 0.5, 1e-11))
    config = mini(corpus={"dir": str(make_corpus(tmp_path / "corpus", documents=4000))}, engine={"precision": "fp32"})
    text = recommendation(config, "10m", "here", law_file)
    assert f"timing steps of {timed[0].model.layers}x{timed[0].model.hidden} in a run" in capsys.readouterr().out
    assert f"steps of {timed[0].model.layers}x{timed[0].model.hidden} in a run" in text
    assert "24x1024" in text.split("too large for the memory of a worker: ")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "2h"], "--budget: recommends a size, and trains nothing. Give --dry-run"),
        (["--dry-run", "--budget", "2h"], "--budget 2h: a time needs the speed of a machine"),
        (["--dry-run", "--budget", "2 h"], "--budget 2 h: expected a time such as"),
        (["--dry-run", "--budget", "1e15", "--minutes", "5"], "--minutes: has no effect with --budget"),
        (["--dry-run", "--law", "x.json"], "--law: has no effect without --budget"),
        (["--dry-run", "--budget", "1e15", "--law", "none.json"], "none.json: cannot be read"),
        (["--dry-run", "--budget", "1e15", "--set", "electra.generator_width=0.25"], "learns from replaced tokens"),
        (["--dry-run", "--budget", "1h", "--on", "8xZ80"], "--on 8xZ80: not a known cluster"),
    ],
)
def test_what_says_nothing_is_refused(words: list[str], message: str, law_file: Path, capsys: Any) -> None:
    law = [] if "--law" in words or "--budget" not in words else ["--law", str(law_file)]
    assert main(["pretrain", str(CONFIGS / "mini.yaml"), *words, *law]) == 2
    assert message in capsys.readouterr().err


def test_no_exponent_is_written() -> None:
    before, after = mini(), mini(phases=[{**mini().phases[0].model_dump(), "peak_learning_rate": 2e-5}])
    assert table.settings_line(before, after) == "--set phases.0.peak_learning_rate=0.00002"


def test_muon_is_paid_for() -> None:
    """The FLOPs of a plan are those of `work`, with the optimizer's."""
    found = plan(mini(), Budget("", flops=2e13), ENDLESS, None)
    config = found.config
    own = 6 * found.size * found.tokens + config.total_steps * optimizer_flops(config)
    assert found.flops == pytest.approx(own)
    assert work.optimizer_flops(config) > 0
