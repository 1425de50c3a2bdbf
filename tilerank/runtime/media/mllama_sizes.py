"""Tiles of mllama (Llama-3.2-Vision): the arithmetic of transformers 5.23, which the tower and the processor share."""

import math


def tilings(most: int) -> list[tuple[int, int]]:
    """Return the rows and columns of every tiling of at most `most` tiles, in the order of the aspect ratio ids, which
    begin with 1."""
    sides = range(1, most + 1)
    return [(rows, columns) for rows in sides for columns in sides if rows * columns <= most]


def choose_tiling(height: int, width: int, tile: int, most: int) -> tuple[int, int]:
    """Return rows and columns of tiles for a picture: get_optimal_tiled_canvas of image_processing_mllama.py.

    That is the smallest magnification, or else the least reduction; among equals the tiling of the fewest tiles.
    """
    scales = {(rows, columns): min(rows * tile / height, columns * tile / width) for rows, columns in tilings(most)}
    larger = [scale for scale in scales.values() if scale >= 1]
    chosen = min(larger) if larger else max(scales.values())
    return min((tiling for tiling, scale in scales.items() if scale == chosen), key=math.prod)


def fit(height: int, width: int, rows: int, columns: int, tile: int) -> tuple[int, int]:
    """Return the height and width to which a picture is resized within rows x columns tiles, its aspect ratio about
    kept: get_image_size_fit_to_canvas of image_processing_mllama.py."""
    most_height, most_width = min(max(height, tile), rows * tile), min(max(width, tile), columns * tile)
    vertical, horizontal = most_height / height, most_width / width
    if horizontal < vertical:
        return min(math.floor(height * horizontal) or 1, most_height), most_width
    return most_height, min(math.floor(width * vertical) or 1, most_width)
