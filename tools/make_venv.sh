#!/usr/bin/env bash
# Makes a virtual environment with torch, this package and its development tools.
#
#   tools/make_venv.sh FOLDER PYTHON TORCH [INDEX]
#
# TORCH is a requirement such as torch==2.13.0. INDEX names an index of torch wheels; without
# it pip looks where it always looks. What will be downloaded is said before it is.
set -euo pipefail

folder=$1 python=$2 torch=$3 index=${4:-}
export PIP_DISABLE_PIP_VERSION_CHECK=1

echo "$folder: $("$python" --version), $torch"
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip)
"${pip[@]}" install --quiet --upgrade pip

from_index=()
if [ -n "$index" ]; then
    from_index=(--index-url "$index")
fi

# Which build of torch it would be, without downloading it.
build=$("${pip[@]}" install --quiet --dry-run --ignore-installed --no-deps --report - \
    "${from_index[@]}" "$torch" |
    "$folder/bin/python" -c '
import json, sys
print(json.load(sys.stdin)["install"][0]["metadata"]["version"])')
if [[ $build == *+cpu ]] || [ "$(uname -s)" != Linux ]; then
    echo "torch $build, a CPU build: about 0.4 GB to download with everything else, 1.7 GB on disk"
else
    echo "torch $build, a CUDA build: about 3.2 GB to download with everything else, 6.2 GB on disk"
    echo "(TORCH_INDEX=https://download.pytorch.org/whl/cpu names an index of CPU builds: 0.4 GB)"
fi

"${pip[@]}" install --quiet "${from_index[@]}" "$torch"
"${pip[@]}" install --quiet --editable '.[dev]'
"$folder/bin/python" -c '
from importlib.metadata import version
names = "torch", "megatron-core", "accelerate", "transformers"
print("installed:", ", ".join(f"{name} {version(name)}" for name in names))'
