"""Cells are executed, once for every language, and executions are compared."""
