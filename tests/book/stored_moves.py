"""What the collectives of stored programs move."""

from many_devices.compiled import stored_payload, stored_program


def stored_moves(name, compiler, *fields):
    """A tuple of these fields for each collective of a program."""
    rows = stored_program(name)[compiler]["moves"]
    return [tuple(row[field] for field in fields) for row in rows]


def assert_each_step_of_the_scan_gathers(compiler, size):
    """Layers over data: six times six layers are gathered; features: six. Of one size of number."""
    layer = size * 2 * 64 * 512 // 4
    assert stored_payload("init-layers", compiler, "all-gather") == 36 * layer
    assert stored_payload("init-features", compiler, "all-gather") == 6 * layer
    dtype = {4: "float32", 2: "bfloat16"}[size]
    for name in ("init-layers", "init-features"):
        moves = stored_moves(name, compiler, "kind", "executions", "dtype")
        # Both matrices in each of six steps
        assert [move for move in moves if move[0] == "all-gather"] == [("all-gather", 12, dtype)]
