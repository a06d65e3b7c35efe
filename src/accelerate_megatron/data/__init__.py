"""Batches: fetched once per replica of the model, joined, checked and sent to its other ranks.

`loader` says how one step goes. No Megatron here: process groups are handed in (`replica`).
"""
