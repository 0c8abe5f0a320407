"""Chapter 5: from saved to loaded, chunks and who reads them, saving in the background.

The chunks are those of `w_DF` of the tiny model on a 2×4 mesh; what device 0 of another mesh asks
for, and what it reads besides, is computed. Times of the background save are computed as well, from
the bytes of the large model with Adam and from two assumed rates.
"""

from fractions import Fraction

from kit import DATA, INK, MODEL, arrow, figure, frame, kept, line, rect, say, strong, text, write

ROWS, COLUMNS = 96, 384  # w_DF of one layer of the tiny model
CHUNK = (ROWS // 2, COLUMNS // 4)  # written by a 2×4 mesh
PARAMETERS = 32 * (2 * 4096 * 16384 + 2 * 4096 + 16384) + 4096 * (64 + 16)  # of the large model
COPIED, WRITTEN = 50e9, 5e9  # assumed: bytes a second from devices to host, and to disk
STEP, EVERY = 2, 8  # assumed: seconds of a step, steps between saves


def hatch(x, y, width, height, step=6):
    """Diagonal lines in a rectangle. No <pattern>: its id could occur twice on a page."""
    parts = []
    for start in range(step, int(width + height), step):
        a = (x + min(start, width), y + max(start - width, 0))
        b = (x + max(start - height, 0), y + min(start, height))
        parts.append(line([a, b], INK, 0.8, ' stroke-opacity="0.7"'))
    return parts


def target():
    top, side, cell = 62, 88, 22
    disk, placed = 136, 272
    parts = [text(0, 14, say("saved"), 13, bold=True), text(0, 30, say("by 8 devices"), 12)]
    parts += [
        text(disk, 14, say("on disk"), 13, bold=True),
        text(disk, 30, say("one array, {shape}", shape="8×8"), 12),
    ]
    parts += [
        text(placed, 14, say("loaded"), 13, bold=True),
        text(placed, 30, say("on 2 devices"), 12),
    ]
    parts += [rect(0, top - 10, side, 4, MODEL), text(side, top - 14, kept("model"), 11, "end")]
    for row in range(2):
        for column in range(4):
            x, y = column * cell, top + row * side / 2
            parts += [frame(x + 1, y + 1, cell - 2, side / 2 - 2)]
            parts += [text(x + cell / 2, y + side / 4 + 4, 4 * row + column, 12, "middle")]
            parts += [rect(disk + x + 1, y + 1, cell - 2, side / 2 - 2, INK, 0.25)]
    parts += [
        rect(side + 4, top, 4, side, DATA),
        text(side + 6, top + side + 14, kept("data"), 11, "end"),
    ]
    for row in range(2):
        y = top + row * side / 2
        parts += [frame(placed + 1, y + 1, side - 2, side / 2 - 2)]
        parts += [text(placed + side / 2, y + side / 4 + 4, row, 12, "middle")]
    parts += [
        rect(placed - 8, top, 4, side, MODEL),
        text(placed - 10, top + side + 14, kept("model"), 11),
    ]
    middle = top + side / 2
    parts += [arrow(side + 14, middle, disk - 6, middle)]
    parts += [arrow(disk + side + 6, middle, placed - 14, middle)]
    parts += [text(disk, top + side + 26, say("the target:"), 12)]
    parts += [text(disk, top + side + 42, strong("(8, 8) float32"), 12)]
    parts += [text(disk, top + side + 58, strong("P('model', None) on 1×2"), 12)]
    parts += [arrow(disk + side + 20, top + side + 14, disk + side + 20, middle + 10)]
    says = (
        "Left: an array of 8 by 8 in eight pieces on a 2 by 4 mesh. Middle: on disk, one array in "
        "eight chunks without device numbers. Right: the target specifies two halves of the rows, "
        "and two devices get four rows each. The values come from the checkpoint, the shardings "
        "from the target."
    )
    return figure(360, top + side + 66, says, parts)


def asked(data, model):
    """What device 0 of a data × model mesh asks for: (rows, columns), (chunks down, across)."""
    rows, columns = ROWS // data, COLUMNS // model
    return (rows, columns), (-(-rows // CHUNK[0]), -(-columns // CHUNK[1]))


def panel(left, top, data, model):
    wide, high = 160, 80
    (rows, columns), (down, across) = asked(data, model)
    width, height = wide * columns / COLUMNS, high * rows / ROWS
    read_width, read_height = across * wide / 4, down * high / 2
    keeps = Fraction(rows * columns, down * CHUNK[0] * across * CHUNK[1])
    mesh, read = strong(f"{data}×{model}"), down * across
    if keeps == 1:
        words = say("{mesh}: {count} chunks, keeps all", mesh=mesh, count=read)
    else:
        words = say("{mesh}: {count} chunks, keeps {share}", mesh=mesh, count=read, share=keeps)
    parts = [text(left, top - 8, words, 12)]
    assert width == read_width, "what is read besides is drawn below what is kept"
    parts += hatch(left, top + height, width, read_height - height)
    parts += [rect(left, top, width, height, INK, 0.45)]
    for row in range(2):
        for column in range(4):
            parts.append(frame(left + column * wide / 4, top + row * high / 2, wide / 4, high / 2))
    return parts


def chunks():
    meshes = [(4, 2), (8, 1), (2, 2), (1, 1)]
    parts = []
    for i, mesh in enumerate(meshes):
        parts += panel(1 + 196 * (i % 2), 24 + 122 * (i // 2), *mesh)
    says = (
        "Four panels, each an array of 96 by 384 in two by four chunks. Filled: what device 0 of "
        "a new mesh keeps. Hatched: what it reads besides. On 4 by 2 it reads two chunks and "
        "keeps half of them, on 8 by 1 four and keeps a quarter, on 2 by 2 two whole ones, on one "
        "device all eight. Finer meshes read more than they keep."
    )
    return figure(360, 232, says, parts)


def lanes(top, name, copy, write_, wait):
    """Two lanes from second 0: the devices, and the disk. `wait`: do the devices wait for it?"""
    scale, left, last = 6.6, 56, 46
    parts = [text(0, top - 8, strong(name), 12), text(0, top + 15, say("devices"), 12)]
    parts += [text(0, top + 43, say("disk"), 12)]
    parts += [line([(left, top + 24), (left + scale * last, top + 24)], INK, 0.5)]
    seconds, number, complete = 0.0, 1, None
    while seconds + STEP <= last:
        x = left + scale * seconds
        parts += [rect(x + 0.5, top, scale * STEP - 1, 20, INK, 0.3)]
        seconds, number = seconds + STEP, number + 1
        if number == EVERY + 1:  # only the first save is drawn
            x, pause = left + scale * seconds, copy + (write_ if wait else 0)
            parts += [rect(x, top, scale * copy, 20, INK)]
            parts += hatch(x + scale * copy, top, scale * (pause - copy), 20) if wait else []
            complete = seconds + copy + write_
            parts += [rect(x + scale * copy, top + 28, scale * write_, 20, INK, 0.6)]
            end = left + scale * complete
            parts += [line([(end, top + 26), (end, top + 52)], INK, 2)]
            parts += [text(end + 4, top + 43, say("complete"), 12)]
            seconds += pause
    return parts


def background():
    size = 12 * PARAMETERS  # float32: a weight and two moments
    copy, write_ = size / COPIED, size / WRITTEN
    parts = lanes(26, "save", copy, write_, True)
    parts += lanes(108, "save_async", copy, write_, False)
    y = 176
    parts += [
        rect(0, y, 14, 12, INK, 0.3),
        text(18, y + 11, say("step, {seconds} s", seconds=STEP), 11),
    ]
    words = say("copy to host, {seconds} s", seconds=f"{copy:.0f}")
    parts += [rect(84, y, 14, 12, INK), text(102, y + 11, words, 11)]
    parts += hatch(212, y, 14, 12) + [text(230, y + 11, say("waits"), 11)]
    words = say("write, {seconds} s", seconds=f"{write_:.0f}")
    parts += [rect(276, y, 14, 12, INK, 0.6), text(294, y + 11, words, 11)]
    says = (
        f"Two timelines of {EVERY} steps of {STEP} seconds, a save, and more steps. With save the "
        f"devices wait {copy + write_:.0f} seconds, until the checkpoint is complete. With "
        f"save_async they wait {copy:.0f} second for a copy to the host, and the next steps run "
        f"while the disk writes for {write_:.0f} seconds. In both, the checkpoint counts only "
        "once it is complete."
    )
    return figure(360, 194, says, parts)


def overwritten():
    left, right, parts = 116, 356, []

    def lane(y, name, bars):
        parts.append(text(0, y + 14, name, 12))
        for start, end, words, opacity in bars:
            x, width = left + start * (right - left), (end - start) * (right - left)
            parts.append(rect(x, y, width, 20, INK, opacity))
            parts.append(text(x + 6, y + 14, words, 12))

    old, new = say("old"), say("new")
    lane(4, kept("overwrite=True"), [(0, 0.36, old, 0.25), (0.72, 1, new, 0.25)])
    parts.append(frame(left + 0.36 * 240, 4, 0.36 * 240, 20, INK, 1, 1, True))
    parts.append(text(left + 0.54 * 240, 18, say("nothing"), 12, "middle"))
    lane(40, say("another name"), [(0, 0.71, old, 0.25), (0.72, 1, new, 0.25)])
    parts.append(line([(left, 70), (right, 70)], INK, 0.5))
    for share, words in ((0.36, say("save begins")), (0.72, say("complete"))):
        x = left + share * 240
        parts.append(line([(x, 66), (x, 74)], INK, 1))
        parts.append(text(x, 86, words, 11, "middle"))
    says = (
        "What is on disk over time. With overwrite=True the old checkpoint goes when the save "
        "begins, and until the new one is complete there is nothing. Under another name the old "
        "one stays until the new one is complete."
    )
    return figure(360, 92, says, parts)


def draw():
    return {
        "checkpoint_target": target(),
        "checkpoint_chunks": chunks(),
        "save_async": background(),
        "checkpoint_overwrite": overwritten(),
    }


if __name__ == "__main__":
    write(draw())
