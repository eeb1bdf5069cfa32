"""Plain aligned tables for logs and terminals."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> str:
    """Columns two spaces apart under a ruled header; numbers to the right, text to the left.

    >>> print(table(["reward", "gain"], [["hpsv2", "+0.01"], ["ocr", "-1"]]))
    reward   gain
    ------  -----
    hpsv2   +0.01
    ocr        -1
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    numeric = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return "  ".join(aligned).rstrip()

    ruled = [line(list(header)), "  ".join("-" * width for width in widths), *map(line, cells)]
    return "\n".join([title, *ruled] if title else ruled)


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("%") or "nan")
    except ValueError:
        return cell == "-"
    return True
