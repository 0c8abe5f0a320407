# @title The model: embed, a stack of blocks, logits (chapter 4)
class Model(nnx.Module):
    def __init__(self, config, strategy, rngs):
        init, fsdp = nnx.initializers.lecun_normal(), strategy.fsdp
        enter, leave = (config.I, config.D), (config.D, config.V)
        self.w_ID = nnx.Param(init(rngs.params(), enter), out_sharding=("model", fsdp))
        stack = nnx.vmap(lambda rngs: Block(config, strategy, rngs),
                         transform_metadata={nnx.PARTITION_NAME: None})
        self.blocks = stack(rngs.split(config.L))
        self.w_DV = nnx.Param(init(rngs.params(), leave), out_sharding=(fsdp, "model"))
        self.strategy = strategy

    def __call__(self, x_BI):
        use, remat = self.strategy.use, self.strategy.remat  # by default: no change
        w_ID, w_DV = use(self.w_ID), use(self.w_DV)
        x_BD = pinned(x_BI.astype(w_ID.dtype) @ w_ID, self.strategy)
        def layer(x_BD, block):
            return pinned(use(block)(x_BD), self.strategy), None
        x_BD, _ = jax.lax.scan(remat(layer), x_BD, self.blocks)
        return pinned(x_BD @ w_DV, self.strategy, features="model")

def loss_of(model, batch):
    """Mean over rows by weight; logits beyond the ten classes are masked."""
    x_BI, labels_B, weights_B = batch
    logits_BV = model(x_BI).astype("float32")
    class_V = jnp.arange(logits_BV.shape[-1])
    log_p_BV = jax.nn.log_softmax(jnp.where(class_V < 10, logits_BV, -jnp.inf))
    is_label_BV = labels_B[:, None] == class_V  # each device asks its own classes
    correct_B = jnp.where(is_label_BV, log_p_BV, 0).sum(-1)
    return -(correct_B * weights_B).sum() / weights_B.sum()
