"""One YAML file is one run: the frozen models every other room reads its settings from.

Unknown keys are refused with the nearest known name and the line of the file; every knob carries its unit
in its name and its meaning in its description. `load_config` is the way in.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeGuard

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from pretrain.errors import InputError

_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


# Scores of the vocabulary that the model makes at a time: 2^26 bf16 entries are 128 MiB. Smaller pieces would add up
# the decoder's gradient more often. Here, because the memory estimate knows it too and must not load torch.
LOGITS_PER_PIECE = 1 << 26
# Widths and lengths up to which the seeds of dropout are told apart within int32 (model/attention.py, ALONG).
MAX_WIDTH = 8192


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, descriptions kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Source(Section):
    """One source of text. Which of `path`, `dataset` is needed depends on `kind`."""

    kind: Literal[
        "mediawiki", "wikiextractor", "books", "jsonl", "parquet", "csv", "huggingface", "docstrings"
    ]
    name: str = Field(
        default="", description="Name on the corpus card; empty takes the kind and the path's stem."
    )
    path: str = Field(default="", description="A file, folder or glob; relative to the working directory.")
    dataset: str = Field(
        default="", description="huggingface: hub name, or a folder written by save_to_disk."
    )
    subset: str = Field(default="", description="huggingface: configuration name, such as 20231101.en.")
    split: str = Field(default="train", description="huggingface: split to read.")
    revision: str = Field(default="", description="huggingface: pinned commit, required for hub names.")
    text_column: str = Field(
        default="text", description="jsonl, parquet, csv, huggingface: the column with the text."
    )
    weight: float = Field(
        default=1.0, gt=0, description="Passes over this source per epoch; 0.5 sees half of it, 2 all twice."
    )
    licence: str = Field(default="unknown", description="Licence to print on the corpus card.")

    @model_validator(mode="after")
    def _check_place(self) -> Source:
        needed = {"huggingface": "dataset", "docstrings": ""}.get(self.kind, "path")
        if needed and not getattr(self, needed):
            raise ValueError(f"kind: {self.kind} needs {needed}")
        return self


class Vocabulary(Section):
    """The WordPiece vocabulary: trained on the corpus, or taken over from `path`."""

    path: str = Field(default="", description="Existing vocab.txt or tokenizer.json; empty trains a new one.")
    size: int = Field(default=30522, ge=64, description="Entries to train, special tokens included.")
    lowercase: bool = Field(
        default=True, description="Uncased: lower-case and strip accents, as BertNormalizer does."
    )
    min_frequency: int = Field(default=2, ge=1, description="A pair must occur this often to be merged.")
    training_bytes: int = Field(
        default=1 << 30, ge=1, description="Train on at most this much text, sampled by document hash."
    )


class Corpus(Section):
    """Where the text comes from and where its token shards go."""

    dir: str = Field(description="Folder of the token shards, tokenizer, manifest and card.")
    sources: tuple[Source, ...] = Field(
        default=(), description="Texts to prepare; may be empty when dir is already prepared."
    )
    vocabulary: Vocabulary = Vocabulary()
    min_document_words: int = Field(
        default=20, ge=0, description="Shorter documents are dropped and counted."
    )
    validation_fraction: float = Field(
        default=0.005, ge=0, lt=1, description="Share of documents held out, by document hash."
    )
    shard_tokens: int = Field(default=100_000_000, ge=1000, description="Tokens per shard file.")
    language: str = Field(
        default="en", description="ISO 639-1 code, for the abbreviations of sentence splitting."
    )
    processes: int = Field(default=0, ge=0, description="Preparation processes; 0 means one per core.")


class Model(Section):
    """Shape of the encoder. `size` fills whatever is not given."""

    size: Literal["mini", "small", "medium", "base", "large", "custom"] = "base"
    layers: int = Field(default=0, ge=0, description="Transformer layers.")
    hidden: int = Field(default=0, ge=0, le=MAX_WIDTH, description="Hidden width.")
    heads: int = Field(default=0, ge=0, description="Attention heads; hidden must be a multiple.")
    intermediate: int = Field(default=0, ge=0, description="Feed-forward width; 0 means 4 x hidden.")
    max_positions: int = Field(default=512, ge=8, le=MAX_WIDTH, description="Learned position embeddings.")
    hidden_dropout: float = Field(
        default=0.1, ge=0, lt=1, description="Dropout after embeddings, attention output and FFN."
    )
    attention_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout on attention probabilities. On CUDA drawn by the kernel, from its generator.",
    )
    init_std: float = Field(
        default=0.02, gt=0, description="Truncated-normal initialisation, at two deviations."
    )

    # layers, hidden, heads: google-research/bert README.md (the 24 smaller models), Devlin et al. section 3.
    @model_validator(mode="before")
    @classmethod
    def _fill_from_size(cls, values: Any) -> Any:
        sizes = {
            "mini": (4, 256, 4), "small": (4, 512, 8), "medium": (8, 512, 8),
            "base": (12, 768, 12), "large": (24, 1024, 16),
        }  # fmt: skip
        if isinstance(values, dict):
            values = dict(values)
            size = values.get("size", "base")
            shape = sizes.get(size, (0, 0, 0)) if isinstance(size, str) else (0, 0, 0)
            for key, value in zip(("layers", "hidden", "heads"), shape, strict=True):
                if not values.get(key):
                    values[key] = value
            if not values.get("intermediate") and isinstance(values.get("hidden"), int):
                values["intermediate"] = 4 * values["hidden"]
        return values

    @model_validator(mode="after")
    def _check_shape(self) -> Model:
        if min(self.layers, self.hidden, self.heads) < 1:
            raise ValueError("size: custom needs layers, hidden and heads")
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        return self


class Masking(Section):
    """Masked language modelling, Devlin et al. section 3.1."""

    probability: float = Field(
        default=0.15, gt=0, lt=1, description="Share of each sequence's tokens to predict."
    )
    mask_share: float = Field(default=0.8, ge=0, le=1, description="Of those, replaced by [MASK].")
    random_share: float = Field(
        default=0.1, ge=0, le=1, description="Of those, replaced by a uniform ordinary token."
    )
    whole_word: bool = Field(default=False, description="Mask all pieces of a word together.")

    @model_validator(mode="after")
    def _check_shares(self) -> Masking:
        if self.mask_share + self.random_share > 1:
            raise ValueError(
                f"mask_share {self.mask_share} and random_share {self.random_share} are over 1 together"
            )
        return self


class Pairs(Section):
    """How sequences are cut from documents, Devlin et al. appendix A.2."""

    next_sentence: bool = Field(
        default=True, description="Sentence pairs with NSP; false packs full sentences in one segment."
    )
    random_next_share: float = Field(
        default=0.5, ge=0, le=1, description="Share of pairs whose second segment is random."
    )
    short_share: float = Field(
        default=0.1, ge=0, le=1, description="Share of sequences with a random shorter target length."
    )


class Optimizer(Section):
    name: Literal["adamw", "lamb"] = "adamw"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled; biases and LayerNorm are exempt.")


class Phase(Section):
    """One stretch of training at one sequence length."""

    sequence_length: int = Field(ge=8, description="Longest sequence in tokens, special tokens included.")
    global_sequences: int = Field(ge=1, description="Sequences per optimizer step over all workers.")
    steps: int = Field(ge=1, description="Optimizer steps of this phase.")
    peak_learning_rate: float = Field(gt=0)
    warmup_steps: int = Field(default=0, ge=0, description="Linear warm-up from 0 to the peak.")
    decay: Literal["linear", "polynomial", "constant"] = "linear"
    decay_power: float = Field(
        default=0.5, gt=0, description="Exponent of polynomial decay; NVIDIA's LAMB recipe uses 0.5."
    )
    final_learning_rate: float = Field(default=0.0, ge=0)
    max_predictions: int = Field(
        default=0,
        ge=0,
        description="Masked tokens per sequence at most; 0 means masking.probability of the length.",
    )

    @model_validator(mode="after")
    def _check_steps(self) -> Phase:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must not exceed steps ({self.steps})")
        return self


class Engine(Section):
    """Precision, ZeRO and the micro-batch."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    micro_batch_tokens: int = Field(
        default=8192, ge=8, description="Most tokens a worker holds in one forward pass."
    )
    gradient_clip_norm: float = Field(
        default=1.0, ge=0, description="Global gradient norm to clip to; 0 does not clip."
    )
    activation_checkpointing: bool = Field(
        default=False, description="Recompute layers in the backward pass to save memory."
    )
    compile: bool = Field(default=True, description="torch.compile the layers.")
    max_bad_steps: int = Field(
        default=5, ge=1, description="Steps with NaN or inf in a row before the run stops (exit 4)."
    )
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="DeepSpeed settings we do not name.")


