"""The programs that some code compiles with jax.jit, for tests that ask what these communicate."""

import contextlib

import jax
import pytest


@contextlib.contextmanager
def compilations(target="jax.jit"):
    """A list that gets the compiled program of each call of what `target`, a name of jax.jit, made."""
    compiled, jit = [], jax.jit

    def noted(function, **options):
        def call(*given):
            compiled.append(jit(function, **options).lower(*given).compile())
            return jit(function, **options)(*given)

        return call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(target, noted)
        yield compiled
