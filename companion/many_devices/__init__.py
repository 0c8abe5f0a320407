"""The companion of the book: its eight devices, its data and models, and its small helpers.

    import many_devices
    many_devices.setup()  # eight simulated devices, before JAX is used

    from many_devices.helpers import put
    from many_devices.stacked import Model, Strategy

A chapter shows a program where it introduces it. Later pages import it from here, by name:

| module | what it holds | introduced in |
|---|---|---|
| `helpers` | `put`, `traffic`, `type_of`, `attempt`, `silence_orbax` | chapters 1 and 7 |
| `checks` | `misplaced`, `assert_placed` | chapter 2, deeper pages 06b and 06c |
| `stack` | a block of two weights, and a stack of such blocks | chapter 3 |
| `data` | the handwritten digits | chapter 4 |
| `model` | the model, its strategies, batches and training step | chapter 4 |
| `stacked` | the same model with its blocks in a stack, and with options | deeper page 04a |
| `training` | the training of that model: steps, batches, a short training run | deeper page 04a |
| `memory` | what a training step keeps on each device | deeper page 04c |
| `checkpoints` | a training run that is saved while it trains, and resumes | chapter 5 |
| `logical` | the table of logical axes with checks, and a transformer that uses it | chapter 6 and 06a |
| `processes` | start a program as several processes | chapter 11 |
| `fsdp` | chapter 9's specs and gather, for the model of chapter 4 | chapter 9 |
| `plain_fsdp` | FSDP of two matrices in plain JAX | chapters 9 and 11 |
| `llama` | a Llama, its files, and what loads and writes them | Bring your own weights |
| `pipeline` | the model of chapter 12, and schedules as tables of numbers | chapter 12 |
| `experts` | a mixture of experts, and its program on a mesh | chapter 13 |
| `sequences` | attention over one block of keys, and the merging of two | chapter 14 |
| `serving` | parts of a Llama that is served, and the same model without a cache | chapter 15 |
| `llama_step` | a training step with FSDP, tensor parallelism and HSDP, by hand | deeper page 16c |
| `compiled` | what the compilers for TPU and GPU made of the book's programs | deeper page 09a |
| `draw` | bars, curves and digits as inline SVG | |
"""

from many_devices._setup import setup

__all__ = ["setup"]
__version__ = "0.1.0"
