"""Reading a run's YAML: what is accepted, and the error message for each mistake."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest

from pretrain.common.errors import InputError
from pretrain.common.sections import Section, is_section
from pretrain.common.settings import dump
from pretrain.config import ModelConfig, PretrainConfig, forbidden_changes, load_config
from pretrain.run import preflight

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "pretrain").glob("*.yaml"))

GOOD = """\
name: trial
corpus:
  dir: corpora/trial
  sources:
    - kind: books
      path: data/*.txt
phases:
  - sequence_length: 64
    global_sequences: 8
    steps: 10
    peak_learning_rate: 1e-4
  - sequence_length: 128
    global_sequences: 8
    steps: 5
    peak_learning_rate: 5.0e-05
engine:
  zero_stage: 1
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(str(path.parent) + "/", "").splitlines()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("project=team/project", "project: 'team/project' must be at most 128 characters without / \\ # ? % :"),
        ("run_id=team/exp", "run_id: 'team/exp' must have none of"),
        ("run_id=' exp'", "run_id: ' exp' must have none of"),
    ],
)
def test_what_wandb_refuses_is_refused_where_a_run_starts_and_read_where_one_is(write, tmp_path, setting, message):
    path, folder = write(GOOD), tmp_path / "run"
    config = load_config(path, [f"tracking.{setting}", f"run_dir={folder}"])
    with (
        pytest.raises(InputError) as caught,
        preflight.checked_run_folder(config, None, forbidden_changes, resume=False),
    ):
        pass
    assert str(caught.value).startswith(f"tracking.{message}")
    assert not folder.exists()

    (folder / "checkpoints/step-00000002").mkdir(parents=True)
    (folder / "checkpoints/step-00000002/manifest.json").write_text("{}")
    preflight.record_config(config)
    assert load_config(folder / "config.yaml") == config
    for changes in ([], [f"tracking.{setting}", "tracking.wandb=off"]):
        changed = load_config(path, [*changes, f"run_dir={folder}"])
        with preflight.checked_run_folder(changed, config, forbidden_changes, resume=True):
            pass


def test_reads_a_run(write):
    config = load_config(write(GOOD))
    assert [phase.peak_learning_rate for phase in config.phases] == [1e-4, 5e-5]
    assert config.folder == Path("runs/trial")
    assert (config.total_steps, config.phase_at(9), config.phase_at(10)) == (15, (0, 9), (1, 0))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_named_like_their_file_and_read_back_equal(path: Path, write):
    config = load_config(path)
    assert config.name == path.stem
    assert load_config(write(dump(config))) == config


@pytest.mark.parametrize(("written", "read"), [("1_000", 1000), ("0x10", 16), ("010", 10), ("+7", 7)])
def test_whole_numbers(write, written: str, read: int):
    assert load_config(write(GOOD + f"seed: {written}\n")).seed == read


def test_words_stay_words(write):
    """YAML 1.1 would read off as false."""
    assert load_config(write(f"{GOOD}tracking: {{wandb: off}}\n")).tracking.wandb == "off"


ONES = "1" * 5000
MOST = {"model.layers": 1024, "model.heads": 8192, "model.intermediate": 131072, "model.recursions": 1024}
MOST |= {"model.vocabulary_rows": 1 << 24, "corpus.vocabulary.size": 1 << 24, "phases.0.global_sequences": 1 << 20}
MOST |= {"phases.0.steps": 10**9}
SIZES = "mini, small, medium, base, large, custom"


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        ("zero_stage", "zero_stge", "17: engine.zero_stge is not a known setting; did you mean zero_stage?"),
        ("name:", "zero_stage: 1\nname:", "1: zero_stage is not a known setting; did you mean engine.zero_stage?"),
        ("steps: 5", "steps: 5\n    warmup_step: 1", "15: phases.1.warmup_step is not a known setting; did you"),
        ("steps: 10", "steps: ten", "10: phases.0.steps is 'ten'; expected a valid integer"),
        ("steps: 10", "steps: '10'", "10: phases.0.steps is '10'; expected a valid integer"),
        ("steps: 10", "steps: 10.5", "10: phases.0.steps is 10.5; expected a valid integer"),
        ("steps: 10", "steps: true", "10: phases.0.steps is true; expected a valid integer"),
        ("steps: 10", "steps:", "10: phases.0.steps is empty; expected a valid integer"),
        ("steps: 10", "steps: 0", "10: phases.0.steps is 0; expected greater than or equal to 1"),
        ("1e-4", "fast", "11: phases.0.peak_learning_rate is 'fast'; expected a valid number"),
        ("1e-4", ".inf", "11: phases.0.peak_learning_rate is inf; expected a finite number"),
        ("zero_stage: 1", "zero_stage: 4", "17: engine.zero_stage is 4; expected 0, 1, 2 or 3"),
        ("zero_stage: 1", "compile: yes", "17: engine.compile is 'yes'; expected 'auto', true or false"),
        ("name: trial", "name: 7", "1: name is 7; expected text; put it in quotes if it looks like a number"),
        ("trial", "Ärger", "1: name: 'Ärger' must be 1 to 63 of A-Z, a-z, 0-9 and . _ -, and start"),
        ("trial", "_trial", "1: name: '_trial' must be 1 to 63 of A-Z, a-z, 0-9 and . _ -, and start with a"),
        ("  zero_stage: 1", "  - zero_stage", "16: engine is a list of 1 item; expected a section of `key: value`"),
        ("  dir: corpora/trial\n", "", "2: corpus.dir is missing. Folder of the token shards, tokenizer,"),
        ("      path: data/*.txt\n", "", "5: corpus.sources.0: kind: books needs path"),
        ("kind: book", "kind: bokk", "5: corpus.sources.0.kind: 'bokks' is not one of books, csv, docstrings, "),
        ("kind: books", "kind: 7", "5: corpus.sources.0.kind is 7; expected text; put it in quotes if it looks like"),
        ("steps: 10", "steps: 10\n    warmup_steps: 11", "11: phases.0: warmup_steps (11) must not exceed steps (10)"),
        ("length: 128", "length: 1024", "12: phases.1.sequence_length (1024) exceeds model.max_positions (512)"),
        ("zero_stage: 1", "micro_batch_tokens: 100", "17: engine.micro_batch_tokens (100) is smaller than phases.1"),
        ("engine:", "engine:\n  zero_stage: 2", "18: not valid YAML: zero_stage is set twice, first on line 17."),
        ("zero_stage: ", "zero_stage: [", "18: not valid YAML: expected ',' or ']', but got '<stream end>'."),
        ("zero_stage: 1", "zero_stage: *x", "17: not valid YAML: found undefined alias 'x'."),
        ("engine:", f"seed: {ONES}\nengine:", f"16: not valid YAML: '{ONES[:56]}... does not fit into 64 bits."),
        ("engine:", f"seed: 0x{'f' * 17}\nengine:", "16: not valid YAML: '0xfffffffffffffffff' does not fit into 64"),
        ("engine:", "seed: !!int ten\nengine:", "16: not valid YAML: 'ten' is not of type int."),
        ("engine:", "seed: !!bool ten\nengine:", "16: not valid YAML: 'ten' is not of type bool."),
        ("engine:", "seed: !!timestamp ten\nengine:", "16: not valid YAML: could not determine a constructor for"),
        ("name: trial", "name: \x01", "1: not valid YAML: the character \\x01 is not allowed here."),
        ("name: trial", "? [a]\n: 1", "1: not valid YAML"),
        ("name: trial", "7: x\nname: trial", "1: 7 is not a known setting"),
        (GOOD, "", " no settings in this file"),
        (GOOD, "- a\n", " no settings in this file"),
        (GOOD, "name: &a [*a]\n", " not valid YAML: nested too deeply, or an alias (*) refers to itself."),
        (GOOD, f"name: {'[' * 5000}\n", " not valid YAML: nested too deeply"),
        (GOOD, "words " * 200_000, " more than 1 MiB. Use a YAML file with settings"),
    ],
    ids=lambda value: value[:40],
)
def test_mistakes_are_one_line_with_their_place(write, was: str, now: str, expected: str):
    assert was in GOOD
    [line] = problems(write(GOOD.replace(was, now, 1)))
    assert line.startswith(f"run.yaml:{expected}")


def test_every_problem_has_a_line(write):
    text = GOOD.replace("zero_stage", "zero_stge").replace("steps: 5", "steps: five")
    assert problems(write(text)) == [
        "run.yaml:14: phases.1.steps is 'five'; expected a valid integer",
        "run.yaml:17: engine.zero_stge is not a known setting; did you mean zero_stage?",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.rotary_base=10000", "rotary_base has no effect with positions: learned. Remove it, or set it to 0"),
        ("model.size=bass", f"size: unknown size 'bass' for family bert, which has {SIZES}; did you mean base?"),
    ],
)
def test_a_check_of_a_section_names_the_override(write, override: str, expected: str):
    assert problems(write(GOOD + "model:\n  hidden: 0\n"), override) == [f"--set {override}: model: {expected}"]


def test_workers_must_each_have_a_sequence(write):
    expected = "global_sequences (8) is less than the number of workers (9); every worker needs a sequence"
    assert problems(write(GOOD), "scheduling.workers=9") == [f"run.yaml:9: phases.0.{expected}"]


def test_every_number_of_workers_that_there_may_be_must_be_able_to_deal(write):
    """A node that is lost must not end a run with a mistake of its config's."""
    elastic = ("scheduling.workers=4", "scheduling.min_workers=2", "engine.micro_batch_tokens=128")
    found = problems(write(GOOD), *elastic)
    assert len(found) == 1
    assert "phases.1.global_sequences (8) is not a multiple of the workers (3)" in found[0]
    load_config(write(GOOD), [*elastic, "engine.micro_batch_tokens=256"])
    load_config(write(GOOD), [*elastic, "scheduling.min_workers=0"])
    found = problems(write(GOOD), "scheduling.workers=2", "scheduling.min_workers=3")
    assert "min_workers (3) is more than workers (2)" in found[0]


def test_unreadable_files(tmp_path: Path):
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\n")
    assert problems(tmp_path / "latin.yaml") == ["latin.yaml: byte 6 is not UTF-8. Save the file as UTF-8."]
    [line] = problems(tmp_path / "none.yaml")
    assert line == "none.yaml: cannot be read (No such file or directory). Use a YAML file, or a name in `configs`."
    [line] = problems(tmp_path)
    assert "cannot be read (Is a directory)" in line


def test_overrides_reach_sections_lists_and_new_places(write):
    config = load_config(
        write(GOOD),
        [
            "phases.0.steps=77",
            "phases.1={sequence_length: 32, global_sequences: 4, steps: 1, peak_learning_rate: 2e-3}",
            "phases.2={sequence_length: 16, global_sequences: 4, steps: 1, peak_learning_rate: 2e-3}",
            "scheduling.workers=3",
            "corpus.filters.contamination.sets=[{path: a, columns: [b, c]}]",
            "tracking.wandb=off",
            "optimizer.epsilon=1e-8",
            "corpus.sources.0.name=x=y",
            "run_dir=",
            "engine.deepspeed.zero_optimization.overlap_comm=true",
            "phases.0.weights.2019=2",
            "phases.0.weights.wiki.en=0.5",
        ],
    )
    assert config.phases[0].weights == {"2019": 2, "wiki.en": 0.5}
    assert [phase.steps for phase in config.phases] == [77, 1, 1]
    assert (config.phases[1].peak_learning_rate, config.optimizer.epsilon) == (2e-3, 1e-8)
    assert (config.scheduling.workers, config.tracking.wandb) == (3, "off")
    assert config.corpus.filters.contamination.sets[0].columns == ("b", "c")
    assert (config.corpus.sources[0].name, config.run_dir) == ("x=y", "")
    assert config.engine.deepspeed == {"zero_optimization": {"overlap_comm": True}}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("engine.zero_stge=1", "engine.zero_stge is not a known setting; did you mean zero_stage?"),
        ("engine.zero=1", "engine.zero is not a known setting; did you mean zero_stage?"),
        ("precis=bf16", "precis is not a known setting; did you mean engine.precision?"),
        ("engin.zero_stage=1", "engin is not a known setting; did you mean engine?"),
        ("phases.0.steps=ten", "phases.0.steps is 'ten'; expected a valid integer"),
        ("phases.5.steps=1", "phases is a list of 2 items; 5 is not one of the indices 0 to 2."),
        ("phases.x=1", "phases is a list of 2 items; 'x' is not one of the indices 0 to 2."),
        ("name.x=1", "name is 'trial'; not a section."),
        ("engine.zero_stage", "expected key.path=value, for example phases.0.steps=10."),
        ("engine..x=1", "expected key.path=value, for example phases.0.steps=10."),
        ("seed=[1", "not valid YAML: expected ',' or ']', but got '<stream end>'."),
        ("phases=[]", "phases is a list of 0 items; expected at least one item"),
        *(
            (f"{name}=10000000000", f"{name} is 10000000000; expected less than or equal to {most}")
            for name, most in MOST.items()
        ),
        ("model.size=[mini]", "model.size"),
        ("corpus.vocabulary={kind: byte_bpe, lowercase: true}", "lowercase must be false"),
        ("corpus.vocabulary={kind: byte_bpe, strip_accents: false}", "strip_accents has no effect with kind: byte_bpe"),
        ("distillation.initialize=false", "needs distillation.teacher"),
        ("distillation.teacher=t --set start_from=x", "both set the initial weights"),
        ("distillation={teacher: t, layers: [0]}", "has 1 numbers for the 12 layers"),
        ("distillation={teacher: t, layers: [3, 0]} --set model.layers=2", "in ascending order"),
        ("distillation={teacher: t, layers: [0], initialize: false}", "has no effect with initialize"),
        ("electra.rtd_weight=10", "needs electra.generator_width"),
        (
            "electra.generator_width=0.5 --set pairs.objective=sop",
            "does not fit the objective sop. Set pairs.objective: none",
        ),
        (
            "electra.generator_width=0.5 --set pairs.objective=none --set start_from=x",
            "electra and start_from (x) do not fit",
        ),
        ("phases.0.weights.wiki=-1", "phases.0.weights.wiki is -1; expected greater than or equal to 0"),
        ("masking={random_share: 0.9}", "add up to more than 1"),
        ("masking.scheme=whole_word", "'whole_word' is not one of tokens, whole_words; did you mean"),
        ("optimizer.muon_lr_scale=2", "muon_lr_scale has no effect with name: adamw. Remove it, or set name: muon"),
        ("model={size: mini, attention_init: neighbors, kv_heads: 2}", "attention_init: neighbors needs kv_heads: 0, "),
        ("model={size: mini, attention_init: neighbors, recursions: 2}", "attention_init: neighbors needs recursions:"),
        ("model={size: mini, embedding: 64, mlm_transform: false}", "embedding (64) needs mlm_transform: true"),
        ("pairs={input_format: full_sentences}", "full_sentences does not fit the objective nsp; use segment_pairs"),
        ("pairs={objective: none, input_format: segment_pairs}", "segment_pairs does not fit the objective none; use "),
        (f"seed={ONES}", f"not valid YAML: '{ONES[:56]}... does not fit into 64 bits."),
        (f"phases.{ONES}=1", f"phases is a list of 2 items; '{ONES}' is not one of the indices 0 to 2."),
        ('run_dir="a\\nb"', "run_dir is 'a\\nb', which contains control characters (\\n). Remove them."),
        ("run_dir=a\x1b[2J", "not valid YAML: the character \\x1b is not allowed here."),
    ],
    ids=lambda value: value[:40],
)
def test_mistaken_overrides_are_one_line_that_names_them(write, override: str, expected: str):
    overrides = override.split(" --set ")
    [line] = problems(write(GOOD), *overrides)
    shown = override.replace("\x1b", "\\x1b")
    if len(overrides) == 1:
        assert line.startswith(f"--set {shown}: " if len(shown) < 200 else f"--set {shown[:197]}...: ")
    assert expected in line


def test_lists_in_deepspeeds_section_stay_lists(write):
    config = load_config(write(GOOD + "  deepspeed: {betas: [0.9, 0.95]}\n"))
    assert config.engine.deepspeed == {"betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{zero_optimization: {stage: 3}}", "zero_optimization.stage is set by engine.zero_stage"),
        ("{gradient_clipping: 0.5}", "gradient_clipping is set by engine.gradient_clip_norm"),
        ("{bf16: {enabled: false}}", "bf16.enabled is set by engine.precision"),
    ],
)
def test_deepspeeds_section_does_not_contradict_ours(write, section: str, message: str):
    (problem,) = problems(write(GOOD + f"  deepspeed: {section}\n"))
    assert message in problem


def test_every_setting_has_a_description():
    def undescribed(section: type[Section], prefix: str = "") -> list[str]:
        missing = []
        for name, field in section.model_fields.items():
            if not (field.description or "").endswith("."):
                missing.append(prefix + name)
            for annotation in (field.annotation, *typing.get_args(field.annotation)):
                if is_section(annotation):
                    missing += undescribed(annotation, f"{prefix}{name}.")
        return missing

    assert undescribed(PretrainConfig) == []


def test_a_size_fills_the_shape():
    assert (ModelConfig(size="large").layers, ModelConfig(size="large").intermediate) == (24, 4096)
    assert ModelConfig(size="mini", layers=2).layers == 2


def resumed(write, *overrides: str, done: int = 12) -> list[str]:
    """What must not change after `done` steps, of phases of 10 and 5."""
    path = write(GOOD)
    return forbidden_changes(load_config(path), load_config(path, overrides), done)


def test_a_resumed_run_may_move_and_change_its_speed(write):
    changes = ["scheduling.workers=4", "run_dir=elsewhere", "engine.zero_stage=3", "engine.micro_batch_tokens=512"]
    changes += ["tracking.group=x", "checkpoint.keep_last=9", "phases.1.peak_learning_rate=1e-6"]
    assert resumed(write, *changes, "phases.0.warmup_steps=2") == []


def test_a_resumed_run_may_change_the_rate_of_muon(write):
    path = write(GOOD)
    muon = load_config(path, ["optimizer.name=muon"])
    slower = load_config(path, ["optimizer.name=muon", "optimizer.muon_lr_scale=0.5"])
    assert forbidden_changes(muon, slower, 12) == []
    momentum = load_config(path, ["optimizer.name=muon", "optimizer.beta1=0.5"])
    assert len(forbidden_changes(muon, momentum, 12)) == 1


def test_weights_are_compared_by_what_they_make_a_phase_read(write):
    """By the state of the checkpoint, not here: other weights may read the same of a corpus that has grown."""
    path = write(GOOD)
    before, after = (load_config(path, [f"phases.0.weights.books={weight}"]) for weight in (1, 5))
    assert not forbidden_changes(before, after, 12)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_general_text_is_fixed_while_it_is_replayed(write, share):
    path = write(GOOD)
    common = ["start_from=x", f"adaptation.replay_share={share}"]
    before, after = (load_config(path, [*common, f"adaptation.replay_corpus={name}"]) for name in ("a", "b"))
    assert [name.split(" ")[0] for name in forbidden_changes(before, after, 12)] == ["adaptation.replay_corpus"] * (
        share > 0
    )


def test_a_resumed_run_keeps_what_it_computes(write):
    changed = resumed(write, "seed=3", "phases.0.steps=9", "model.size=mini", "corpus.dir=elsewhere")
    assert changed[0] == "seed (0 -> 3)"
    assert "phases.0.steps (10 -> 9)" in changed
    assert "model.layers (12 -> 4)" in changed
    assert not any(name.startswith("corpus") for name in changed)


def test_phases_that_have_begun_are_kept_and_later_ones_are_free(write):
    later = ("phases.1.sequence_length=64", "phases.1.steps=99", "phases.1.global_sequences=16")
    assert resumed(write, *later, done=10) == []
    assert [name.split(" ")[0] for name in resumed(write, *later, done=11)] == [
        "phases.1.sequence_length",
        "phases.1.global_sequences",
    ]
    assert resumed(write, "phases.1.steps=2", done=12) == []  # it may end there,
    assert resumed(write, "phases.1.steps=99", done=12) == []  # or go on longer
    assert resumed(write, "phases.1.steps=1", done=12) == ["phases.1.steps (2 -> 1)"]
    path = write(GOOD)
    before = load_config(path)
    after = before.model_copy(update={"phases": before.phases[:1]})
    assert forbidden_changes(before, after, 10) == []
    assert any(name.startswith("phases.1.steps (1 -> ") for name in forbidden_changes(before, after, 11))


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("optimizer.decay_timescale=0.1", "its weight decay from"),
        ("phases.0.final_masking_probability=0.3", "its masking"),
    ],
)
def test_a_longer_phase_keeps_what_its_length_decides(write, setting: str, changes: str):
    path = write(GOOD)
    before, longer = (load_config(path, [setting, f"phases.0.steps={steps}"]) for steps in (10, 20))
    (found,) = forbidden_changes(before, longer, 4)
    assert found.startswith(f"phases.0.steps (10 -> 20, which changes {changes}")
    shorter = load_config(path, [setting, "phases.0.steps=4"])
    assert forbidden_changes(before, shorter, 4) == []


@pytest.mark.parametrize("text", ["08", "1e5", "0x1F", "-.5e3", "1_000", "off", "null", "1:30", "2001-01-01", "~", ""])
def test_dumped_text_stays_text(text: str, write):
    config = load_config(CONFIGS[0], [f"tracking.group={json.dumps(text)}"])
    assert config.tracking.group == text
    assert load_config(write(dump(config))).tracking.group == text


def test_aliases_and_merged_sections_are_read(write):
    text = GOOD + "checkpoint: &c {every_steps: 7}\nevaluation: {<<: *c, sequences: 5}\n"
    config = load_config(write(text))
    assert (config.checkpoint.every_steps, config.evaluation.every_steps, config.evaluation.sequences) == (7, 7, 5)


@pytest.mark.parametrize("character", ["\\n", "\\r", "\\t", "\\e", "\\x7f", "\\N", "\\L", "\\P", "\\ud800"])
@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('run_dir: "%s"\n', "run.yaml:18: run_dir is "),
        ('tracking: {group: "%s"}\n', "run.yaml:18: tracking.group is "),
        ('  deepspeed: {a: [{b: "%s"}]}\n', "run.yaml:18: engine.deepspeed.a.0.b is "),
        ('  deepspeed: {"%s": 1}\n', "run.yaml:18: the name "),
    ],
)
def test_control_characters_are_refused_by_name(write, text: str, where: str, character: str):
    [line] = problems(write(GOOD + text % f"a{character}b"))
    assert line.startswith(where)
    assert "control characters (" in line
    assert line.isprintable()


def test_a_character_that_json_writes_as_two_is_read_as_one(write):
    folder = "runs/\N{SLICE OF PIZZA}"
    assert load_config(write(GOOD), [f"run_dir={json.dumps(folder)}"]).run_dir == folder


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://b/a/", "abfs://c@account.dfs.core.windows.net/a"])
def test_addresses_of_object_stores_are_read(write, address: str):
    changes = [f"{name}={address}" for name in ("run_dir", "corpus.dir", "start_from")]
    config = load_config(write(GOOD), [*changes, f"corpus.sources.0.path={address.rstrip('/')}/text/"])
    taught = load_config(write(GOOD), [f"distillation.teacher={address}"])
    places = (config.run_dir, config.corpus.dir, config.start_from)
    assert config.corpus.sources[0].path == f"{address.rstrip('/')}/text"
    assert {*places, taught.distillation.teacher} == {address.rstrip("/")}
    assert config.address == address.rstrip("/")
    assert config.folder.is_absolute()


@pytest.mark.parametrize("name", ["run_dir", "corpus.dir", "corpus.sources.0.path", "start_from"])
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("gs://b", "does not name a file or folder in a bucket"),
        ("s3://b/../a", "does not name a file or folder in a bucket"),
        ("s3://key:secret@host/a", "does not name a file or folder in a bucket"),
        ("hdfs:///a", "is an address with an unknown scheme"),
        ("file:///tmp/a", "is an address with an unknown scheme"),
        ("s3:/bucket", "is a remote address"),
    ],
)
def test_addresses_that_name_nothing_are_refused(write, name: str, address: str, reason: str):
    (line,) = problems(write(GOOD), f"{name}={address}")
    assert line.startswith(f"--set {name}={address}: {name}: {address!r} {reason}")


@pytest.mark.parametrize("name", ["corpus.vocabulary.path", "adaptation.replay_corpus"])
@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://b", "hdfs:///a", "file:///tmp/a", "s3:/bucket"])
def test_remote_addresses_are_refused(write, name: str, address: str):
    assert problems(write(GOOD), f"{name}={address}") == [
        f"--set {name}={address}: {name}: {address!r} is a remote address; only local paths are supported. "
        "Mount or copy it, and use the local path."
    ]
