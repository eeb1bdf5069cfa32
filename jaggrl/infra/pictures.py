"""Sample pictures as files: single ones, grids with caption and score, before and after side by side."""

import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

TILE = 176  # pixels; smaller pictures are enlarged to this width, larger ones are reduced to twice as much
MARGIN = 8
TEXT = 12  # font size in pixels
LINE = 15
LOSSLESS = 256 * 256  # pixels; larger pictures are stored as JPEG


def to_images(pictures_N3HW: Tensor) -> list[Image.Image]:
    """RGB images of (N, 3, H, W) floats in [0, 1]; values outside are clamped, NaN is black."""
    bytes_NHW3 = (pictures_N3HW.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round().byte()
    return [Image.fromarray(picture.permute(1, 2, 0).cpu().numpy()) for picture in bytes_NHW3]


def save_pictures(folder: Path, pictures_N3HW: Tensor) -> list[Path]:
    """Write each of (N, 3, H, W) as ``000.png``, JPEG where it is large; returns the files in order."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, image in enumerate(to_images(pictures_N3HW)):
        small = image.width * image.height <= LOSSLESS
        file = folder / f"{number:03d}{'.png' if small else '.jpg'}"
        image.save(file) if small else image.save(file, quality=92)
        files.append(file)
    return files


def draw_grid(
    file: Path, pictures_N3HW: Tensor, captions: Sequence[str], scores: Sequence[str], columns: int = 4
) -> None:
    """Grid of pictures, under each its caption and its score line.

    Args:
        file: PNG or JPEG to write.
        pictures_N3HW: (N, 3, H, W) in [0, 1].
        captions: N prompts, wrapped to three lines.
        scores: N texts of one or more lines such as ``hpsv2 0.2512``.
        columns: pictures per row.
    """
    tiles = [_enlarged(image) for image in to_images(pictures_N3HW)]
    cells = [
        _cell([tile], caption, [score]) for tile, caption, score in zip(tiles, captions, scores, strict=True)
    ]
    _arranged(cells, columns).save(file)


def draw_before_after(
    file: Path,
    before_N3HW: Tensor,
    after_N3HW: Tensor,
    captions: Sequence[str],
    scores_before: Sequence[str],
    scores_after: Sequence[str],
    columns: int = 3,
) -> None:
    """Pairs of pictures of the same prompt and noise, left before and right after training."""
    pairs = zip(to_images(before_N3HW), to_images(after_N3HW), strict=True)
    cells = [
        _cell([_enlarged(old), _enlarged(new)], caption, [f"before\n{was}", f"after\n{now}"])
        for (old, new), caption, was, now in zip(pairs, captions, scores_before, scores_after, strict=True)
    ]
    _arranged(cells, columns).save(file)


def _enlarged(image: Image.Image) -> Image.Image:
    """A tile wide enough to be seen; whole pixels where it is enlarged, so that nothing is made prettier."""
    if image.width < TILE:
        factor = -(-TILE // image.width)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if image.width > 2 * TILE:
        size = (2 * TILE, round(image.height * 2 * TILE / image.width))
        return image.resize(size, Image.Resampling.LANCZOS)
    return image


def _cell(tiles: Sequence[Image.Image], caption: str, notes: Sequence[str]) -> Image.Image:
    """Pictures side by side; below them the caption over the whole width and a note under each."""
    width = sum(tile.width for tile in tiles) + 2 * (len(tiles) - 1)
    height = max(tile.height for tile in tiles)
    lines = _wrapped(caption, width, 3)
    told = [f"{note}\n".split("\n") for note in notes]
    cell = Image.new("RGB", (width, height + LINE * (len(lines) + max(map(len, told)) - 1) + 6), "white")
    draw = ImageDraw.Draw(cell)
    for number, line in enumerate(lines):
        draw.text((0, height + 3 + LINE * number), line, "black", font=_font())
    left = 0
    for tile, note in zip(tiles, told, strict=True):
        cell.paste(tile, (left, 0))
        for number, line in enumerate(note, start=len(lines)):
            draw.text((left, height + 3 + LINE * number), line, "#0055AA", font=_font())
        left += tile.width + 2
    return cell


def _wrapped(text: str, width: int, most: int) -> list[str]:
    """At most ``most`` lines that fit into ``width`` pixels; an ellipsis where the text goes on."""
    letters = max(1, int(width / (TEXT * 0.56)))
    return textwrap.wrap(" ".join(text.split()), letters, max_lines=most, placeholder=" ...") or [""]


def _arranged(cells: Sequence[Image.Image], columns: int) -> Image.Image:
    """Cells of one size in rows on white."""
    columns = min(columns, len(cells)) or 1
    width = max((cell.width for cell in cells), default=TILE) + MARGIN
    height = max((cell.height for cell in cells), default=TILE) + MARGIN
    rows = -(-len(cells) // columns)
    sheet = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), "white")
    for number, cell in enumerate(cells):
        sheet.paste(cell, (MARGIN + number % columns * width, MARGIN + number // columns * height))
    return sheet


@cache
def _font() -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib brings along: accents, Greek, Cyrillic, Arabic."""
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", TEXT)