class Checkpointing(Section):
    every_steps: int = Field(default=1000, ge=1)
    keep_last: int = Field(
        default=2, ge=1, description="Newest checkpoints kept; the best by validation loss is kept besides."
    )


class Evaluation(Section):
    every_steps: int = Field(default=1000, ge=1)
    sequences: int = Field(
        default=1024, ge=1, description="Held-out sequences per evaluation, always the same ones."
    )


class Tracking(Section):
    log_every_steps: int = Field(default=10, ge=1)
    wandb: Literal["auto", "offline", "online", "off"] = Field(
        default="auto", description="auto: online if a key is set."
    )
    project: str = "bertrain"
    group: str = ""
    tags: tuple[str, ...] = ()


class Scheduling(Section):
    workers: int = Field(default=1, ge=1, description="Worker processes: one per GPU, or CPU workers.")
    cpus_per_worker: int = Field(
        default=0, ge=0, description="CPU threads per worker; 0 shares the cores out."
    )
    address: str = Field(default="", description="Ray cluster to join; empty starts one on this machine.")
    cluster: str = Field(
        default="", description="What --dry-run tells the time for without --on, such as 8xH100."
    )
    max_failures: int = Field(
        default=3, ge=0, description="Worker failures survived by restarting from a checkpoint."
    )


