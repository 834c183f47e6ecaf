"""The dynamic loss scale of fp16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_STATE_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass
class LossScale:
    """The loss scale, updated by DeepSpeed's rule: halved on overflow, doubled after `window` steps without overflow.

    DeepSpeed's scaler exits the process at the minimum scale. Here, the training loop stops the run, and its message
    names the last checkpoint.
    """

    cur_scale: float  # the scale of the next step
    is_fixed: bool  # whether the scale never changes
    window: int  # number of steps without overflow after which the scale is doubled
    minimum: float  # the lowest scale
    hysteresis: int  # number of overflows that lower the scale once
    resets_hysteresis: bool  # whether each step without overflow restores the full `cur_hysteresis`
    cur_iter: int = 0  # number of steps so far
    last_overflow_iter: int = -1  # index of the last step that overflowed; -1 if none did
    cur_hysteresis: int = field(init=False)  # number of overflows until the scale is lowered next

    def __post_init__(self) -> None:
        self.cur_hysteresis = self.hysteresis

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> LossScale:
        """Create the loss scale from the `fp16` section of DeepSpeed's config, with DeepSpeed's defaults."""
        fixed = float(section.get("loss_scale", 0))
        return cls(
            fixed or 2.0 ** section.get("initial_scale_power", 16),
            is_fixed=bool(fixed),
            window=section.get("loss_scale_window", 1000),
            minimum=section.get("min_loss_scale", 1),
            hysteresis=section.get("hysteresis", 2),
            resets_hysteresis=section.get("consecutive_hysteresis", False),
        )

    def update(self, *, overflow: bool) -> None:
        """Update the scale after one step."""
        if not self.is_fixed and overflow:
            self._lower()
        elif not self.is_fixed:
            steps = self.cur_iter - self.last_overflow_iter - 1  # number of steps before this one without overflow
            doubles = steps > 0 and steps % self.window == 0
            if self.resets_hysteresis or doubles:
                self.cur_hysteresis = self.hysteresis
            self.cur_scale *= 2 if doubles else 1
        self.cur_iter += 1

    def _lower(self) -> None:
        if self.hysteresis == 1 or self.cur_hysteresis == 1:
            self.cur_scale = max(self.cur_scale / 2, self.minimum)
        else:
            self.cur_hysteresis -= 1
        self.last_overflow_iter = self.cur_iter

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {key: getattr(self, key) for key in _STATE_KEYS}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        for key in _STATE_KEYS:
            if key in state:
                setattr(self, key, state[key])
