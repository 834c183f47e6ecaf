"""Planted scaling laws, and runs that obey them, for the tests of planning."""

import numpy as np

from pretrain.planning.law import Law
from pretrain.planning.published import MeasuredRun, PublishedLaw, Recipe
from tests.bench.law.fitting import published_fit

PLANTED = Law(floor=0.4, size_scale=60, size_exponent=0.33, data_scale=60, data_exponent=0.30)
SIZES = {"2x128": 0.75e6, "4x192": 2e6, "4x256": 3.3e6, "6x384": 10e6}
BUDGETS = (4e12, 2e13, 6e13, 2e14)


def planted_points(noise: float = 0.0, unique: float = 14e6, law: Law = PLANTED) -> tuple[MeasuredRun, ...]:
    """16 runs; `noise` is the standard deviation of the logarithm of the loss."""
    random, points = np.random.default_rng(3), []
    for flops in BUDGETS:
        for shape, size in SIZES.items():
            tokens = flops / 6 / size
            loss = float(law.loss(size, tokens, unique)) * float(np.exp(random.normal(0, noise)))
            run = f"{shape}-{flops:g}"
            points.append(
                MeasuredRun(run=run, shape=shape, size=size, tokens=tokens, unique=unique, flops=flops, loss=loss)
            )
    return tuple(points)


def planted_law(noise: float = 0.0, **values: object) -> PublishedLaw:
    """The law fitted to `planted_points`, as `bench law` publishes it."""
    points = planted_points(noise)
    common = {
        **published_fit(points),
        "points": points,
        "recipe": Recipe(values={"family": "modernbert", "optimizer": "muon", "vocabulary": "16000"}),
        "machine": "2 cores",
        "commit": "abc",
        "date": "2026-11-24",
        "words": 10,
        "ground": "x",
    }
    return PublishedLaw.model_validate({**common, **values})