class RunConfig(Section):
    """Everything a pretraining run is."""

    name: str = Field(description="Run id: a-z, 0-9 and dashes, at most 63.")
    run_dir: str = Field(default="", description="Run folder; empty means runs/<name>.")
    seed: int = Field(default=0, ge=0, lt=2**63)
    corpus: Corpus
    model: Model = Model()
    pairs: Pairs = Pairs()
    masking: Masking = Masking()
    optimizer: Optimizer = Optimizer()
    phases: tuple[Phase, ...] = Field(min_length=1)
    engine: Engine = Engine()
    checkpoint: Checkpointing = Checkpointing()
    evaluation: Evaluation = Evaluation()
    tracking: Tracking = Tracking()
    scheduling: Scheduling = Scheduling()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _RUN_NAME.fullmatch(name):
            raise ValueError(f"{name!r} must be 1 to 63 of a-z, 0-9 and '-', and not begin with '-'")
        return name

    @model_validator(mode="after")
    def _check_phases(self) -> RunConfig:
        for number, phase in enumerate(self.phases):
            if phase.sequence_length > self.model.max_positions:
                raise ValueError(
                    f"phases.{number}.sequence_length ({phase.sequence_length}) exceeds "
                    f"model.max_positions ({self.model.max_positions})"
                )
            if phase.sequence_length > self.engine.micro_batch_tokens:
                raise ValueError(
                    f"engine.micro_batch_tokens ({self.engine.micro_batch_tokens}) is smaller than "
                    f"phases.{number}.sequence_length ({phase.sequence_length})"
                )
            if phase.global_sequences < self.scheduling.workers:
                raise ValueError(
                    f"phases.{number}.global_sequences ({phase.global_sequences}) is smaller than "
                    f"scheduling.workers ({self.scheduling.workers}); every worker needs a sequence"
                )
        return self

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run_dir or f"runs/{self.name}")

    @property
    def total_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> tuple[int, int]:
        """(phase number, 0-based step within it) of the 0-based optimizer `step`."""
        for number, phase in enumerate(self.phases):
            if step < phase.steps:
                return number, step
            step -= phase.steps
        raise IndexError("past the last phase")


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run described by the YAML file `path`, with `key.path=value` overrides applied.

    Values are read as YAML 1.2 reads them (1e-4 is a number, `off` is text) and never converted from one
    type to another. List items are addressed by number: `phases.0.steps=10`.

    Raises:
        InputError: one line per problem, each with the file's line or the override at fault.
    """
    source = _Document(Path(path))
    for override in overrides:
        source.override(override)
    return source.validate()


def dump_config(config: RunConfig) -> str:
    """The resolved run as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


# What may differ between a run and its continuation: nothing here changes which samples are seen or how they
# are weighed. The corpus itself is compared by its fingerprint, which the checkpoint carries.
_FREE_ON_RESUME = (
    "run_dir",
    "corpus",
    "scheduling",
    "tracking",
    "checkpoint",
    "evaluation.every_steps",
    "engine.zero_stage",
    "engine.micro_batch_tokens",
    "engine.activation_checkpointing",
    "engine.compile",
    "engine.max_bad_steps",
    # Learning rates: what one lowers after a divergence.
    "phases.*.peak_learning_rate",
    "phases.*.warmup_steps",
    "phases.*.decay",
    "phases.*.decay_power",
    "phases.*.final_learning_rate",
)


