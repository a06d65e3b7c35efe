"""What blocks of the documentation take for granted, as Python that runs before them.

A setup runs in the folder of the page: in the block's own process before a Python block, as a
script before commands.
"""

from __future__ import annotations

_PARTS = """
import accelerate
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from accelerate_megatron import *

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=1024, n_embd=32, n_layer=2, n_head=2,
                                   bos_token_id=0, eos_token_id=0))
rows = torch.randint(128, (16, 16), generator=torch.Generator().manual_seed(1))
samples = [{"input_ids": row, "labels": row} for row in rows]
loader = DataLoader(samples, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=4, warmup_num_steps=1)
"""

_PREPARED = (
    _PARTS
    + """
accelerator = Accelerator()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""
)

_TOKENIZER = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2"
)
"""

_LLAMA = (
    """
from transformers import LlamaConfig, LlamaForCausalLM

LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128)).save_pretrained("llama")
"""
    + _TOKENIZER
    + """
tokenizer.save_pretrained("llama")
"""
)

SETUPS: dict[str, str] = {
    "parts of a training": _PARTS,
    "a prepared model": _PREPARED,
    "a counted training": _PARTS
    + """
class Progress:
    step = 0
    def state_dict(self):
        return {"step": self.step}
    def load_state_dict(self, state):
        self.step = state["step"]

progress, total = Progress(), 3
""",
    "saved checkpoints": _PARTS
    + """
from accelerate.utils import ProjectConfiguration

accelerator = Accelerator(
    project_config=ProjectConfiguration("out", automatic_checkpoint_naming=True)
)
model = accelerator.prepare(model)
for _ in range(4):
    accelerator.save_state()
accelerator.end_training()
""",
    "indexed files": _PARTS
    + """
from tests.indexed.files import write_files

for prefix in ("wiki_text_document", "code_text_document"):
    write_files(prefix, [[i % 128 for i in range(1200)]] * 1100)
accelerator = Accelerator()
""",
    "a corpus": _TOKENIZER
    + """
import os
from tests.indexed.files import write_files

tokenizer.save_pretrained("gpt2")
os.makedirs("data")
with open("corpus.jsonl", "w") as file:
    file.write('{"text": "w3 w4 w5"}\\n' * 40)
for prefix in ("a_text_document", "b_text_document"):
    write_files(prefix, [[1, 2, 3], [4]])
""",
    "texts": _PARTS
    + _TOKENIZER
    + """
tokenizer.padding_side = "left"
texts = ["w3 w4", "w5"]
accelerator = Accelerator()
""",
    "a folder of a Llama": _LLAMA,
    "a Llama to prepare": "from transformers import AutoConfig, AutoModelForCausalLM\n"
    "import accelerate\nimport torch\nfrom accelerate_megatron import Accelerator\n"
    + _LLAMA
    + "\naccelerator = Accelerator()\n",
    "a folder of a Mistral": """
from transformers import MistralConfig, MistralForCausalLM

MistralForCausalLM(MistralConfig(vocab_size=99, hidden_size=32, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128)).save_pretrained("mistral-tiny")
""",
    "a file of a family": """
from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import decoder_rows as rows
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.llama import *
from accelerate_megatron.models.parameters import *
from accelerate_megatron.models.qwen2 import *
from accelerate_megatron.models.qwen2 import (
    decoder_fields, decoder_problems, refuse, required, window_problems, windows_by_layer,
)
from accelerate_megatron.models.shape import ModelShape
""",
    "a GPT-2 in a folder": _PARTS
    + """
model.save_pretrained("my-gpt2")
""",
}
