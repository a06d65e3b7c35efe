"""The resolved run: everything the engine needs to know, decided once. No torch here.

But for a seed that nobody set: that of the first rank, which the others know when there are groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from accelerate_megatron.config.attention import AttentionSettings
from accelerate_megatron.config.layout import Layout
from accelerate_megatron.config.memory_savers import Recompute
from accelerate_megatron.models.shape import ModelShape

Precision = Literal["no", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """What one parameter group of the user's optimizer asks for."""

    lr: float
    weight_decay: float
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the optimizer's own kind: betas and eps, or momentum and nesterov."""
    lr_factor: float = 1.0
    """Factor on the scheduled rate, `min_lr` included."""
    user_group: int = 0
    """Index of the group of the user's optimizer that this one is, or is a part of."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The user's optimizer, in the engine's terms."""

    kind: Literal["adam", "sgd"]
    decoupled_weight_decay: bool
    """True for AdamW; False adds the decay to the gradient, as Adam and SGD do."""
    groups: tuple[GroupSettings, ...]
    group_of: Mapping[str, int]
    """Index into `groups` by canonical Megatron name; a name left out is frozen."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """How learning rate and weight decay change, counted in steps: updates, or samples.

    The rate rises linearly from `init_lr` over `warmup_steps`, then falls to `min_lr` at
    `decay_steps` in the way of `decay_style`.
    """

    decay_steps: int
    warmup_steps: float
    steps_per_update: int
    """1 when steps are updates, the global batch size when they are samples."""
    decay_style: str
    min_lr: float
    init_lr: float = 0.0
    wsd_decay_steps: int | None = None
    """Under "WSD", the last steps, over which the rate falls in the way of `wsd_decay_style`."""
    wsd_decay_style: str | None = None
    weight_decay_style: str = "constant"
    start_weight_decay: float | None = None
    """Of every group that has a weight decay; None: each group's own, which stays."""
    end_weight_decay: float | None = None
    total_steps: int | None = None
    """Of the whole training, over which the weight decay changes; None: not known."""


@dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """How a mixture of experts is run; what it is stands in `ModelShape.experts`."""

    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach the ranks of their experts."""
    grouped: bool = False
    """Whether the experts of a rank are one grouped matrix product, not one after the other."""
    capacity_factor: float | None = None
    """Tokens an expert takes at most, as a multiple of an even share; None: all it is sent."""
    pad_to_capacity: bool = False
    """Whether every expert's input is padded to its capacity."""
    drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens beyond the capacity are dropped: those with the lowest weight, or the last."""
    z_loss_coefficient: float = 0.0
    """Factor of the mean squared log-sum-exp of the routers' logits."""
    load_balancing: Literal["aux_loss", "seq_aux_loss"] = "aux_loss"
    """What `Experts.balance_coefficient` is the factor of: Hugging Face's loss, over the global
    batch and all layers together, or DeepSeek's, over each sequence and layer."""
    bias_update_rate: float = 0.0
    """How far an update moves the router's correction bias; 0: it stays as it was loaded."""


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the loss is scaled in fp16, so that small gradients do not vanish."""

    initial: float = 2.0**16
    """Megatron's own default, 2**32, costs the first dozen updates."""
    smallest: float = 1.0
    growth_interval: int = 1000
    """Updates without overflow after which the scale doubles; Megatron's loss_scale_window."""
    hysteresis: int = 2
    """Overflows after which each one halves the scale, counted from the last doubling."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Fields of Megatron-Core's own configuration objects, set after everything else.

    Dtypes are words: "fp32", "bf16", "fp16", "fp8".
    """

    transformer: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run, resolved from plugin, model, optimizer, scheduler and DataLoader."""

    layout: Layout
    shape: ModelShape
    precision: Precision
    num_micro_batches: int
    micro_batch_size: int | None
    """Rows of a micro-batch; None when no DataLoader was prepared."""
    gradient_clipping: float
    """L2 norm that gradients are scaled down to; 0: never."""
    use_distributed_optimizer: bool
    per_token_loss: bool
    """Whether the loss is the mean over tokens of the global batch, or of micro-batches' means."""
    optimizer: OptimizerSettings | None
    schedule: ScheduleSettings | None
    seed: int
    """What the model's own random numbers (dropout) start from."""
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    """Without effect on a model without experts."""
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    recompute: Recompute | None = None
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    """Without effect but in fp16."""
    optimizer_cpu_offload: bool = False
    """Whether the optimizer's state and step are in host memory."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    use_precision_aware_optimizer: bool = False
    use_fsdp: bool = False
    """Whether PyTorch's FSDP2 shards parameters, gradients and optimizer over the replicas."""
    overlap_grad_reduce: bool = False
    """Whether gradients are reduced while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Whether a distributed optimizer's weights are gathered when the forward pass needs them."""
    async_save: bool = False
    """Whether checkpoints are written in the background while training goes on."""
    return_logits: bool = False
    """Whether a step hands out the logits, on the ranks of the last stage."""
    vocab_multiple: int = 128
    """What the padded vocabulary is a multiple of on each tensor-parallel rank."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    """Fields of Megatron-Core's configuration objects that the user set by their names."""

    @property
    def needs_equal_lengths(self) -> bool:
        """Whether ranks exchange tokens of experts in pieces that have to be of one size."""
        settings = self.experts
        return self.shape.experts is not None and (
            settings.dispatcher == "allgather" or settings.pad_to_capacity
        )

    @property
    def balances_experts(self) -> bool:
        """Whether any loss keeps the load of the experts even."""
        experts, settings = self.shape.experts, self.experts
        if experts is None:
            return False
        return bool(experts.balance_coefficient or settings.z_loss_coefficient)

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one update; None when no DataLoader was prepared."""
        if self.micro_batch_size is None:
            return None
        return self.micro_batch_size * self.num_micro_batches * self.layout.dp_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the vocabulary tensors over all tensor-parallel ranks."""
        return self.layout.padded_vocab_size(self.shape.vocab_size, self.vocab_multiple)
