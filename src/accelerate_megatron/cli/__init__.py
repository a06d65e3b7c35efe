"""The command line: `accelerate-megatron COMMAND`, one file per command."""
