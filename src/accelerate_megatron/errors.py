"""The errors a user of this package can meet.

Each one is raised with a message that names the value as the user wrote it, the rule
it breaks, and what to do. What is *not* here: errors of torch or Megatron-Core.

The names are stable. `docs/errors.md` is written from this file: the first paragraph of a class
says what happened, the one that begins with "Cure:" what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class ConfigurationError(ValueError):
    """A configuration that cannot work. Raised on every rank, before anything is computed with it.

    Cure: set the named field to one of the values that the message offers. Several problems
    are listed at once, so one more run is enough. `accelerate-megatron plan` lists layouts
    that fit a model.
    """

    @classmethod
    def of(cls, problems: Sequence[str], *, advice: str | None = None) -> ConfigurationError:
        """Return one error that lists all `problems`, so that one run shows all of them.

        Args:
            problems: What is wrong, one or more.
            advice: What to do about all of them together.
        """
        if len(problems) == 1:
            return cls(f"{problems[0]} {advice}" if advice else problems[0])
        listed = "".join(f"\n  - {problem}" for problem in problems)
        last = f"\n{advice}" if advice else ""
        return cls(f"{len(problems)} settings do not fit:{listed}{last}")


class UnsupportedError(ConfigurationError):
    """Something that exists elsewhere but not here; the message says what to use instead.

    Cure: take what the message names in its place; docs/migrate.md has the whole list.
    """


class UnknownFieldError(ConfigurationError, TypeError):
    """A keyword that is no field of the plugin. A TypeError too, as Python's own would be.

    Cure: correct the spelling; the message has the nearest names, docs/plugin.md all of them.
    """


class WeightsError(ValueError):
    """Weights that do not fit the model: missing, left over, or of another shape.

    Cure: compare the names in the message with the folder or model they came from: mostly the
    config is of another model than the weights. docs/families.md has every name.
    """


class BatchError(ValueError):
    """A batch that the model cannot take. Raised alike on every rank.

    Cure: change the collator or the dataset as the message says; docs/data.md has the keys and
    shapes.
    """


class GenerationError(ValueError):
    """A prompt or a setting that `megatron_generate` cannot take. Raised alike on every rank.

    Cure: change the argument that is named; docs/generation.md has the settings and their
    ranges.
    """


class DataFileError(ValueError):
    """A file of text or token ids that is not what it has to be; the text says where.

    Cure: repair or rebuild the file (`accelerate-megatron data build`); `accelerate-megatron
    data inspect` reads it as training does.
    """


class BuildStoppedError(RuntimeError):
    """A process of `data build` was ended from outside. What it had finished is kept.

    Cure: repeat the command, which goes on; with fewer `--workers` where memory was short.
    """


class TrainingLoopError(RuntimeError):
    """A call the training loop makes that would have no effect, or another one than it says.

    Cure: take the call out or move it as the message says; docs/migrate.md has a loop that
    works.
    """


class EngineError(ImportError):
    """Megatron-Core is missing, of an unknown version, or was imported in the wrong way.

    Cure: `pip install 'megatron-core>=0.16.1,<0.20'`, and make the `Accelerator` before
    anything imports megatron. `accelerate-megatron env` says which version would be taken.
    """


class RanksDisagreeError(RuntimeError):
    """The ranks of one job were started with different settings.

    Cure: give the field that is named the same value on the ranks that are named: the same
    environment, script and files on every machine.
    """


class RendezvousError(RuntimeError):
    """The ranks of a job did not find each other, or not all of them came.

    Cure: check the address, the port and the number of ranks that the message shows; over
    several network devices set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.
    """


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or is not what it has to be to be loaded.

    Cure: free the disk or name another folder; `accelerate-megatron ckpt validate` says which
    file is damaged, and `load_state("auto")` takes the newest one that is not.
    """


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint of another model, or without something that is asked for.

    Cure: load it into the model it was saved from; where only the optimizer is missing, set
    `no_load_optim=True`.
    """


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint holds something whose loading could run code. Nothing of it was run.

    Cure: ask its author for one without pickled objects. `allow_pickle=True` is for files of
    your own.
    """


class CheckpointLockedError(CheckpointError):
    """Another job is writing to the same directory.

    Cure: give each job a folder of its own, or end the other one; the lock goes with its
    process.
    """


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not finite. Raised alike on every rank.

    Cure: lower the learning rate, look at the batch, or train in bf16 instead of fp16;
    `FaultPolicy(non_finite="skip")` leaves such updates out.
    """
