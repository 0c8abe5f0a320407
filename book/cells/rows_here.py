# @title rows_here: which rows of a batch a process must load
def rows_here(sharding, size):
    """The rows of a batch that this process's devices hold, in order."""
    every_row, mine = np.arange(size), set()
    slices = sharding.addressable_devices_indices_map((size,))  # device: its slices
    for part in slices.values():
        mine.update(every_row[part].tolist())
    return np.array(sorted(mine))
