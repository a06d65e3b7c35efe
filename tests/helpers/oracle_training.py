"""The oracle's side: plain transformers and torch, in a process that knows nothing of ours.

`python -m tests.helpers.oracle_training FD` answers pickled `OracleCase`s with `OracleRun`s.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.helpers.rank_messages import to_bytes
from tests.helpers.tiny_encoders import ENCODERS
from tests.helpers.tiny_models import TinyModel, TinyOptimizer

Batch = dict[str, torch.Tensor]

FORBIDDEN = ("accelerate_megatron", "megatron")


@dataclass(frozen=True)
class LinearSchedule:
    """Linear warm-up from `init_lr` to the group's `lr`, then linear decay to `min_lr`.

    The update after k updates uses the rate of step k: with warm-up the first one uses `init_lr`.

    Source: megatron-core 0.16.1, optimizer_param_scheduler.py, OptimizerParamScheduler.get_lr.
    """

    warmup_steps: int
    decay_steps: int
    min_lr: float = 0.0
    init_lr: float = 0.0

    def rate(self, step: int, max_lr: float) -> float:
        """Return the learning rate of the update that follows `step` updates."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.init_lr + (max_lr - self.init_lr) * step / self.warmup_steps
        if step > self.decay_steps:
            return self.min_lr
        decayed = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.min_lr + (1.0 - decayed) * (max_lr - self.min_lr)


@dataclass(frozen=True)
class OracleCase:
    """One training run: one update per global batch.

    Args:
        model: The model's recipe.
        optimizer: The optimizer's recipe.
        batches: Global batches: input_ids, labels and attention_mask, [rows, s].
        clip: The largest gradient norm; None does not clip.
        schedule: None keeps the groups' own learning rates.
        dtype: "fp32" or "bf16". In bf16 the parameters are bf16, gradients of micro-batches are
            added up in fp32, and the optimizer works on fp32 copies: what Megatron does.
        micro_batch_rows: Rows of one backward pass; None takes the batch at once. The loss is
            divided by the valid tokens of the whole batch either way.
        z_loss: Factor of the routers' z loss, which is in the gradients but not in the loss.
        sequence_loss: Factor of the load-balancing loss of each sequence; likewise.
    """

    model: TinyModel
    optimizer: TinyOptimizer
    batches: list[Batch]
    clip: float | None = 1.0
    schedule: LinearSchedule | None = None
    dtype: str = "fp32"
    micro_batch_rows: int | None = None
    z_loss: float = 0.0
    sequence_loss: float = 0.0


@dataclass
class OracleRun:
    """What the run gave, update by update."""

    losses: list[float] = field(default_factory=list)
    """Mean loss over all valid tokens of the global batch, before the update."""
    grad_norms: list[float] = field(default_factory=list)
    """Global gradient norm before clipping."""
    rates: list[list[float]] = field(default_factory=list)
    """Learning rate of each parameter group."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """The state dict after the last update; in bf16 the fp32 copies of the parameters."""
    first_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    """Each parameter's gradient in the first update, before clipping."""
    foreign_modules: list[str] = field(default_factory=list)
    """Modules of ours in the oracle's process: has to be empty."""


def train(case: OracleCase) -> OracleRun:
    """Train `case` with plain PyTorch."""
    model = case.model.build()
    main = case.model.build()  # what the optimizer updates; in fp32 the same values as `model`
    optimizer = case.optimizer.build(main)
    case.optimizer.build(model)  # freezes the same parameters
    if case.dtype == "bf16":
        model.bfloat16()
        _copy_parameters(model, main)  # Megatron's fp32 copies start from the bf16 parameters
    max_rates = [group["lr"] for group in optimizer.param_groups]

    run = OracleRun()
    for step, batch in enumerate(case.batches):
        if case.schedule is not None:
            for group, max_rate in zip(optimizer.param_groups, max_rates, strict=True):
                group["lr"] = case.schedule.rate(step, max_rate)
        run.rates.append([group["lr"] for group in optimizer.param_groups])
        run.losses.append(_accumulate_gradients(model, main, batch, case))
        if step == 0:
            run.first_grads = {
                name: parameter.grad.clone()
                for name, parameter in main.named_parameters()
                if parameter.grad is not None
            }
        limit = float("inf") if case.clip is None else case.clip
        run.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(main.parameters(), limit)))
        optimizer.step()
        _copy_parameters(main, model)
    run.weights = {name: value.clone() for name, value in main.state_dict().items()}
    return run


