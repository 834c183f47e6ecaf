"""The loss scale of fp16 follows the rule of DeepSpeed's dynamic scaler."""

import random
from typing import Any

import pytest

from pretrain.training.engine.deepspeed_patches import import_deepspeed
from pretrain.training.engine.loss_scale import LossScale

SLOW: dict[str, Any] = {"hysteresis": 4, "consecutive_hysteresis": True, "loss_scale_window": 7}
FAST: dict[str, Any] = {"hysteresis": 1, "initial_scale_power": 4, "loss_scale_window": 5}


@pytest.mark.parametrize("section", [{}, {"loss_scale_window": 3}, FAST, SLOW])
def test_it_goes_as_deepspeeds_scaler_does(section: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import_deepspeed()
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # rank 0 logs
    ours = LossScale.of(section)
    theirs = loss_scaler.DynamicLossScaler(
        init_scale=2 ** section.get("initial_scale_power", 16),
        scale_window=section.get("loss_scale_window", 1000),
        min_scale=1,
        delayed_shift=section.get("hysteresis", 2),
        consecutive_hysteresis=section.get("consecutive_hysteresis", False),
        raise_error_at_min_scale=False,
    )
    draw = random.Random(0)
    for step in range(3000):
        overflow = draw.random() < (0.3 if step % 500 < 60 else 0.02)
        ours.update(overflow=overflow)
        theirs.update_scale(overflow)
        assert ours.state() == {key: getattr(theirs, key) for key in ours.state()}, step


def test_a_checkpoint_keeps_it() -> None:
    scale = LossScale.of({"loss_scale_window": 3})
    for overflow in (True, True, False, False, False, False, False):
        scale.update(overflow=overflow)
    restored = LossScale.of({"loss_scale_window": 3})
    restored.load(scale.state())
    assert restored == scale


def test_a_fixed_scale_stays() -> None:
    scale = LossScale.of({"loss_scale": 128})
    for _ in range(5):
        scale.update(overflow=True)
    assert scale.cur_scale == 128
