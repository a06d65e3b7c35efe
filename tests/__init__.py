"""Tests ask no server for anything: what they load lies in folders."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
