"""Accelerate's Megatron-LM API on an unmodified megatron-core, with or without CUDA.

The public names below are imported when they are first used: `import accelerate_megatron`
itself imports neither torch nor megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate_megatron.accelerator import Accelerator as Accelerator
    from accelerate_megatron.faults.policy import FaultPolicy as FaultPolicy
    from accelerate_megatron.models.registering import (
        add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
    )
    from accelerate_megatron.plugin import MegatronLMPlugin as MegatronLMPlugin
    from accelerate_megatron.training.bert import BertTrainStep as BertTrainStep
    from accelerate_megatron.training.gather import (
        avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    )
    from accelerate_megatron.training.gather import (
        gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    )
    from accelerate_megatron.training.gpt import GPTTrainStep as GPTTrainStep
    from accelerate_megatron.training.indexed import (
        MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    )
    from accelerate_megatron.training.scheduler import (
        MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    )
    from accelerate_megatron.training.t5 import T5TrainStep as T5TrainStep
    from accelerate_megatron.training.train_step import AbstractTrainStep as AbstractTrainStep

__version__ = "0.1.0"

# Each public name and the module that holds it, relative to this package.
_HOME_OF = {
    "AbstractTrainStep": "training.train_step",
    "Accelerator": "accelerator",
    "BertTrainStep": "training.bert",
    "FaultPolicy": "faults.policy",
    "GPTTrainStep": "training.gpt",
    "MegatronLMDummyDataLoader": "training.indexed",
    "MegatronLMDummyScheduler": "training.scheduler",
    "MegatronLMPlugin": "plugin",
    "T5TrainStep": "training.t5",
    "add_model_config_to_megatron_parser": "models.registering",
    "avg_losses_across_data_parallel_group": "training.gather",
    "gather_across_data_parallel_groups": "training.gather",
}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562).

    Raises:
        AttributeError: The package has no public name of that kind.
    """
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; its public names are "
            f"{', '.join(sorted(__all__))}."
        )
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion in an interactive session."""
    return sorted({*globals(), *__all__})
