"""Indexed datasets: token ids in Megatron's .bin/.idx files, from text to checked arrays.

Needs numpy only, except where text is read. Megatron's own readers of these files are in `engine`.
"""
