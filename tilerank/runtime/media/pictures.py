"""Decodes pictures with Pillow, in a process of launch/serving/media_decoder.py."""

import contextlib
import io
import struct
from typing import TYPE_CHECKING

import numpy as np

from ..protocol.errors import MediaError

if TYPE_CHECKING:
    from PIL.Image import Image

# Without the formats that run other programs or read other files, such as EPS.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO")
# What Pillow raises for damaged EXIF.
_BAD_TAGS = (SyntaxError, ValueError, TypeError, LookupError, OSError, EOFError, ArithmeticError, struct.error)


def read_picture(data: bytes, pixels: int) -> tuple[int, int, bytes]:
    """Return height, width and RGB rows of a picture of at most so many pixels. Raises MediaError or MemoryError."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as failure:
        raise MediaError(f"pictures need Pillow, from pip install 'tilerank[vision]': {failure}") from failure
    Image.MAX_IMAGE_PIXELS = None  # `pixels` takes its place
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        found = f"{len(data)} bytes that begin with {data[:8]!r}" if data else "an empty file"
        raise MediaError(f"expected a picture ({', '.join(FORMATS)}), found {found}") from None
    except MemoryError:
        raise
    except Exception as failure:
        raise MediaError(f"the picture is damaged: {failure}") from failure
    width, height = image.size
    if width < 1 or height < 1 or width * height > pixels:
        raise MediaError(f"expected a picture of 1 to {pixels} pixels, found {width} x {height}")
    try:
        rgb = _to_rgb(image)
    except MemoryError:
        raise
    except Exception as failure:
        raise MediaError(f"the picture of {width} x {height} is damaged: {failure}") from failure
    return rgb.height, rgb.width, rgb.tobytes()


def _to_rgb(image: "Image") -> "Image":
    """Convert like transformers 5.23: upright by the EXIF orientation (load_image), transparent pictures on white
    (convert_to_rgb). Grey of 16 bits keeps its high byte; Pillow would turn all but dark grey white."""
    from PIL import Image, ImageOps

    image.load()
    # Tags that cannot be read belong to a picture that can: it is shown as it is stored.
    with contextlib.suppress(*_BAD_TAGS):
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