def changed_for_resume(before: RunConfig, after: RunConfig) -> list[str]:
    """Dotted names of the settings that differ although a resumed run must keep them, with both values."""
    old, new = dict(_leaves(before.model_dump())), dict(_leaves(after.model_dump()))
    return [
        f"{name} ({old.get(name)} -> {new.get(name)})"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
        and not any(fnmatchcase(name, free) or fnmatchcase(name, f"{free}.*") for free in _FREE_ON_RESUME)
    ]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything below `value` that is not a section or a list."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else None
    )
    if items is None:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars; PyYAML itself reads 1e-4 as text and `off` as false."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                problem = f"{name} stands twice, first on line {seen[name]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


_DIGITS = "[0-9]+(?:_[0-9]+)*"
_SCALARS: tuple[tuple[str, str, list[str]], ...] = (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", rf"[-+]?(0x[0-9a-fA-F]+|{_DIGITS})", list("-+0123456789")),
    (
        "float",
        rf"[-+]?(\.[0-9]+|{_DIGITS}(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
)
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)
# PyYAML would read a leading 0 as octal.
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(node.value, 16 if "x" in node.value else 10)
)

_Keys = tuple[str | int, ...]


class _Document:
    """One YAML file with the overrides laid over it, which knows where each value came from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root, self.values = _parse(_read(path), str(path))
        if not isinstance(self.values, dict):
            raise InputError(
                f"{path}: found no settings; expected lines of `key: value`, at least name, corpus, phases."
            )
        self.overrides: list[tuple[_Keys, str]] = []

    def override(self, text: str) -> None:
        """Lay `key.path=value` over the file's values."""
        where = f"--set {text}"
        name, equals, written = text.partition("=")
        keys = _keys(name.strip())
        if not equals or "" in keys:
            raise InputError(f"{where}: expected key.path=value, for example phases.0.steps=10.")
        value = _parse(written, where)[1] if written.strip() else ""
        self.overrides.append((keys, where))
        holder: Any = self.values
        for depth, key in enumerate(keys):
            last = depth == len(keys) - 1
            place = f"{where}: {'.'.join(map(str, keys[:depth])) or self.path}"
            fresh: Any = value if last else [] if isinstance(keys[depth + 1], int) else {}
            holder = _enter(holder, key, fresh, place, replace=last)

    def validate(self) -> RunConfig:
        try:
            return RunConfig.model_validate(_with_tuples(self.values, RunConfig), strict=True)
        except ValidationError as error:
            problems = [problem for problem in error.errors(include_url=False) if not _is_echo(problem)]
            raise InputError("\n".join(dict.fromkeys(map(self.explain, problems)))) from None

    def explain(self, error: ErrorDetails) -> str:
        """One line for one problem that pydantic found."""
        path: _Keys = tuple(error["loc"])
        name = ".".join(map(str, path))
        kind, context = error["type"], error.get("ctx", {})
        if kind == "extra_forbidden":
            return f"{self.where(path)}: {name} is not a known setting; {_suggest(path)}"
        if kind == "missing":
            return f"{self.where(path[:-1])}: {name} is missing. {_description(path)}".rstrip()
        if kind == "value_error":
            message = str(context["error"])
            # A check that spans sections begins with the name it is about.
            here = path or _keys(message.split(" ", 1)[0])
            return f"{self.where(here)}: {f'{name}: ' if name else ''}{message}"
        return f"{self.where(path)}: {name} is {_shown(error['input'])}; expected {_expected(kind, context)}"

    def where(self, path: _Keys) -> str:
        """The override that set `path`, else the file and the line nearest to it."""
        for keys, text in reversed(self.overrides):
            if path[: len(keys)] == keys:
                return text
        node, line = self.root, None
        for key in path:
            step = _child(node, key)
            if step is None:
                # Not in the file: an override may have brought it, as a section on its way.
                made = [text for keys, text in self.overrides if keys[: len(path)] == path]
                return made[-1] if made else f"{self.path}:{line}" if line else str(self.path)
            line, node = step
        return f"{self.path}:{line}" if line else str(self.path)


def _keys(name: str) -> _Keys:
    """The keys of a dotted name; whole numbers are list positions."""
    return tuple(int(key) if key.isdecimal() else key for key in name.split("."))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Name a YAML file.") from None


