# @title Sizes and strategies (chapter 4)
import dataclasses
from collections.abc import Callable

@dataclasses.dataclass(frozen=True)
class Config:
    L: int  # layers
    D: int  # model width
    F: int  # hidden width
    I: int = 64  # pixels of an image
    V: int = 16  # ten classes, padded to a number that eight devices divide

def unchanged(x):
    return x

@dataclasses.dataclass(frozen=True)
class Strategy:
    data: int  # devices along `data`, which shards the batch
    model: int  # devices along `model`, which shards the weights
    fsdp: str | None = None  # "data": weights are sharded along it as well, FSDP
    pin: bool = True  # activations stay sharded as the strategy says
    use: Callable = unchanged  # what weights pass through before use
    remat: Callable = unchanged  # around a layer; jax.checkpoint computes it again

    def mesh(self):
        axis_types, count = (jax.sharding.AxisType.Auto,) * 2, self.data * self.model
        return jax.make_mesh((self.data, self.model), ("data", "model"),
                             axis_types=axis_types, devices=jax.devices()[:count])

tiny, large = Config(L=4, D=96, F=384), Config(L=32, D=4096, F=16384)
strategies = {"one device": Strategy(1, 1), "data parallel": Strategy(8, 1),
              "FSDP": Strategy(8, 1, fsdp="data"), "tensor parallel": Strategy(1, 8),
              "FSDP x tensor": Strategy(2, 4, fsdp="data")}
