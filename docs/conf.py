"""How Sphinx builds this folder: `make docs`. Nothing of the package is imported, so no torch."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "accelerate_megatron"

project = "accelerate-megatron"
copyright = "the accelerate-megatron contributors, Apache-2.0"  # Sphinx's name
release = re.search(r'__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text())[1]

extensions = ["myst_parser", "sphinx.ext.napoleon", "autoapi.extension"]
myst_heading_anchors = 3
highlight_language = "none"
html_theme = "furo"
html_title = f"{project} {release}"
exclude_patterns = ["_build"]

# Docstrings are read from the sources; docs/api.md names those that are shown.
autoapi_dirs = [str(PACKAGE)]
autoapi_generate_api_docs = False
autoapi_add_toctree_entry = False
default_role = "code"
autoapi_ignore = [f"*/{part}/*" for part in ("cli", "engine", "indexed", "planning", "weights")]
suppress_warnings = ["autoapi.python_import_resolution"]  # names of the parts left out
napoleon_use_ivar = True
