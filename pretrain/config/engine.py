"""Settings of the training engine: precision, ZeRO, micro-batches, checkpoints and loss spikes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pretrain.common.sections import Section

Precision = Literal["bf16", "fp16", "fp32"]

# DeepSpeed setting -> our setting that determines it.
_DETERMINED_BY = {
    "zero_optimization.stage": "engine.zero_stage",
    "bf16.enabled": "engine.precision",
    "fp16.enabled": "engine.precision",
    "gradient_clipping": "engine.gradient_clip_norm",
    "zero_optimization.round_robin_gradients": "the layout of checkpoints",
    "train_batch_size": "phases and engine.micro_batch_tokens",
    "train_micro_batch_size_per_gpu": "phases and engine.micro_batch_tokens",
    "gradient_accumulation_steps": "phases and engine.micro_batch_tokens",
    "optimizer": "the section optimizer",
    "scheduler": "the phases' learning rates",
}
# DeepSpeed settings that make a forward pass wait for the device.
_SYNCHRONIZING = ("timers", "wall_clock_breakdown", "flops_profiler")


class EngineConfig(Section):
    """Precision, ZeRO and micro-batches."""

    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1,
        description="ZeRO stage: what is partitioned across the workers. 0 nothing, 1 optimizer states, "
        "2 also gradients, 3 also parameters.",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        default="auto",
        description="Floating-point type of the computation. auto uses bf16 on Ampere GPUs and newer, fp16 on Volta "
        "and Turing, fp32 on older GPUs. On CPUs auto times matrix products and uses the faster of bf16 and fp32.",
    )
    micro_batch_tokens: int = Field(
        default=8192, ge=8, description="Maximum tokens per forward pass of a worker. A lower value saves memory."
    )
    gradient_clip_norm: float = Field(
        default=1.0,
        ge=0,
        description="Global gradient norm above which gradients are scaled down. 0 disables clipping.",
    )
    activation_checkpointing: bool = Field(
        default=False, description="Recompute the layers in the backward pass. Saves memory, costs time."
    )
    compile: Literal["auto", True, False] = Field(
        default="auto",
        description="Compile the layers with torch.compile. auto compiles, except in fine-tuning on a CPU if "
        "compiling would take longer than it saves.",
    )
    cuda_graphs: Literal["auto", True, False] = Field(
        default="auto",
        description="Capture forward and backward passes as CUDA graphs, one for each micro-batch shape. Speeds up "
        "small models and batches on GPUs, whose kernels take longer to launch than to run. auto captures them in "
        "pretraining if no setting prevents it and --dry-run --on estimates a shorter step with them. Needs bf16, "
        "zero_stage 1, flash attention, and masked language modeling as the objective. To limit the number of shapes, "
        "about 2 % of the tokens and 4 % of the masked ones are padding that the loss ignores. No effect on a CPU.",
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict,
        description="Further DeepSpeed settings, passed through unchanged. In ZeRO stages 1 and 2, gradients are "
        "summed in bertrain's buckets, so DeepSpeed's bucket sizes and overlap_comm have no effect there.",
    )

    @property
    def graph_obstacle(self) -> str:
        """Return the setting that prevents capturing passes as CUDA graphs; "" if there is none."""
        obstacles = {
            f"zero_stage is {self.zero_stage}": self.zero_stage != 1,
            "activation_checkpointing is true": self.activation_checkpointing,
            **{f"deepspeed.{name} is set": name in self.deepspeed for name in _SYNCHRONIZING},
        }
        return next((setting for setting, prevents in obstacles.items() if prevents), "")

    @model_validator(mode="after")
    def _check_graphs(self) -> EngineConfig:
        if self.cuda_graphs is True and (obstacle := self.graph_obstacle):
            raise ValueError(
                "cuda_graphs needs zero_stage 1, no activation_checkpointing and none of DeepSpeed's "
                f"timers and profilers; {obstacle}. Change that, or set cuda_graphs to false"
            )
        return self

    @property
    def compiled(self) -> bool:
        """Return whether the layers are compiled; fine-tuning replaces auto before it builds the model."""
        return self.compile is not False

    @property
    def resolved_precision(self) -> Precision:
        """Return the precision; `ValueError` if it is still auto, which `pretrain.model.precision` resolves."""
        if self.precision == "auto":
            raise ValueError("engine.precision: auto is not resolved yet")
        return self.precision

    @field_validator("deepspeed")
    @classmethod
    def _check_deepspeed(cls, values: dict[str, Any]) -> dict[str, Any]:
        for key, our_setting in _DETERMINED_BY.items():
            value: Any = values
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                raise ValueError(f"{key} is set by {our_setting}; remove it here")
        return values


class CheckpointConfig(Section):
    """Checkpoints of a run, written while training continues.

    Each is first copied to CPU memory: 12 bytes per parameter (16 if weights are averaged), divided among the workers.
    """

    every_steps: int = Field(default=1000, ge=1, description="Optimizer steps between checkpoints.")
    every_minutes: float = Field(
        default=0.0,
        ge=0,
        description="Minutes between additional checkpoints, whatever the number of steps. 0 disables them.",
    )
    keep_last: int = Field(
        default=2,
        ge=1,
        description="Number of latest checkpoints to keep. The one with the lowest validation loss is also kept.",
    )
    keep_at: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="Steps after which a checkpoint is saved and always kept, for example to fork from it."
    )
    keep_every_tokens: int = Field(
        default=0, ge=0, description="Keep the first checkpoint after each multiple of this token count. 0 disables it."
    )


class SpikeConfig(Section):
    """Loss spikes: the run rolls back to its last checkpoint and skips the data that caused the spike.

    If three rollbacks in a row lead to no checkpoint past the failed step, the run stops as diverged (exit code 4).
    """

    spike_sigmas: float = Field(
        default=10.0,
        ge=0,
        description="A loss is a spike if it exceeds the median of the last 64 losses by this many standard deviations "
        "and by 20 %. 0 disables the detection.",
    )
