"""Settings of a run that continues from a checkpoint: learning rates by layer, and replay of general text."""

from __future__ import annotations

from pydantic import Field, model_validator

from pretrain.common.sections import LocalPath, Section


class AdaptationConfig(Section):
    """Settings of a run that continues from the checkpoint in `start_from`."""

    layer_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Learning rate of a layer divided by the rate of the layer above it; heads and added words have "
        "the full rate. With 1, all layers have the same rate.",
    )
    replay_corpus: LocalPath = Field(
        default="",
        description="Folder of a second prepared corpus, of text similar to the training text of start_from. Its "
        "held-out loss shows what the model forgets.",
    )
    replay_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the training sequences that come from replay_corpus, so that the model forgets less.",
    )

    @model_validator(mode="after")
    def _check_replay(self) -> AdaptationConfig:
        if self.replay_share and not self.replay_corpus:
            raise ValueError(
                f"replay_share ({self.replay_share}) needs replay_corpus: the corpus from which text is replayed"
            )
        return self
