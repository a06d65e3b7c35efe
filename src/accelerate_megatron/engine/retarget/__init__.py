"""Running Megatron-Core where there is no CUDA: rewriting at import, and the import hook."""