def _parse(text: str, where: str) -> tuple[yaml.Node | None, Any]:
    """The node tree and the values of one YAML text; `InputError` with the line when it is none."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            return root, loader.construct_document(root) if root is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = None if where.startswith("--set") else error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML: {' '.join(str(error).split())}.") from None


def _enter(holder: Any, part: str | int, value: Any, where: str, replace: bool = False) -> Any:
    """`holder[part]`, set to `value` where it is not there yet or `replace` is asked."""
    if isinstance(holder, list):
        if not isinstance(part, int) or part > len(holder):
            raise InputError(
                f"{where} is a list of {len(holder)}; {part!r} is none of its numbers 0 to {len(holder)}."
            )
        if part == len(holder):
            holder.append(value)
        elif replace or holder[part] is None:
            holder[part] = value
        return holder[part]
    if isinstance(holder, dict):
        if replace or holder.get(str(part)) is None:
            holder[str(part)] = value
        return holder[str(part)]
    raise InputError(f"{where} is {_shown(holder)}, not a section; {part!r} cannot be set in it.")


def _with_tuples(value: Any, annotation: Any) -> Any:
    """Lists made tuples wherever the models hold tuples; anything else as it is."""
    if isinstance(value, dict) and _is_section(annotation):
        fields = annotation.model_fields
        return {
            str(key): _with_tuples(item, fields[key].annotation) if key in fields else item
            for key, item in value.items()
        }
    if isinstance(value, list) and typing.get_origin(annotation) is tuple:
        return tuple(_with_tuples(item, typing.get_args(annotation)[0]) for item in value)
    return value


def _child(node: yaml.Node | None, part: str | int) -> tuple[int, yaml.Node] | None:
    """(1-based line, node) of the item `part` of a mapping or sequence node."""
    if isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            if key.value == str(part):
                return key.start_mark.line + 1, item
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line + 1, node.value[part]
    return None


def _section(path: _Keys) -> type[Section] | None:
    """The model that describes the settings below `path`; None where there is none."""
    model: type[Section] = RunConfig
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = (
            [t for t in (field.annotation, *typing.get_args(field.annotation)) if _is_section(t)]
            if field
            else []
        )
        if not inner:
            return None
        model = inner[0]
    return model


def _is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _known_names(model: type[Section], prefix: str = "") -> Iterator[str]:
    """Dotted names of every setting; list items are numbered 0."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for annotation in (field.annotation, *typing.get_args(field.annotation)):
            if _is_section(annotation):
                number = "" if annotation is field.annotation else "0."
                yield from _known_names(annotation, f"{prefix}{name}.{number}")


def _suggest(path: _Keys) -> str:
    """What an unknown setting may have been meant to be: a near name beside it, or elsewhere."""
    wanted, model = str(path[-1]), _section(path[:-1])
    beside = list(model.model_fields) if model else []
    if near := difflib.get_close_matches(wanted, beside, n=1):
        return f"did you mean {near[0]}?"
    everywhere = list(_known_names(RunConfig))
    leaf = {name.rpartition(".")[2]: name for name in reversed(everywhere)}
    if near := difflib.get_close_matches(wanted, leaf, n=1, cutoff=0.8):
        return f"did you mean {leaf[near[0]]}?"
    return f"known here: {', '.join(beside)}."


def _is_echo(problem: ErrorDetails) -> bool:
    """Whether a list is called too short only because an item of it was refused, reported besides."""
    least = problem.get("ctx", {}).get("min_length", 0)
    return problem["type"] == "too_short" and len(problem["input"]) >= least


def _description(path: _Keys) -> str:
    model = _section(path[:-1])
    field = model.model_fields.get(str(path[-1])) if model else None
    return (field.description if field else None) or ""


_EXPECTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda ctx: "a whole number",
    "int_from_float": lambda ctx: "a whole number",
    "float_type": lambda ctx: "a number",
    "finite_number": lambda ctx: "a finite number",
    "bool_type": lambda ctx: "true or false",
    "string_type": lambda ctx: "text; put it in quotes if it looks like a number",
    "literal_error": lambda ctx: f"one of {ctx['expected']}",
    "tuple_type": lambda ctx: "a list",
    "dict_type": lambda ctx: "a section of `key: value` lines",
    "model_type": lambda ctx: "a section of `key: value` lines",
    "too_short": lambda ctx: f"at least {ctx['min_length']} item",
    "greater_than": lambda ctx: f"more than {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"at least {ctx['ge']:g}",
    "less_than": lambda ctx: f"less than {ctx['lt']:g}",
    "less_than_equal": lambda ctx: f"at most {ctx['le']:g}",
}


def _expected(kind: str, context: dict[str, Any]) -> str:
    # Without a phrase of our own, pydantic's name of the rule is still better than nothing.
    return _EXPECTED[kind](context) if kind in _EXPECTED else kind.replace("_", " ")


def _shown(value: Any) -> str:
    """A value as found, short enough for one line."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else f"{text[:57]}..."
