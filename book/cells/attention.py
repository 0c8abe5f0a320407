# @title Attention, with names
class Attention(nnx.Module):
    def __init__(self, config, rules, rngs):
        D, H, C = config.D, config.H, config.C
        into = rules("embed", "heads", "head_size")
        out = rules("heads", "head_size", "embed")
        self.w_q_DHC = weight(rngs, (D, H, C), into)  # queries
        self.w_k_DHC = weight(rngs, (D, H, C), into)  # keys
        self.w_v_DHC = weight(rngs, (D, H, C), into)  # values
        self.w_o_HCD = weight(rngs, (H, C, D), out, inputs=2)

    def __call__(self, x_BSD):
        return attend(x_BSD, self.w_q_DHC, self.w_k_DHC, self.w_v_DHC, self.w_o_HCD)
