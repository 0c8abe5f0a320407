"""The rules of pages that neither Sphinx, nor ruff, nor codespell knows."""
