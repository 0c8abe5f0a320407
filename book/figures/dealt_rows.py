"""Figure: 64 rows on eight devices in four parts, dealt like cards or in blocks of consecutive rows."""

from kit import INK, figure, frame, rect, say, text, write

DEVICES, ROWS, PARTS = 8, 64, 4
EACH = ROWS // DEVICES
WIDE, HIGH = 20, 17


def panel(left, title, part_of):
    """Columns are devices, boxes are rows in order, a number is the part of a row."""
    parts = [text(left, 14, title, 13, bold=True)]
    holders = set()
    for device in range(DEVICES):
        x = left + WIDE * device
        parts.append(text(x + WIDE / 2, 34, str(device), 11, "middle", opacity=0.8))
        for number in range(EACH):
            part = part_of(device * EACH + number)
            y = 40 + HIGH * number
            if part == 0:
                holders.add(device)
                parts.append(rect(x + 1, y + 1, WIDE - 2, HIGH - 2, INK, 0.45))
            parts.append(frame(x + 1, y + 1, WIDE - 2, HIGH - 2, opacity=0.4))
            parts.append(text(x + WIDE / 2, y + 13, str(part), 11, "middle"))
    low = 40 + HIGH * EACH + 16
    many = len(holders)
    if many == DEVICES:
        words = say("part 0: on all {count} devices", count=many)
    else:
        words = say("part 0: on {count} devices", count=many)
    parts.append(text(left, low, words, 11))
    return parts, many


def draw():
    dealt, all_have = panel(0, say("Dealt"), lambda row: row % PARTS)
    blocks, some_have = panel(196, say("Consecutive rows"), lambda row: row // (ROWS // PARTS))
    says = (
        "Eight columns, the devices, with eight rows of the batch each; a number is the part that "
        f"a row belongs to. Dealt, each of {all_have} devices has two rows of part 0. With "
        f"consecutive rows, part 0 is on {some_have} devices, and the other "
        f"{DEVICES - some_have} have none."
    )
    return {"dealt_rows": figure(360, 40 + HIGH * EACH + 22, says, dealt + blocks)}


if __name__ == "__main__":
    write(draw())
