# @title AxisRules: a table that refuses
class AxisRules:
    """A table whose fields are the names; called with names, it returns the spec."""
    def __call__(self, *names):
        table = vars(self) | {None: None}  # the rows, and None stays None
        for name in names:
            if name not in table:
                raise KeyError(f"no row for {name!r} in {names}")
        spec = P(*[table[name] for name in names])
        used = jax.tree.leaves(tuple(spec))  # mesh axes: no None, and tuples opened
        for axis in used:
            if used.count(axis) > 1:
                raise ValueError(f"{axis!r} would be used twice in {spec} for {names}")
        return spec
