"""`bench speedrun`: the drawn text, a budget as steps, whole trials, rows, refusals."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from corpora import make_corpus

from pretrain.batches.loader import BatchMaker
from pretrain.common.errors import InputError, StoppedError
from pretrain.config import PretrainConfig
from pretrain.corpus.shards import open_shards
from pretrain.objectives import make_objective
from pretrain.planning import work
from pretrain.run import api
from tests.bench.speedrun import command, ground, results
from tests.bench.speedrun.budget import SequenceCost, measured_costs, plan_budget
from tests.bench.speedrun.results import Scores, Trial

LIMITS = ground.Limits(words=3000, held_out_share=0.05, held_out_documents=3, held_out_bytes=10_000)
WORDS = [first + rest for first in "bdkmr" for rest in ("an", "ot", "ile", "ute")]


def write_text(folder: Path, articles: int = 80, novels: int = 6, seed: int = 0) -> Path:
    """WikiExtractor's articles in two files, and novels."""
    draw = random.Random(seed)
    folder.mkdir()

    def text(words: int) -> str:
        return " ".join(draw.choice(WORDS) + ("." if draw.random() < 0.1 else "") for _ in range(words)) + "."

    blocks = [f'<doc id="{n}" url="u" title="T{n}">\nT{n}\n\n{text(60 + n)}\n</doc>\n' for n in range(articles)]
    (folder / "wiki_00").write_text("".join(blocks[: articles // 2]))
    (folder / "wiki_01").write_text("".join(blocks[articles // 2 :]))
    for n in range(novels):
        (folder / f"novel{n}.txt").write_text(f"{text(100)}\n\n{text(120 + 30 * n)}\n")
    return folder


def texts(folder: Path, card: dict[str, Any], part: str) -> dict[str, list[str]]:
    files = ground.text_files(card, folder, part)
    return {name: [json.loads(line)["text"] for line in path.read_text().splitlines()] for name, path in files.items()}


def test_the_drawn_text_keeps_its_limits_and_depends_on_the_documents_only(tmp_path: Path) -> None:
    """Not on which file holds them, nor on their order, nor on repetitions."""
    data = write_text(tmp_path / "data")
    card = ground.draw_text(data, tmp_path / "out", LIMITS)
    train, held_out = (texts(tmp_path / "out", card, part) for part in (ground.TRAIN, ground.HELD_OUT))
    words = {name: sum(len(text.split()) for text in found) for name, found in train.items()}
    assert words == {name: source["train"]["words"] for name, source in card["sources"].items()}
    assert 2700 < sum(words.values()) == card["words"] <= 3000
    assert words["wikipedia"] / card["words"] == pytest.approx(0.75, abs=0.08)
    for name, found in held_out.items():
        assert len(found) >= 3
        assert not set(found) & set(train[name])
    assert card["sources"]["novels"]["held-out"]["characters"] == sum(map(len, held_out["novels"]))
    other = tmp_path / "other"
    other.mkdir()
    (other / "all").write_text((data / "wiki_01").read_text() + (data / "wiki_00").read_text())
    for number, novel in enumerate(sorted(data.glob("*.txt"), reverse=True)):
        (other / f"{number}.txt").write_text(novel.read_text())
    (other / "again.txt").write_text((data / "novel0.txt").read_text())
    second = ground.draw_text(other, tmp_path / "two", LIMITS)
    assert (card["sources"], card["sha256"]) == (second["sources"], second["sha256"])
    third = ground.draw_text(write_text(tmp_path / "third", seed=1), tmp_path / "three", LIMITS)
    assert third["sha256"] != card["sha256"]


def test_drawn_text_is_kept_repaired_and_not_mixed(tmp_path: Path) -> None:
    data, out = write_text(tmp_path / "data"), tmp_path / "out"
    card = ground.draw_text(data, out, LIMITS)
    path = ground.text_files(card, out, ground.TRAIN)["novels"]
    path.write_text("damaged")
    assert ground.draw_text(data, out, LIMITS) == card
    assert path.read_text() != "damaged"
    for source, limits in ((data, LIMITS._replace(words=2000)), (write_text(tmp_path / "more", articles=50), LIMITS)):
        with pytest.raises(InputError, match="drawn from other files, or by another version"):
            ground.draw_text(source, out, limits)
    (data / "readme.md").write_text("hello\n")
    with pytest.raises(InputError, match=r"readme\.md: neither WikiExtractor's output nor a .txt file"):
        ground.draw_text(data, tmp_path / "other", LIMITS)


def config_file(folder: Path) -> Path:
    sections = {
        "name": "tiny",
        "corpus": {"dir": "unused", "vocabulary": {"size": 64}, "processes": 1},
        "model": {"size": "custom", "layers": 1, "hidden": 16, "heads": 2, "max_positions": 64},
        "engine": {"compile": False, "precision": "fp32", "micro_batch_tokens": 256},
        "tracking": {"wandb": "off"},
    }
    path = folder / "tiny.yaml"
    path.write_text(make_config(folder, **sections).model_dump_json())
    return path


def ground_config(folder: Path, card: dict[str, Any], overrides: tuple[str, ...] = ()) -> PretrainConfig:
    return command.ground_config(config_file(folder), overrides, card, folder / "out")


def test_trials_share_a_corpus_by_their_vocabulary_and_begin_with_no_other_text(tmp_path: Path) -> None:
    card = {"sha256": "x", "sources": {}}
    folders = [
        ground_config(tmp_path, card, changes).corpus.dir
        for changes in ((), ("name=b", "phases.0.steps=500"), ("corpus.vocabulary.size=80",))
    ]
    assert folders[0] == folders[1] != folders[2]
    for change, message in (
        ("start_from=somewhere", "a trial begins with random weights"),
        ("corpus.vocabulary.path=vocab.txt", "the vocabulary is trained on the drawn text"),
    ):
        with pytest.raises(InputError, match=message):
            ground_config(tmp_path, card, (change,))


def make_config(folder: Path, **sections: Any) -> PretrainConfig:
    first = {"sequence_length": 32, "global_sequences": 8, "steps": 300, "warmup_steps": 30, "decay_steps": 60}
    second = {"sequence_length": 64, "global_sequences": 4, "steps": 100}
    values = {
        "name": "trial",
        "corpus": {"dir": str(folder)},
        "model": {"size": "custom", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64},
        "phases": [{**phase, "peak_learning_rate": 1e-3} for phase in (first, second)],
    }
    return PretrainConfig.model_validate({**values, **sections})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("speedrun") / "corpus", vocabulary_size=300)


def test_a_budget_becomes_steps(corpus: Path) -> None:
    """Phases keep their proportions, and the batches of the plan cost the budget."""
    config = make_config(corpus, optimizer={"name": "muon"})
    costs = measured_costs(config, None)
    budget = 0.5 * plan_cost(config)
    plan = plan_budget(config, budget, costs)
    first, second = plan.phases
    assert plan.flops == pytest.approx(budget, rel=0.01)
    assert (first.steps, second.steps) == (pytest.approx(150, abs=3), pytest.approx(50, abs=2))
    assert (first.warmup_steps, first.decay_steps) == (pytest.approx(15, abs=1), pytest.approx(30, abs=1))
    planned = config.model_copy(update={"phases": plan.phases})
    # So few sequences differ in length by chance.
    assert plan_cost(planned) == pytest.approx(budget, rel=0.03)
    assert sum(step.tokens for step, _ in batches(planned)) == pytest.approx(plan.tokens, rel=0.03)


def batches(config: PretrainConfig) -> Any:
    shards = open_shards(Path(config.corpus.dir), "train")
    for number, phase in enumerate(config.phases):
        maker = BatchMaker(shards, config, number, seed=config.seed, rank=0, world_size=1)
        for step in range(phase.steps):
            yield maker.make(phase.first_sample(step), phase.sequences_at(step)), shards.vocabulary_size


def plan_cost(config: PretrainConfig) -> float:
    """FLOPs of all batches that a run trains on, one by one."""
    passes = sum(
        make_objective(config, size).executed_flops(batch.lengths, len(batch.masked_rows))
        for step, size in batches(config)
        for batch in step.micro_batches
    )
    return passes + config.total_steps * work.optimizer_flops(config)


def test_filler_is_no_part_of_a_budget(corpus: Path) -> None:
    config = make_config(corpus, engine={"micro_batch_tokens": 256})
    filled = config.model_copy(update={"engine": config.engine.model_copy(update={"cuda_graphs": True})})
    assert any(batch.filler.sequences for step, _ in batches(filled) for batch in step.micro_batches)
    costs, plain = (measured_costs(one, None) for one in (filled, config))
    assert [cost.flops for cost in costs] == pytest.approx([cost.flops for cost in plain])


def test_budgets_that_cannot_be_spent_are_refused(corpus: Path) -> None:
    config = make_config(corpus)
    costs = measured_costs(config, None)
    few = [dataclasses.replace(cost, samples_per_epoch=100) for cost in costs]
    with pytest.raises(InputError, match=r"read the text \d+\.\d times; 10 are allowed, which cost"):
        plan_budget(config, plan_cost(config), few)
    with pytest.raises(InputError, match="not within 1%"):
        plan_budget(config, 3.4 * 8 * costs[0].flops, costs)
    exact = SequenceCost(flops=1e6, tokens=20, samples_per_epoch=402)
    assert plan_budget(config, 4000 * 1e6, [exact, exact]).epochs == pytest.approx(10, rel=0.1)
    ramp = {"ramp_from": 1, "ramp_steps": 100}
    ramped = config.model_copy(update={"phases": (config.phases[0].model_copy(update=ramp), config.phases[1])})
    with pytest.raises(InputError, match="not within 1%"):
        plan_budget(ramped, 5 * 8 * costs[0].flops, costs)


def test_flops_are_counted_phase_by_phase(corpus: Path) -> None:
    """Tokens of the second phase cost more."""
    costs = [SequenceCost(flops=100.0, tokens=10, samples_per_epoch=10**6), SequenceCost(800.0, 20, 10**6)]
    config = make_config(corpus)
    steps = config.total_steps * work.optimizer_flops(config)
    budget = steps + sum(phase.sequences * cost.flops for phase, cost in zip(config.phases, costs, strict=True))
    plan = plan_budget(config, budget, costs)
    assert (plan.steps, plan.tokens) == (400, 300 * 80 + 100 * 80)
    per_step = plan.phase_flops[0] / 300, plan.phase_flops[1] / 100
    for first, second in ((5, 0), (300, 55), (300, 100)):
        flops = first * per_step[0] + second * per_step[1]
        assert plan.flops_of(80 * (first + second)) == pytest.approx(flops)
    assert plan.flops_of(plan.tokens) == pytest.approx(plan.flops)


WORD_SCORES = {
    "common_words": {"bits": 3.5, "standard_error": 0.1, "words": 9},
    "whole_words": {"lower": 1.25, "upper": 1.5, "standard_error": 0.1, "words": 9, "tokens": 12},
}
WORDS_FOUND = {"common_word_bits": 3.5, "common_word_error": 0.1, "whole_word_bits": (1.25, 1.5)}


def make_trial(run: str, budget: float = 1e15, bits: float | None = 1.5, **values: Any) -> Trial:
    machine = {"started": "2026-11-23T10:00:00", "cpu": "A | B", "cpu_cores": 2, "gpus": [], "git_commit": "a" * 40}
    scores = Scores(nats=3.0, accuracy=0.4, bits_per_character=bits)
    common: dict[str, Any] = {"run": run, "budget": budget, "flops": budget, "steps": 1000, "ground": "x"}
    return Trial(**{**common, "machine": machine, "scores": scores, **values})


def test_trials_are_kept_in_order_and_replaced(tmp_path: Path) -> None:
    """Bits per character favor small vocabularies, so common words decide."""
    small, large = (
        make_trial(run, scores=Scores(3.0, 0.4, *bits)) for run, bits in (("s", (1.1, 4.0)), ("l", (1.5, 3.5)))
    )
    given = make_trial("b", 2e15), make_trial("c", bits=1.7), make_trial("n", bits=None), make_trial("a")
    found: list[Trial] = []
    for one in (*given, small, large, make_trial("c", bits=1.4)):
        found = results.with_trial(found, one)
    assert [one.run for one in found] == ["l", "s", "c", "a", "n", "b"]
    path = tmp_path / "speedrun.json"
    results.write(found, path)
    assert results.read(path, "x") == found
    with pytest.raises(InputError, match="trials on another text"):
        results.read(path, "y")
    path.write_text("[]x")
    with pytest.raises(InputError, match="damaged"):
        results.read(path, "x")
    assert Scores(3.0, 0.4, 1.5, **WORDS_FOUND).headline == "3.5000 ± 0.1000 bits per common word"
    assert make_trial("n", bits=None).scores.headline == "no score of held-out text"


def test_a_row_of_the_log_is_as_those_of_the_documentation() -> None:
    page = Path(__file__).parents[2] / "docs" / "benchmarks" / "speedrun.md"
    (head,) = (line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| date |"))
    one = make_trial("a-b-1e15-s0", scores=Scores(3.0, 0.4, 1.5, **WORDS_FOUND), remarks="so")
    assert results.table([one]).splitlines() == [
        head,
        "| 2026-11-23 | a-b s0 | 1e15 | 1e+15 | 1,000 | 0.00 | 0.0 | 1.5000 | 3.0000 | 0.4000 | "
        "3.5000 ± 0.1000 | 1.250 to 1.500 | - | - | 2 cores of A \\| B | aaaaaaa | so |",
    ]
    budgets = {0.5e15: "5e14", 2.5e15: "2.5e15", 1e12: "1e12", 123: "1.23e2"}
    assert [results.budget_text(budget) for budget in budgets] == list(budgets.values())


def test_a_run_has_the_scores_of_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = {"nats_per_token": 3.0, "accuracy": 0.4, "bits_per_character": 1.5}
    for name, found in {"read_documents": [], "MaskedModel": None}.items():
        monkeypatch.setattr(results, name, lambda *_, found=found: found)
    parts = [(part, {"scores": one}) for part, one in {"held_out": loss, **WORD_SCORES}.items()]
    monkeypatch.setattr(results, "text_scores", lambda *_: iter(parts))
    assert results.measure(make_config(tmp_path), []) == Scores(3.0, 0.4, 1.5, **WORDS_FOUND)


def test_a_trial_trains_scores_and_continues(tmp_path, monkeypatch, capsys) -> None:
    """A trial that is stopped, then the same command, by another path and again; then another config in its folder.

    Documents of held-out sources are the validation split.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ground.draw_text, "__defaults__", (LIMITS,))
    data, config = write_text(tmp_path / "data"), config_file(tmp_path)
    words = [str(config), "--data", str(data), "--workers", "1", "--budget", "2e8", "--out"]
    with monkeypatch.context() as stops:
        stops.setattr(api, "train", mock.Mock(side_effect=StoppedError("it stopped" + StoppedError.CONTINUE)))
        with pytest.raises(StoppedError, match="Run the same command again to continue"):
            command.main([*words, "out"])
    for _ in range(2):
        assert command.main([*words, str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "already finished" in printed
    assert printed.count("| tiny s0 |") == 2
    assert printed.rstrip().endswith("bits per character, which compare runs of one vocabulary only")
    (row,) = json.loads((tmp_path / "out" / "speedrun.json").read_text())
    assert row["flops"] == pytest.approx(2e8, rel=0.01)
    assert row["minutes"] > 0
    assert 0.1 < row["scores"]["bits_per_character"] < 10
    card = json.loads((tmp_path / "out" / "corpus" / "card.json").read_text())
    first, second = (phase["steps"] for phase in row["config"]["phases"])
    assert first == pytest.approx(3 * second, rel=0.05)
    for split, part in (("train", ground.TRAIN), ("validation", ground.HELD_OUT)):
        shards = open_shards(Path(row["config"]["corpus"]["dir"]), split)
        documents = sum(len(shard.documents) - 1 for shard in shards.shards)
        assert documents == sum(source[part]["documents"] for source in card["sources"].values())
    assert row["scores"]["common_word_bits"] is None
    assert row["scores"]["whole_word_bits"][0] > 0
    assert "common words: the vocabulary lacks 'able' as a single token" in row["remarks"]
    for more, message in (
        (["--set", "masking.probability=0.3"], r"begun with other settings: .*name=second"),
        (["--budget", "1e14"], "10 are allowed"),
        (["--budget", "-1"], "--budget: -1; expected"),
        (["--budget", "2e30"], r"--budget: 2e\+30; expected"),
        (["--data", str(tmp_path / "out" / "runs")], "neither WikiExtractor's output nor"),
    ):
        with pytest.raises(InputError, match=message):
            command.main([*words, "out", *more])
