"""Generating text: what a user asks for, which token comes next, and the loop over the ranks."""
