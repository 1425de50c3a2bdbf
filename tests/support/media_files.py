"""Pictures and videos for tests, made on the spot."""

import io
import tempfile
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

DEMO_VL = Path(__file__).parents[2] / "assets" / "demo-vl"


def noise(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    return Image.fromarray(noise(height, width, 3, seed=seed)).convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def video(frames: int, width: int = 64, height: int = 48, rate: int = 10, form: str = "mp4", **options: str) -> bytes:
    """A video whose frame i has the brightness 2 i. options: of the muxer."""
    # Some muxers write a second time, and so need a file.
    with tempfile.NamedTemporaryFile() as file:
        with av.open(file.name, "w", format=form, options=options) as container:
            stream = container.add_stream("libvpx" if form == "webm" else "mpeg4", rate=rate)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for i in range(frames):
                grey = np.full((height, width, 3), 2 * i, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
            container.mux(stream.encode())
        return Path(file.name).read_bytes()


def modes() -> dict[str, tuple[Image.Image, str]]:
    """Pictures of every kind of colour, and the format in which they are stored."""
    alpha = Image.fromarray(noise(9, 13, 4))
    palette = picture(13, 9).quantize(16)
    transparent = palette.copy()
    transparent.info["transparency"] = 3
    return {
        "rgb": (picture(13, 9), "PNG"),
        "rgba": (alpha, "PNG"),
        "grey": (picture(13, 9, "L"), "PNG"),
        "grey-alpha": (alpha.convert("LA"), "PNG"),
        "bits": (picture(13, 9, "1"), "PNG"),
        "palette": (palette, "PNG"),
        "transparent-palette": (transparent, "PNG"),
        "cmyk": (picture(13, 9, "CMYK"), "JPEG"),
        "ycbcr": (picture(13, 9), "JPEG"),
        "gif": (picture(13, 9, "P"), "GIF"),
        "webp": (alpha, "WEBP"),
        "bmp": (picture(13, 9), "BMP"),
        "tiff": (picture(13, 9, "LAB"), "TIFF"),
    }
