"""Checkpoints of a whole training run: written atomically, read back safely, decided by one rank.

`saving` and `loading` are the two ways; docs/checkpoints.md describes the folder. No Megatron here:
the tensors come from `engine.checkpointing`.
"""