def _accumulate_gradients(
    model: torch.nn.Module, main: torch.nn.Module, batch: Batch, case: OracleCase
) -> float:
    """Put the gradients of the batch's mean token loss on `main`, in fp32; return the loss."""
    if case.model.family in ENCODERS:
        return _encoder_gradients(model, main, batch)
    num_tokens = int((_targets(model, batch) != -100).sum())
    rows = case.micro_batch_rows or len(batch["labels"])
    main.zero_grad()
    total = 0.0
    for micro_batch in _split(batch, rows):
        loss_sum, outputs = _forward(model, micro_batch)
        model.zero_grad()
        loss = loss_sum / max(num_tokens, 1)
        if case.z_loss or case.sequence_loss:
            loss = loss + _router_losses(outputs.router_logits, micro_batch, case)
        loss.backward()
        total += loss_sum.item()
        for source, target in zip(model.parameters(), main.parameters(), strict=True):
            if source.grad is not None:
                grad = source.grad.float()
                target.grad = grad if target.grad is None else target.grad + grad
    return total / max(num_tokens, 1)


def _encoder_gradients(model: torch.nn.Module, main: torch.nn.Module, batch: Batch) -> float:
    """The same for an encoder, whose loss is transformers' own, of the whole batch."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    for source, target in zip(model.parameters(), main.parameters(), strict=True):
        target.grad = None if source.grad is None else source.grad.float()
    return float(loss)


def _split(batch: Batch, rows: int) -> Iterator[Batch]:
    for start in range(0, len(batch["labels"]), rows):
        yield {key: value[start : start + rows] for key, value in batch.items()}


def _forward(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
    """Return the summed loss of the valid tokens, and all that the model returned."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if model.config.is_encoder_decoder and "decoder_input_ids" not in batch:
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    outputs = model(**inputs)
    labels = _targets(model, batch)
    logits = outputs.logits.float()[:, : labels.shape[1]]
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=-100,
        reduction="sum",
    )
    if getattr(model.config, "output_router_logits", False):
        # What the model itself adds to its mean loss.
        num_tokens = (labels != -100).sum()
        loss = loss + num_tokens * model.config.router_aux_loss_coef * outputs.aux_loss
    return loss, outputs


def _targets(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return what the logits predict: an encoder-decoder model's labels stand at their place."""
    return batch["labels"] if model.config.is_encoder_decoder else batch["labels"][:, 1:]


def _router_losses(
    logits: tuple[torch.Tensor, ...], batch: Batch, case: OracleCase
) -> torch.Tensor:
    """Return the z loss and the sequence-level loss of a whole batch, layer by layer."""
    mask = batch["attention_mask"].bool()
    total = torch.zeros(())
    for layer in logits:
        layer = layer.view(*mask.shape, -1)
        total = total + case.z_loss * torch.logsumexp(layer[mask], -1).square().mean()
        for row, is_real in zip(layer, mask, strict=True):
            scores = torch.softmax(row[is_real], -1)
            chosen = scores.topk(2).indices.flatten()
            shares = torch.bincount(chosen, minlength=scores.shape[1]) / len(scores)
            balance = scores.shape[1] / 2 * (shares * scores.mean(0)).sum()
            total = total + case.sequence_loss * balance / len(mask)
    return total


def _copy_parameters(source: torch.nn.Module, target: torch.nn.Module) -> None:
    with torch.no_grad():
        for old, new in zip(target.parameters(), source.parameters(), strict=True):
            old.copy_(new)


def evaluate(model: torch.nn.Module, batch: Batch) -> float:
    """Return the mean loss over the valid tokens of `batch`, without gradients."""
    num_tokens = int((_targets(model, batch) != -100).sum())
    with torch.no_grad():
        return _forward(model, batch)[0].item() / max(num_tokens, 1)


def _answer(question: bytes) -> OracleRun | str:
    try:
        run = train(pickle.loads(question))
    except Exception:  # the test that asked is told
        return traceback.format_exc()
    run.foreign_modules = [name for name in sys.modules if name.split(".")[0] in FORBIDDEN]
    if run.foreign_modules:
        return f"modules that the oracle must not know were imported: {run.foreign_modules}"
    return run


def main(fd: int) -> None:
    """Answer cases until the other end of the pipe is closed."""
    torch.set_num_threads(1)
    connection: Any = Connection(fd)
    while True:
        try:
            question = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(to_bytes(_answer(question)))


if __name__ == "__main__":
    # Under its own name, so that the classes are those the tests know.
    from tests.helpers import oracle_training

    oracle_training.main(int(sys.argv[1]))
