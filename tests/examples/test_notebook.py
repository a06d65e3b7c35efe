"""The notebook: its cells run one after another, and the model learns."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "first_steps.ipynb"


def test_the_notebook_is_stored_without_results() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_its_cells_train_a_model_that_transformers_reads(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    script = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    small = script.replace(
        "STEPS, LENGTH, VOCABULARY = 100, 128", "STEPS, LENGTH, VOCABULARY = 40, 64"
    )
    assert small != script

    job = subprocess.run(
        [sys.executable, "-c", small],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )

    assert job.returncode == 0, job.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", job.stdout)]
    assert len(losses) == 2
    assert max(losses) < math.log(2048) - 0.6, "no better than guessing"
    assert "import" in job.stdout
    assert (tmp_path / "runs/notebook/model.safetensors").is_file()
