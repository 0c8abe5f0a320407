"""Chapter 14's kinds of attention, on random inputs of its sizes."""

from functools import partial

import jax

import meshscope as ms

P = jax.P


def random_qkv(seed):
    """Random queries, keys and values of chapter 14's sizes, whole."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, (2, 64, heads, 8)) for key, heads in zip(keys, (8, 4, 4))]


def on_mesh(chapter, attend, held):
    """One of the three kinds of attention, on blocks of both axes."""
    block = P("data", "seq")
    attend = partial(attend, held=held)
    return jax.shard_map(attend, mesh=chapter.mesh, in_specs=block, out_specs=block)


def sent_along_seq(chapter, step):
    """Bytes that a device sends along `seq` in a run of a compiled step."""
    return ms.collectives(step, chapter.mesh).by("axes")[("seq",)].wire_bytes
