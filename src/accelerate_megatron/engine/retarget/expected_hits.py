"""How often each rule matches in the whole of `megatron.core`, per tested version.

A patch release that is not here is used all the same, with a note in the log. The tests
compare the installed version with this table, so that a change upstream is noticed. To add
a version: read what changed (`accelerate-megatron env --retarget`), then write its row.
"""

from __future__ import annotations

EXPECTED_HITS: dict[str, dict[str, int]] = {
    "0.16.1": {
        "cuda-import": 10,
        "triton-placeholder": 0,
        "gpu-package-import": 184,
        "torch-cuda": 450,
        "torch-compile": 1,
        "device-string": 93,
        "device-fstring": 5,
        "indexed-device": 12,
        "tensor-type-string": 9,
        "cuda-call": 21,
        "is-cuda": 24,
        "pin-memory-argument": 12,
        "pin-memory-call": 2,
        "record-stream": 6,
    },
    "0.17.1": {
        "cuda-import": 10,
        "triton-placeholder": 0,
        "gpu-package-import": 208,
        "torch-cuda": 487,
        "torch-compile": 2,
        "device-string": 100,
        "device-fstring": 5,
        "indexed-device": 12,
        "tensor-type-string": 9,
        "cuda-call": 22,
        "is-cuda": 27,
        "pin-memory-argument": 15,
        "pin-memory-call": 7,
        "record-stream": 7,
    },
    "0.18.2": {
        "cuda-import": 8,
        "triton-placeholder": 2,
        "gpu-package-import": 221,
        "torch-cuda": 488,
        "torch-compile": 2,
        "device-string": 102,
        "device-fstring": 5,
        "indexed-device": 13,
        "tensor-type-string": 9,
        "cuda-call": 21,
        "is-cuda": 35,
        "pin-memory-argument": 22,
        "pin-memory-call": 7,
        "record-stream": 7,
    },
    "0.19.2": {
        "cuda-import": 8,
        "triton-placeholder": 2,
        "gpu-package-import": 249,
        "torch-cuda": 603,
        "torch-compile": 2,
        "device-string": 109,
        "device-fstring": 5,
        "indexed-device": 13,
        "tensor-type-string": 9,
        "cuda-call": 21,
        "is-cuda": 68,
        "pin-memory-argument": 29,
        "pin-memory-call": 7,
        "record-stream": 8,
    },
}
