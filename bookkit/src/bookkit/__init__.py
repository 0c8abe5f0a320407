"""The book's tools: run each as `python -m tools.NAME` from the repository root."""
