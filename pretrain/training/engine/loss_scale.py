"""The loss scale of fp16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KEPT = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass
class LossScale:
    """Halved when gradients overflow, doubled after `window` steps without; the rule of DeepSpeed's dynamic scaler.

    DeepSpeed's own ends the process at the least scale. The loop ends such a run, and names its checkpoint.

    Attributes:
        cur_scale: that of the next step.
        cur_iter: steps so far.
        last_overflow_iter: the last step that overflowed.
        cur_hysteresis: at 1, the next overflow lowers the scale; else it lowers this number.
    """

    cur_scale: float
    fixed: bool
    window: int
    least: float
    hysteresis: int
    refills: bool  # the hysteresis, at each step without overflow
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = field(init=False)

    def __post_init__(self) -> None:
        self.cur_hysteresis = self.hysteresis

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> LossScale:
        """That of the section `fp16` of DeepSpeed's config, with its defaults."""
        fixed = float(section.get("loss_scale", 0))
        return cls(
            fixed or 2.0 ** section.get("initial_scale_power", 16),
            fixed=bool(fixed),
            window=section.get("loss_scale_window", 1000),
            least=section.get("min_loss_scale", 1),
            hysteresis=section.get("hysteresis", 2),
            refills=section.get("consecutive_hysteresis", False),
        )

    def update(self, *, overflow: bool) -> None:
        """Take one step into account."""
        if not self.fixed and overflow:
            self._lower()
        elif not self.fixed:
            quiet = self.cur_iter - self.last_overflow_iter - 1
            raises = quiet > 0 and quiet % self.window == 0
            if self.refills or raises:
                self.cur_hysteresis = self.hysteresis
            self.cur_scale *= 2 if raises else 1
        self.cur_iter += 1

    def _lower(self) -> None:
        if self.hysteresis == 1 or self.cur_hysteresis == 1:
            self.cur_scale = max(self.cur_scale / 2, self.least)
        else:
            self.cur_hysteresis -= 1
        self.last_overflow_iter = self.cur_iter

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {key: getattr(self, key) for key in _KEPT}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        for key in _KEPT:
            if key in state:
                setattr(self, key, state[key])
