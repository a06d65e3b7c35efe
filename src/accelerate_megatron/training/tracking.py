"""Writing the numbers of each update: TensorBoard's event files, or lines of the log."""

from __future__ import annotations

import importlib.util
import math
import warnings
from typing import Any

from accelerate_megatron import engine
from accelerate_megatron.config.logging import LoggingSettings
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.failures import on_every_rank
from accelerate_megatron.log import get_logger, is_logging_rank
from accelerate_megatron.training.metrics import UpdateRecord, memory_bytes
from accelerate_megatron.training.session import TrainingSession
from accelerate_megatron.weights.holders import gather_objects

logger = get_logger(__name__)


def check_tensorboard(settings: LoggingSettings | None) -> None:
    """Refuse event files where the package that writes them is missing.

    Raises:
        ConfigurationError: `tensorboard_dir` is set without tensorboard.
    """
    if settings is None or settings.tensorboard_dir is None:
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigurationError(
            f"tensorboard_dir is {settings.tensorboard_dir!r}, but the package that writes event "
            "files is not installed: pip install tensorboard, or leave tensorboard_dir out."
        )


class TrainingLog:
    """Logs the updates and evaluations of one session. Every rank has one; the last rank writes.

    An evaluation is what is run between two updates; its loss is the mean over all its tokens.
    """

    def __init__(self, settings: LoggingSettings, session: TrainingSession) -> None:
        """Open the event files. Every rank calls it.

        Args:
            settings: What is logged.
            session: The session.

        Raises:
            ConfigurationError: The folder cannot be written; on every rank.
        """
        self._settings = settings
        self._session = session
        self._writer: Any = None
        if settings.tensorboard_dir is not None:
            # Only one rank opens them, and all have to hear when it cannot.
            on_every_rank(self._open, gather_objects)

    def _open(self) -> None:
        if not is_logging_rank():
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensorboard's own imports
            from torch.utils.tensorboard import SummaryWriter

            folder = self._settings.tensorboard_dir
            try:
                self._writer = SummaryWriter(folder)
            except OSError as error:
                raise ConfigurationError(
                    f"tensorboard_dir is {folder!r}, which cannot be written: {error}. Name a "
                    "folder on a disk that the last rank may write to."
                ) from error

    def __call__(self, record: UpdateRecord) -> None:
        """Log an update. Every rank calls it: the parameters' norm is taken over all."""
        self.end_evaluation(record.number - 1)
        if record.number % self._settings.interval:
            return
        self._write(self._scalars(record), record.number)

    def _scalars(self, record: UpdateRecord) -> dict[str, float]:
        settings = self._settings
        scalars = {"lm loss": record.loss}
        if record.grad_norm is not None:
            scalars["grad-norm"] = record.grad_norm
        if settings.learning_rate:
            scalars["learning-rate"] = record.learning_rate
        if settings.loss_scale:
            scalars["loss-scale"] = record.loss_scale
        if settings.batch_size:
            scalars["batch-size"] = record.num_samples
        if settings.throughput:
            scalars["tokens-per-second"] = record.tokens_per_second
        return scalars | self._on_request(record)

    def _on_request(self, record: UpdateRecord) -> dict[str, float]:
        settings, session = self._settings, self._session
        scalars: dict[str, float] = {}
        if settings.params_norm:
            scalars["params-norm"] = engine.parameter_norm(session.chunks)
        if record.num_zeros is not None:
            scalars["num-zeros"] = record.num_zeros
        if settings.memory:
            scalars |= memory_bytes(session.device)
        if settings.timers:
            scalars["iteration-time"] = record.seconds
            scalars["weight-decay"] = record.weight_decay
            scalars["throughput TFLOP/s per device"] = record.tflops_per_device
            mfu = record.mfu(session.device)
            if mfu is not None:
                scalars["MFU"] = mfu
        if settings.world_size:
            scalars["world-size"] = session.run.layout.world_size
        return scalars

    def end_evaluation(self, num_updates: int) -> None:
        """Log the evaluation that has been run since the last update, if there was one."""
        total, weight = self._session.take_evaluated()
        if weight == 0 or not self._settings.validation:
            return
        loss = total / weight
        scalars = {"lm loss validation": loss, "lm loss validation ppl": math.exp(min(20.0, loss))}
        self._write(scalars, max(num_updates, 0))

    def _write(self, scalars: dict[str, float], number: int) -> None:
        if not is_logging_rank():
            return
        if self._writer is None:
            text = " | ".join(f"{name} {value:.6g}" for name, value in scalars.items())
            logger.info("update %d | %s", number, text)
            return
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def close(self) -> None:
        """Log what is left and close the files."""
        self.end_evaluation(self._session.num_updates)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
