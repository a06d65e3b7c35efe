"""The fields of `MegatronLMPlugin`: kind, value when nothing is said, meaning. No torch here.

One table serves the plugin's checks, its environment variables, the launcher's flags and
the documentation. The names, their order and the defaults in the signature are
Accelerate's; what a field means is described in docs/plugin.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from accelerate_megatron.errors import ConfigurationError

Kind = Literal["int", "float", "bool", "str", "ints", "object"]

ENVIRONMENT_PREFIX = "MEGATRON_LM_"
TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")
NONE_WORDS = ("none", "")
"""What a launcher writes for "not given"; only for fields that may be left out."""


@dataclass(frozen=True)
class PluginField:
    """One field of the plugin.

    Attributes:
        name: The field's name.
        kind: How a word for it is read; "object" cannot be given as a word.
        default: Its value when neither the caller nor the environment gives one. None:
            the model's config decides, or the field stays unset.
        help: One line, shown by the launcher.
        choices: The words that are allowed, if only some are.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """Name of the environment variable that gives the field."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    def parse(self, word: str, source: str) -> Any:
        """Return the value that `word` stands for; None for "none".

        Args:
            word: The text, as given.
            source: Where it stands, for the error: a flag or an environment variable.

        Raises:
            ConfigurationError: It is no value of this field's kind.
        """
        text = word.strip()
        if text.lower() in NONE_WORDS and self.kind != "str":
            return None
        if self.kind == "bool":
            return parse_bool(text, source)
        if self.choices and text not in self.choices:
            raise ConfigurationError(
                f"{source} is {word!r}; it must be one of {', '.join(self.choices)}."
            )
        readers: dict[str, Callable[[str], Any]] = {
            "int": int,
            "float": float,
            "str": str,
            "ints": _read_ints,
        }
        if self.kind not in readers:
            raise ConfigurationError(
                f"{source} is {word!r}; {self.name} is a Python object and can be given in the "
                "script only, as an argument of MegatronLMPlugin."
            )
        try:
            return readers[self.kind](text)
        except ValueError:
            wanted = {"int": "a whole number", "float": "a number", "ints": "numbers: 8,0,0"}
            raise ConfigurationError(
                f"{source} is {word!r}; it must be {wanted[self.kind]}."
            ) from None


def parse_bool(word: str, source: str) -> bool:
    """Return the boolean that `word` stands for, in any case.

    Raises:
        ConfigurationError: It is none of the words.
    """
    if word.lower() in TRUE_WORDS:
        return True
    if word.lower() in FALSE_WORDS:
        return False
    raise ConfigurationError(
        f"{source} is {word!r}; it must be one of {', '.join(TRUE_WORDS)} or one of "
        f"{', '.join(FALSE_WORDS)}."
    )


def _read_ints(text: str) -> list[int]:
    return [int(part) for part in text.strip("[]() ").split(",")]


_LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

FIELDS: tuple[PluginField, ...] = (
    PluginField("tp_degree", "int", 1, "tensor-parallel ranks"),
    PluginField("pp_degree", "int", 1, "pipeline-parallel ranks (1F1B)"),
    PluginField("use_custom_fsdp", "bool", False, "shard the training state over the replicas"),
    PluginField(
        "overlap_cpu_optimizer_d2h_h2d",
        "bool",
        False,
        "overlap the copies of an offloaded optimizer",
    ),
    PluginField("no_load_optim", "bool", False, "load_state leaves the optimizer fresh"),
    PluginField("eod_mask_loss", "bool", False, "predictions at end-of-document do not count"),
    PluginField("no_save_optim", "bool", False, "save_state writes weights only"),
    PluginField("optimizer_cpu_offload", "bool", False, "keep the optimizer in host memory"),
    PluginField(
        "use_precision_aware_optimizer",
        "bool",
        False,
        "optimizer state in chosen dtypes",
    ),
    PluginField(
        "decoder_last_pipeline_num_layers",
        "int",
        None,
        "layers on the last stage",
    ),
    PluginField(
        "recompute_granularity",
        "str",
        None,
        "recompute activations: full or selective",
        choices=("full", "selective"),
    ),
    PluginField(
        "recompute_method",
        "str",
        None,
        "what full recomputation covers",
        choices=("uniform", "block"),
    ),
    PluginField("recompute_num_layers", "int", None, "layers of a recomputed unit"),
    PluginField(
        "attention_backend",
        "str",
        None,
        "true: the fastest; sdpa: torch's; unfused (false): matrix products that keep the scores",
    ),
    PluginField("expert_model_parallel_size", "int", 1, "ranks that experts are over"),
    PluginField("context_parallel_size", "int", 1, "ranks that the sequence is over"),
    PluginField("attention_dropout", "float", None, "dropout of attention (model config's)"),
    PluginField("hidden_dropout", "float", None, "dropout of hidden states (model config's)"),
    PluginField("attention_softmax_in_fp32", "bool", True, "softmax of attention in fp32"),
    PluginField("expert_tensor_parallel_size", "int", 1, "tensor parallelism inside experts"),
    PluginField(
        "calculate_per_token_loss", "bool", True, "mean over tokens, not over micro-batches"
    ),
    PluginField(
        "use_rotary_position_embeddings",
        "bool",
        None,
        "true: rotary positions, also instead of learned ones (model config's)",
    ),
    PluginField("num_micro_batches", "int", 1, "micro-batches of one update"),
    PluginField("gradient_clipping", "float", 1.0, "L2 norm gradients are cut to; 0: never"),
    PluginField("sequence_parallelism", "bool", False, "split activations over the tp ranks"),
    PluginField(
        "recompute_activations",
        "bool",
        False,
        "selective recomputation",
    ),
    PluginField("use_distributed_optimizer", "bool", False, "split the optimizer over dp ranks"),
    PluginField(
        "pipeline_model_parallel_split_rank",
        "int",
        None,
        "first decoder stage of an encoder-decoder model",
    ),
    PluginField(
        "num_layers_per_virtual_pipeline_stage", "int", None, "layers of one interleaved chunk"
    ),
    PluginField(
        "is_train_batch_min", "bool", True, "smallest of the DataLoaders' batch sizes, or largest"
    ),
    PluginField("train_iters", "int", None, "updates of the whole training"),
    PluginField("train_samples", "int", None, "samples of the whole training"),
    PluginField(
        "weight_decay_incr_style",
        "str",
        "constant",
        "how weight decay changes",
        choices=("constant", "linear", "cosine"),
    ),
    PluginField("start_weight_decay", "float", None, "first weight decay"),
    PluginField("end_weight_decay", "float", None, "last weight decay"),
    PluginField(
        "lr_decay_style", "str", "linear", "how the learning rate falls", choices=_LR_STYLES
    ),
    PluginField("lr_decay_iters", "int", None, "updates it falls over (train_iters)"),
    PluginField("lr_decay_samples", "int", None, "samples it falls over (train_samples)"),
    PluginField("lr_warmup_iters", "int", None, "updates it rises over"),
    PluginField("lr_warmup_samples", "int", None, "samples it rises over"),
    PluginField("lr_warmup_fraction", "float", None, "part of the decay it rises over"),
    PluginField("min_lr", "float", 0.0, "rate it never falls below"),
    PluginField("consumed_samples", "ints", None, "samples already used, to skip"),
    PluginField("no_wd_decay_cond", "object", None, "(name, parameter) -> no decay"),
    PluginField("scale_lr_cond", "object", None, "(name, parameter) -> rate x lr_mult"),
    PluginField("lr_mult", "float", 1.0, "factor on the rate where scale_lr_cond says so"),
    PluginField("megatron_dataset_flag", "bool", False, "data from indexed datasets"),
    PluginField("seq_length", "int", None, "length batches are padded or cut to"),
    PluginField("encoder_seq_length", "int", None, "the same, of an encoder"),
    PluginField("decoder_seq_length", "int", None, "the same, of a decoder"),
    PluginField("tensorboard_dir", "str", None, "where event files go"),
    PluginField("set_all_logging_options", "bool", False, "log all there is"),
    PluginField("eval_iters", "int", 100, "evaluation steps of an indexed dataset"),
    PluginField("eval_interval", "int", 1000, "updates between its evaluations"),
    PluginField("return_logits", "bool", False, "outputs.logits on the last stage"),
    PluginField("custom_train_step_class", "object", None, "a train step of your own"),
    PluginField("custom_train_step_kwargs", "object", None, "its keyword arguments"),
    PluginField("custom_model_provider_function", "object", None, "builds a stage"),
    PluginField("custom_prepare_model_function", "object", None, "wraps the chunks"),
    PluginField(
        "custom_megatron_datasets_provider_function",
        "object",
        None,
        "makes three datasets",
    ),
    PluginField("custom_get_batch_function", "object", None, "(data iterator) -> a batch"),
    PluginField("custom_loss_function", "object", None, "(loss mask, output) -> loss and report"),
    PluginField("other_megatron_args", "object", None, "Megatron's arguments by name"),
)

FIELD: dict[str, PluginField] = {field.name: field for field in FIELDS}
"""`FIELDS` by name."""
