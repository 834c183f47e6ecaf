"""A fitted law as a file: its coefficients, its points, and where they come from. The package has one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pretrain.common.errors import InputError
from pretrain.config import PretrainConfig
from pretrain.planning.law import Law
from pretrain.planning.work import vocabulary_entries

PUBLISHED = Path(__file__).parent / "law.json"
_COEFFICIENTS = 5
_JOIN = ", "


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class MeasuredRun(_Frozen):
    """One measured run.

    Attributes:
        run: its name.
        shape: LAYERSxHIDDEN.
        size: effective parameters (`pretrain.planning.law`).
        tokens: trained on.
        unique: tokens of one epoch.
        flops: executed, with the optimizer's.
        loss: bits per character of the held-out text.
        minutes: of training.
        held_out: whether the law was not fitted to it.
    """

    run: str
    shape: str
    size: float = Field(gt=0)
    tokens: float = Field(gt=0)
    unique: float = Field(gt=0)
    flops: float = Field(gt=0)
    loss: float = Field(gt=0)
    minutes: float = 0.0
    held_out: bool = False


class Recipe(_Frozen):
    """What runs have in common, by name; values that differ among them are joined by commas."""

    values: dict[str, str]

    @classmethod
    def of(cls, *configs: PretrainConfig) -> Recipe:
        """The recipe of runs with these configs."""
        named = [
            {
                "family": _family(config),
                "optimizer": config.optimizer.name,
                "vocabulary": str(vocabulary_entries(config)),
                "masking": _masking(config),
                "sequence length": " and ".join(str(phase.sequence_length) for phase in config.phases),
            }
            for config in configs
        ]
        return cls(values={name: _JOIN.join(dict.fromkeys(one[name] for one in named)) for name in named[0]})

    def differing(self, other: Recipe) -> list[str]:
        """Names, with the other's values, in which another recipe has a value that this one has not."""
        return [
            f"{name} {value}"
            for name, value in other.values.items()
            if value not in self.values.get(name, "").split(_JOIN)
        ]


def _family(config: PretrainConfig) -> str:
    model = config.model
    return model.family + (f" with recursions {model.recursions}" if model.recursions > 1 else "")


def _masking(config: PretrainConfig) -> str:
    """The share of masked tokens, that of each phase where it has its own, and what else is to be predicted."""
    pairs = config.pairs
    shares = [dict.fromkeys(config.masking_shares(number)) for number in range(len(config.phases))]
    phases = [" to ".join(f"{share:g}" for share in ends) for ends in shares]
    return " and ".join(dict.fromkeys(phases)) + (f" with {pairs.objective}" if pairs.has_classifier else "")


Coefficients = Annotated[tuple[float, ...], Field(min_length=_COEFFICIENTS, max_length=_COEFFICIENTS)]


class PublishedLaw(_Frozen):
    """The law with its points.

    Attributes:
        coefficients: those of `law.Law`, in its order.
        resampled: the same of laws that are as likely: fitted to resampled points.
        machine, commit, date: of the newest run.
        words: of the text.
        ground: SHA-256 of the text.
    """

    format: int = 1
    coefficients: Coefficients
    resampled: tuple[Coefficients, ...] = Field(min_length=1)
    points: tuple[MeasuredRun, ...]
    recipe: Recipe
    machine: str
    commit: str
    date: str
    words: int
    ground: str

    @property
    def law(self) -> Law:
        return Law(*self.coefficients)

    @property
    def likely(self) -> tuple[Law, ...]:
        """The laws of the bootstrap."""
        return tuple(Law(*coefficients) for coefficients in self.resampled)

    @property
    def fitted(self) -> list[MeasuredRun]:
        """The points that the law was fitted to."""
        return [point for point in self.points if not point.held_out]

    @property
    def held_out(self) -> list[MeasuredRun]:
        """The points that it was not fitted to."""
        return [point for point in self.points if point.held_out]

    def predicted(self, point: MeasuredRun) -> float:
        """Bits per character of a run by the law."""
        return float(self.law.loss(point.size, point.tokens, point.unique))

    def error(self, points: Sequence[MeasuredRun]) -> float:
        """Largest difference between prediction and measurement, as a share of the measurement; 0 without points."""
        return max((abs(self.predicted(point) / point.loss - 1) for point in points), default=0.0)


def read(path: Path | None = None) -> PublishedLaw:
    """The law in the file `path`, or that of the package.

    Raises `InputError` if there is none, or the file is damaged.
    """
    path = path or PUBLISHED
    try:
        return PublishedLaw.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}). Fit a law with `bench law`, and give its file with --law."
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: not a law of `bench law` ({field or 'content'}: {first['msg']}).") from None
