"""Bytes that training holds on each rank: measured, against their formulas and against `plan`.

    python benchmarks/memory.py [--json] [--output FILE] [--only PATTERNS ...]

Each case is one small model on real ranks over gloo, without dropout. Counted after one update:
parameters, gradient buffers and optimizer state. Counted during the next one: the most that
autograd holds at a time (saved-tensor hooks, each storage once, parameters left out), and what one
more layer adds to it. Exits with 1 when something is farther from its formula than the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.config.layout import Layout
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.planning.activations import Workload
from accelerate_megatron.planning.memory import rank_memory
from accelerate_megatron.planning.parameters import stage_parameters

ROWS, TOKENS, HIDDEN, HEADS, LAYERS = 2, 256, 256, 4, 4
SBH = ROWS * TOKENS * HIDDEN
GPT2 = {"n_embd": HIDDEN, "n_head": HEADS, "n_positions": TOKENS, "vocab_size": 512}
LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "max_position_embeddings": TOKENS,
    "vocab_size": 512,
}
DEEPSEEK = {
    **LLAMA,
    "num_key_value_heads": HEADS,
    "q_lora_rank": HIDDEN // 2,
    "kv_lora_rank": HIDDEN // 4,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": HIDDEN // 2,
}
T5 = {
    "d_model": HIDDEN,
    "d_kv": HIDDEN // HEADS,
    "d_ff": 2 * HIDDEN,
    "num_heads": HEADS,
    "vocab_size": 512,
}
BERT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_attention_heads": HEADS,
    "max_position_embeddings": TOKENS,
    "vocab_size": 512,
}
SIZES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mixtral": LLAMA,
    "deepseek_v3": DEEPSEEK,
    "bert": BERT,
    "t5": T5,
}
LAYER_NAMES = {"gpt2": ("n_layer",), "t5": ("num_layers", "num_decoder_layers")}
PLAN_LIMIT = 0.10


@dataclass(frozen=True)
class Case:
    """What is measured, and what it should be."""

    name: str
    family: str = "gpt2"
    ranks: int = 1
    plugin: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    precision: str = "bf16"
    layer_sbh: float | None = None
    """Saved bytes of a layer in units of s b h, within 3%; None: not asked."""
    optimizer: float | None = None
    """Optimizer bytes of a rank for each of its parameters, within 3%."""
    state_share: float | None = None
    """Parameters, gradients and optimizer as a share of those of one rank, within 10%."""

    def model(self, layers: int = LAYERS) -> TinyModel:
        names = LAYER_NAMES.get(self.family, ("num_hidden_layers",))
        changes = {**SIZES[self.family], **dict.fromkeys(names, layers)}
        return TinyModel(self.family, tied=self.family == "t5", changes=changes)

    def layout(self) -> Layout:
        names = {
            "tp_degree": "tp_size",
            "pp_degree": "pp_size",
            "context_parallel_size": "cp_size",
            "expert_model_parallel_size": "ep_size",
            "sequence_parallelism": "sequence_parallel",
            "num_layers_per_virtual_pipeline_stage": "layers_per_virtual_stage",
            "pipeline_model_parallel_split_rank": "split_rank",
        }
        sizes = {names[key]: value for key, value in self.plugin.items() if key in names}
        return Layout(world_size=self.ranks, **sizes)


TP2 = {"tp_degree": 2}
TP2_SP = {**TP2, "sequence_parallelism": True}
PP2 = {"pp_degree": 2}
SPLIT = {"pipeline_model_parallel_split_rank": 1}
VP2 = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}
DIST = {"use_distributed_optimizer": True}
FSDP = {"use_custom_fsdp": True}
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full"}

CASES = [
    # Korthikanti et al. 2022 (arXiv 2205.05198), table 2, less the 2 sbh of dropout masks and the
    # 5 a s / h of scores: 10 + 24 / t becomes 8 + 24 / t, and 34 / t becomes 32 / t.
    Case("GPT-2", layer_sbh=32),
    Case("GPT-2, TP2", ranks=2, plugin=TP2, layer_sbh=8 + 24 / 2),
    Case("GPT-2, TP2 SP", ranks=2, plugin=TP2_SP, layer_sbh=32 / 2),
    Case("GPT-2, selective recomputation", plugin=SELECTIVE, layer_sbh=32),
    Case("GPT-2, TP2 SP, selective", ranks=2, plugin={**TP2_SP, **SELECTIVE}, layer_sbh=32 / 2),
    Case("GPT-2, full recomputation", plugin=FULL, layer_sbh=2),
    Case("GPT-2, TP2 SP, full", ranks=2, plugin={**TP2_SP, **FULL}, layer_sbh=2 / 2),
    Case("GPT-2, CP2", ranks=2, plugin={"context_parallel_size": 2}),
    Case("GPT-2, fp32", precision="no", layer_sbh=64),
    Case("GPT-2, PP2, 4 micro-batches", ranks=2, plugin=PP2, micro_batches=4),
    Case("GPT-2, PP2 VP2, 4 micro-batches", ranks=2, plugin=VP2, micro_batches=4),
    Case("GPT-2, PP2, full", ranks=2, plugin={**PP2, **FULL}, micro_batches=4),
    Case("Llama", "llama"),
    Case("Llama, TP2 SP", "llama", 2, TP2_SP),
    Case("Llama, full recomputation", "llama", plugin=FULL, layer_sbh=2),
    Case("Mixtral", "mixtral"),
    Case("Mixtral, EP2", "mixtral", 2, {"expert_model_parallel_size": 2}),
    Case("DeepSeek-V3", "deepseek_v3"),
    Case("DeepSeek-V3, TP2 SP", "deepseek_v3", 2, TP2_SP),
    Case("BERT", "bert"),
    Case("T5", "t5"),
    Case("T5, TP2 SP", "t5", 2, TP2_SP),
    Case("T5, PP2, fp32", "t5", 2, {**PP2, **SPLIT}, micro_batches=2, precision="no"),
    Case("GPT-2, DP2", ranks=2, optimizer=12),
    Case("GPT-2, DP2, distributed optimizer", ranks=2, plugin=DIST, optimizer=12 / 2),
    Case("GPT-2, DP4, distributed optimizer", ranks=4, plugin=DIST, optimizer=12 / 4),
    Case("Llama, TP2 SP DP2, distributed", "llama", 4, {**TP2_SP, **DIST}, optimizer=12 / 2),
    Case("Llama, DP2, FSDP2", "llama", 2, FSDP, precision="no", state_share=1 / 2),
    Case("Llama, DP4, FSDP2", "llama", 4, FSDP, precision="no", state_share=1 / 4),
]


class SavedBytes:
    """The bytes that autograd holds while hooks are on, and the most there were at a time."""

    def __init__(self, parameters: set[int]) -> None:
        """`parameters` are the addresses of storages that are held anyway."""
        self._parameters = parameters
        self._holders: Counter[int] = Counter()
        self._now = 0
        self.most = 0

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Held(self, tensor), lambda held: held.tensor
        )

    def add(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address in self._parameters:
            return
        if not self._holders[address]:
            self._now += storage.nbytes()
            self.most = max(self.most, self._now)
        self._holders[address] += 1

    def remove(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address in self._parameters:
            return
        self._holders[address] -= 1
        if not self._holders[address]:
            self._now -= storage.nbytes()


class _Held:
    """A tensor that autograd keeps; it is gone when autograd lets go of it."""

    def __init__(self, saved: SavedBytes, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._saved = saved
        saved.add(tensor.untyped_storage())

    def __del__(self) -> None:
        self._saved.remove(self.tensor.untyped_storage())


def measure_rank(case: Case, layers: int) -> dict[str, int]:
    """Make two updates; return this rank's bytes, and its number of parameters."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=case.precision,
        megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=case.micro_batches, **case.plugin),
    )
    hf_model = case.model(layers).build()
    model, _ = accelerator.prepare(hf_model, torch.optim.AdamW(hf_model.parameters(), lr=1e-4))
    del hf_model
    ids = torch.randint(0, 512, (ROWS * case.micro_batches, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    model.train()
    model(**batch)
    parameters = list(model.parameters())
    saved = SavedBytes({held_part(p).untyped_storage().data_ptr() for p in parameters})
    with saved.hooks():
        model(**batch)
    return {
        "num_parameters": sum(p.numel() for p in parameters),
        "parameters": sum(num_bytes(p) for p in parameters),
        "gradients": gradient_bytes(model.session.chunks, parameters),
        "optimizer": optimizer_bytes(model.session.optimizer, parameters),
        "activations": saved.most,
    }


def gradient_bytes(chunks: list[Any], parameters: list[torch.Tensor]) -> int:
    """Return the bytes of Megatron's gradient buffers, or of the gradients themselves (FSDP2)."""
    if not hasattr(chunks[0], "expert_parallel_buffers"):
        return sum(num_bytes(p.grad) for p in parameters if p.grad is not None)
    buffers = [
        buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ]
    return sum(num_bytes(buffer.grad_data) for buffer in buffers)


def optimizer_bytes(optimizer: Any, parameters: list[torch.Tensor]) -> int:
    """Return the bytes of the moments, and of the fp32 copies where there are any."""
    of_model = {id(parameter) for parameter in parameters}
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter, state in part.optimizer.state.items():
            tensors = [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]
            if part.config.bf16 and id(parameter) not in of_model:
                tensors.append(parameter)
            total += sum(num_bytes(tensor) for tensor in tensors)
    return total


def num_bytes(tensor: Any) -> int:
    """Return the bytes of what this rank holds of a tensor."""
    return int(held_part(tensor).numel() * tensor.element_size())


def held_part(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor: under FSDP2 some of its rows."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def planned(case: Case, stage: int) -> dict[str, int]:
    """Return what `accelerate-megatron plan` says of a rank on pipeline stage `stage`."""
    config = case.model().config()
    family = family_of(config)
    shape, layout = family.shape(config), case.layout()
    work = Workload(
        precision=case.precision,
        micro_batch_size=ROWS,
        seq_length=TOKENS,
        num_micro_batches=case.micro_batches,
        recompute=case.plugin.get("recompute_granularity"),
        shard_optimizer=case.plugin.get("use_distributed_optimizer", False),
        on_cpu=True,
    )
    memory = rank_memory(shape, layout, stage, stage_parameters(family, shape, layout, stage), work)
    return {part: getattr(memory, part) for part in PARTS}


PARTS = ("parameters", "gradients", "optimizer", "activations")


def measure(case: Case) -> dict[str, Any]:
    """Run a case on its ranks; return the bytes of each rank and what they are compared with."""
    ranks = run_ranks(measure_rank, case, LAYERS, num_ranks=case.ranks)
    per_stage = case.ranks // case.layout().pp_size
    # No plan is made for FSDP2, and none without: it plans with the distributed optimizer.
    plans = (
        []
        if case.plugin.get("use_custom_fsdp")
        else [planned(case, rank // per_stage) for rank in range(case.ranks)]
    )
    checks = list(comparisons(case, ranks, plans))
    return {
        "benchmark": "memory",
        "case": case.name,
        "ranks": ranks,
        "planned": plans,
        "checks": checks,
        "agrees": all(check["agrees"] for check in checks),
    }


def comparisons(
    case: Case, ranks: list[dict[str, int]], plans: list[dict[str, int]]
) -> Iterator[dict[str, Any]]:
    """Yield each comparison: what, measured, expected, and whether they are close enough."""
    for rank, (held, plan) in enumerate(zip(ranks, plans, strict=False)):
        for part in PARTS:
            yield compared(f"plan: {part} of rank {rank}", held[part], plan[part], PLAN_LIMIT)
    if case.optimizer is not None:
        for rank, held in enumerate(ranks):
            each = held["optimizer"] / held["num_parameters"]
            yield compared(f"optimizer bytes/parameter, rank {rank}", each, case.optimizer, 0.03)
    if case.layer_sbh is not None:
        fewer = run_ranks(measure_rank, case, LAYERS // 2, num_ranks=case.ranks)
        for rank, (held, less) in enumerate(zip(ranks, fewer, strict=True)):
            layer = (held["activations"] - less["activations"]) / (LAYERS - LAYERS // 2) / SBH
            yield compared(f"layer activations / sbh, rank {rank}", layer, case.layer_sbh, 0.03)
    if case.state_share is not None:
        (one,) = run_ranks(measure_rank, replace(case, ranks=1), LAYERS, num_ranks=1)
        for rank, held in enumerate(ranks):
            for part in PARTS[:3]:
                share = held[part] / one[part]
                yield compared(f"share of {part}, rank {rank}", share, case.state_share, 0.10)


def compared(what: str, measured: float, expected: float, limit: float) -> dict[str, Any]:
    return {
        "what": what,
        "measured": measured,
        "expected": expected,
        "ratio": round(measured / expected, 4),
        "limit": limit,
        "agrees": abs(measured / expected - 1) <= limit,
    }


def as_lines(record: dict[str, Any]) -> str:
    lines = [record["case"]]
    for check in record["checks"]:
        verdict = "" if check["agrees"] else "  DISAGREES"
        lines.append(
            f"  {check['what']:40} {check['measured']:>14,.2f} {check['expected']:>14,.2f}"
            f"  x {check['ratio']:.3f}{verdict}"
        )
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", action="store_true", help="print a JSON line for each case")
    add("--output", type=Path, help="a file for the JSON lines, too")
    add("--only", nargs="+", default=["*"], help="patterns of names, such as 'Llama*'")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    names = ("torch", "megatron-core")
    versions = {"python": platform.python_version(), **{name: version(name) for name in names}}
    agrees = True
    with open(args.output or os.devnull, "w", encoding="utf-8") as output:
        print(json.dumps({"benchmark": "memory_machine", "versions": versions}), file=output)
        for case in CASES:
            if any(fnmatchcase(case.name, pattern) for pattern in args.only):
                record = measure(case)
                agrees = agrees and record["agrees"]
                line = json.dumps(record)
                print(line, file=output, flush=True)
                print(line if args.json else as_lines(record), flush=True)
    return int(not agrees)


if __name__ == "__main__":
    # Under a name by which the ranks can read what is sent to them.
    from benchmarks import memory

    sys.exit(memory.main())
