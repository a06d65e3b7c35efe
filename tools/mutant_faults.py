"""Faults that a test must notice: each is a small change of one source file. See `mutants.py`."""

from __future__ import annotations

from dataclasses import dataclass

PARITY = "tests/parity/test_parity.py::test_sgd_training_equals_plain_pytorch"
ADAMW = "tests/parity/test_parity.py::test_adamw_training_equals_plain_pytorch"
EXPERTS = "tests/parity/test_experts.py::test_training_with_experts_equals_plain_pytorch"
CONTEXT = "tests/parity/test_context_parallel.py"
T5_TOKENS = (
    "tests/generation/test_encoder_decoder.py::test_tokens_are_those_of_transformers_on_tp2_pp2"
)
VARIANTS = "tests/parity/test_variants.py::test_what_a_config_says_is_what_runs"


@dataclass(frozen=True)
class Fault:
    """A change of a source file, and the tests of which at least one must fail with it."""

    name: str
    file: str
    """Below src/accelerate_megatron."""
    before: str
    """Text that is in the file exactly once."""
    after: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "vocabulary ranks do not agree on the largest logit",
        "engine/cross_entropy.py",
        "    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=group)\n",
        "",
        (f"{VARIANTS}[vocabulary-300]",),
    ),
    Fault(
        "vocabulary ranks do not add up their sums",
        "engine/cross_entropy.py",
        "    dist.all_reduce(sums, group=group)\n",
        "",
        (f"{VARIANTS}[vocabulary-300]",),
    ),
    Fault(
        "padded rows of the vocabulary enter the softmax",
        "engine/cross_entropy.py",
        "num_real = min(max(vocab_size - first, 0), columns)",
        "num_real = columns",
        (f"{PARITY}[1-gpt2-tied]",),
    ),
    Fault(
        "gradients of norms are not added up under sequence parallelism",
        "engine/norm.py",
        "parameter.sequence_parallel = config.sequence_parallel",
        "parameter.sequence_parallel = False",
        (f"{PARITY}[tp2-dp2-sp-llama-untied]",),
    ),
    Fault(
        "queries and keys are swapped",
        "weights/segments.py",
        "_qkv_segments(shape, (q, 0), (k, 0), (v, 0))",
        "_qkv_segments(shape, (k, 0), (q, 0), (v, 0))",
        (f"{PARITY}[1-llama-untied]",),
    ),
    Fault(
        "keys and values of a stacked tensor are swapped",
        "weights/segments.py",
        "(hf, q_rows), (hf, q_rows + k_rows)",
        "(hf, q_rows + k_rows), (hf, q_rows)",
        (f"{PARITY}[1-gpt2-tied]",),
    ),
    Fault(
        "gate and up are swapped",
        "weights/segments.py",
        "return [RowSegment(gate, 0, rows // 2), RowSegment(up, 0, rows // 2)]",
        "return [RowSegment(up, 0, rows // 2), RowSegment(gate, 0, rows // 2)]",
        (f"{PARITY}[1-llama-untied]",),
    ),
    Fault(
        "the loss is divided by the tokens twice",
        "training/gpt.py",
        "return total, count.int(), {",
        "return total / count.clamp(min=1), count.int(), {",
        (f"{PARITY}[1-gpt2-tied]",),
    ),
    Fault(
        "labels are not shifted",
        "training/gpt.py",
        'torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)',
        'batch["labels"]',
        (f"{PARITY}[1-gpt2-tied]",),
    ),
    Fault(
        "the loss is not added up over the replicas",
        "training/session.py",
        "            dist.all_reduce(totals, group=self.ranks.dp_group)\n",
        "",
        (f"{PARITY}[dp2-gpt2-tied]",),
    ),
    Fault(
        "stages before the last do not hear of the loss",
        "training/session.py",
        "        dist.broadcast(totals, self.ranks.last_stage_rank, group=self.ranks.pp_group)\n",
        "",
        (f"{PARITY}[pp2-gpt2-tied]",),
    ),
    Fault(
        "filler micro-batches weigh in the mean of means",
        "training/session.py",
        "num_micro_batches / max(totals[1].item(), 1)",
        "1.0",
        ("tests/training/test_losses.py",),
    ),
    Fault(
        "a last batch that is short is skipped",
        "data/epoch.py",
        "        if not raw:\n            return FetchedStep(checksum=checksum)",
        "        if len(raw) < size:\n            return FetchedStep(checksum=checksum)",
        (
            "tests/data/test_loader.py::"
            "test_every_sample_is_used_once_and_all_replicas_take_equally_many_steps",
        ),
    ),
    Fault(
        "the last stage's gradient of a tied embedding is forgotten",
        "engine/translate.py",
        "finalize_model_grads_func=finalize_model_grads,",
        "finalize_model_grads_func=lambda chunks, *args, **kwargs: (\n"
        "            [\n"
        "                parameter.main_grad.zero_()\n"
        "                for chunk in chunks\n"
        "                for name, parameter in chunk.named_parameters()\n"
        '                if name.endswith("output_layer.weight")\n'
        "            ],\n"
        "            finalize_model_grads(chunks, *args, **kwargs),\n"
        "        ),",
        (f"{PARITY}[pp2-gpt2-tied]",),
    ),
    Fault(
        "messages of two stages with virtual stages pair up crosswise",
        "engine/translate.py",
        "overlap_p2p_comm=chunks is not None,\n        batch_p2p_comm=chunks is None,",
        "overlap_p2p_comm=False,\n        batch_p2p_comm=True,",
        (f"{PARITY}[pp2-vp2-gpt2-tied]",),
    ),
    Fault(
        "gradients of the last update are added again",
        "engine/schedule.py",
        "    optimizer.zero_grad()\n",
        "",
        (f"{PARITY}[1-gpt2-tied]",),
    ),
    Fault(
        "Adam never gets beyond its first step",
        "engine/fused_adam.py",
        'int(group.get("step", 0)) + 1',
        "1",
        (f"{ADAMW}[1-gpt2-tied]",),
    ),
    Fault(
        "weights that are gathered late are read too early",
        "engine/wrapping.py",
        "            chunk.start_param_sync(force_sync=True)\n",
        "            pass\n",
        (
            "tests/parity/test_sharded_state.py::"
            "test_a_split_or_offloaded_optimizer_equals_plain_pytorch[dp2-overlap-adamw]",
        ),
    ),
    Fault(
        "fully sharded gradients are means where sums are needed",
        "engine/fully_sharded.py",
        "            self.scale_gradients(dist.get_world_size(self.process_group))\n",
        "            pass\n",
        (
            "tests/parity/test_sharded_state.py::"
            "test_fully_sharded_equals_plain_pytorch[llama-dp2-sgd]",
        ),
    ),
    Fault(
        "gathered chunks of a sequence stay in the order of their ranks",
        "engine/context_parallel.py",
        "    return torch.cat([chunks[places[index]] for index in range(2 * size)])",
        "    return torch.cat(list(chunks))",
        (f"{CONTEXT}::test_training_equals_plain_pytorch[cp2-gpt2]",),
    ),
    Fault(
        "gradients of gathered keys are not added up over the ranks",
        "engine/context_parallel.py",
        "tensor_parallel_output_grad=grads_are_partial",
        "tensor_parallel_output_grad=False",
        (f"{CONTEXT}::test_training_equals_plain_pytorch[cp2-gpt2]",),
    ),
    Fault(
        "each context-parallel rank counts the tokens of the whole sequence",
        "training/context.py",
        "count if self._ranks.cp_rank == 0 else torch.zeros_like(count)",
        "count",
        (f"{CONTEXT}::test_training_equals_plain_pytorch[cp2-gpt2]",),
    ),
    Fault(
        "a mask is read at the wrong queries under context parallelism",
        "engine/attention.py",
        "mask[:, :, start:end, :seen]",
        "mask[:, :, : end - start, :seen]",
        (f"{CONTEXT}::test_padding_on_the_left_is_hidden[gpt2-all-gather]",),
    ),
    Fault(
        "a window reaches one token too far",
        "engine/attention.py",
        "hidden = keys <= queries - self.window",
        "hidden = keys < queries - self.window",
        (
            "tests/parity/test_families.py::"
            "test_every_family_equals_transformers_on_every_layout[mistral-window-5-tp2-pp2]",
        ),
    ),
    Fault(
        "tensor-parallel ranks drop the same scores",
        "engine/attention.py",
        "            with tensor_parallel.get_cuda_rng_tracker().fork():\n"
        "                context = self._over_ranks(query, key, value, attention_mask)",
        "            context = self._over_ranks(query, key, value, attention_mask)",
        (
            "tests/training/test_dropout.py::test_attention_drops_other_scores_on_other_ranks[heads]",
        ),
    ),
    Fault(
        "replicas of experts on tensor-parallel ranks are not reduced",
        "engine/experts.py",
        "parameter.allreduce = False",
        "parameter.allreduce = True",
        (f"{EXPERTS}[tp2-sp]",),
    ),
    Fault(
        "experts are balanced within a rank, not over the global batch",
        "engine/balancing.py",
        "        dist.all_reduce(sums)\n",
        "",
        (
            "tests/parity/test_experts.py::"
            "test_the_load_balancing_loss_is_hugging_faces_on_the_global_batch[tp2-sp-dp2-ep2]",
        ),
    ),
    Fault(
        "context-parallel ranks do not add up the shares of a sequence",
        "engine/balancing.py",
        "get_tensor_and_context_parallel_group())",
        "get_tensor_model_parallel_group())",
        (
            "tests/parity/test_experts.py::"
            "test_router_losses_do_not_depend_on_how_the_batch_is_cut[cp2-sequence-loss]",
        ),
    ),
    Fault(
        "grouped experts take the gate for the up projection",
        "engine/grouped_experts.py",
        "            gate, up = states.chunk(2, dim=-1)\n",
        "            up, gate = states.chunk(2, dim=-1)\n",
        (
            "tests/parity/test_expert_settings.py::"
            "test_training_equals_plain_pytorch_however_experts_are_run[grouped-etp2]",
        ),
    ),
    Fault(
        "a resumed epoch begins one step too early",
        "data/position.py",
        'self._epoch.skip(resumed["num_steps"], resumed["boundary"])',
        'self._epoch.skip(resumed["num_steps"] - 1, resumed["boundary"])',
        (
            "tests/checkpoint/test_loader_position.py::"
            "test_the_next_batch_is_the_one_that_would_have_come[shuffled-1-1]",
        ),
    ),
    Fault(
        "a product with a residual sum leaves its bias out",
        "engine/cpu_products.py",
        "        return result if self._bias is None else result.add_(self._bias)\n",
        "        return result\n",
        ("tests/engine/test_cpu_products.py::test_products_and_sums_are_exact",),
    ),
    Fault(
        "a decoder's relative positions are counted from the wrong end",
        "engine/kv_cache.py",
        "self.by_distance.narrow(3, self.capacity - self.last, self.last)",
        "self.by_distance.narrow(3, 0, self.last)",
        (T5_TOKENS,),
    ),
    Fault(
        "a decoder sees the padding of what its encoder read",
        "engine/two_stack_decoding.py",
        "            cache.source_bias = hiding(self._is_padding, self._dtype)\n",
        "            pass\n",
        (T5_TOKENS,),
    ),
    Fault(
        "ranks do not hear that a streamer has failed",
        "generation/pace.py",
        "int(not is_done), int(failed)]",
        "int(not is_done), 0]",
        (
            "tests/generation/test_generate.py::"
            "test_a_streamer_that_fails_on_one_rank_ends_the_call_on_all",
        ),
    ),
)
