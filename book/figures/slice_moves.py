"""Figure of chapter 7: the slice `x_BD[2:4]`, from eight rows on two halves of the mesh.

Rows lie along `data`, so each half of the mesh, four devices, has four of them. The result has two
rows, also along `data`, so one belongs on each half: row 3 crosses.
"""

from kit import DATA, INK, arrow, figure, frame, kept, lines, rect, say, text, write

ROWS, HALVES = 8, 2
KEPT = (2, 3)  # of the slice
ROW_BYTES = 16 * 4  # 16 numbers of float32
WIDE, HIGH, GAP = 62, 20, 3
LEFT, RIGHT = 96, 236  # where the batch and the result stand


def row(x, y, number, taken):
    return [
        rect(x, y, WIDE, HIGH, DATA, 0.55 if taken else 0.16, 2),
        text(x + WIDE / 2, y + 14, say("row {number}", number=number), 11, "middle", taken),
    ]


def halves():
    per_half = ROWS // HALVES
    half_high = per_half * (HIGH + GAP) - GAP
    tops = [34, 34 + half_high + 24]
    parts = [
        text(LEFT + WIDE / 2, 16, kept("x_BD"), 12, "middle", True),
        text(RIGHT + WIDE / 2, 16, kept("x_BD[2:4]"), 12, "middle", True),
    ]
    places = {}
    for half, top in enumerate(tops):
        words = say("devices {first}\nto {last}", first=4 * half, last=4 * half + 3)
        parts += [
            *lines(2, top + half_high / 2 - 4, 14, words, 11),
            frame(LEFT - 7, top - 7, RIGHT + WIDE + 14 - LEFT, half_high + 14, INK, 1, 0.4),
        ]
        for index in range(per_half):
            number = per_half * half + index
            y = top + index * (HIGH + GAP)
            places[number] = y
            parts += row(LEFT, y, number, number in KEPT)
    each = len(KEPT) // HALVES
    for index, number in enumerate(KEPT):
        goes_to = index // each
        comes_from = number // per_half
        end = LEFT + WIDE + 4, RIGHT - 5
        y = places[number] if goes_to == comes_from else tops[goes_to] + HIGH + GAP
        parts += row(RIGHT, y, number, True)
        if goes_to == comes_from:
            parts.append(arrow(end[0], y + HIGH / 2, end[1], y + HIGH / 2))
            parts.append(text(sum(end) / 2, y + HIGH / 2 - 5, say("stays"), 11, "middle"))
        else:
            turn = LEFT + WIDE + 28
            start = places[number] + HIGH / 2
            parts.append(rect(end[0], start - 0.7, turn - end[0], 1.4))
            parts.append(rect(turn - 0.7, start, 1.4, y + HIGH / 2 - start))
            parts.append(arrow(turn, y + HIGH / 2, end[1], y + HIGH / 2))
            parts.append(
                text(turn + 8, (tops[0] + half_high + tops[1]) / 2 + 22, say("crosses"), 11)
            )
    says = (
        f"Left, eight rows of x_BD: rows 0 to 3 on devices 0 to 3, rows 4 to 7 on devices 4 to 7. "
        f"Right, the slice of rows {KEPT[0]} and {KEPT[1]}, one for each half of the devices: row "
        f"{KEPT[0]} stays on its half, and row {KEPT[1]}, {ROW_BYTES} bytes, crosses to the other."
    )
    return figure(320, tops[1] + half_high + 10, says, parts)


def draw():
    return {"slice_moves": halves()}


if __name__ == "__main__":
    write(draw())
