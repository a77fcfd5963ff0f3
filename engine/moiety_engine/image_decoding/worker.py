"""`python -m moiety_engine.image_decoding.worker FD`: template of image processes, started by an engine server.

Each image is decoded by a process of its own, forked from the template, which has loaded the decoders and never
receives an image itself. The process ends with the image, so nothing of one tenant's image is left for another's.
"""

from __future__ import annotations

import io
import signal
import socket
import sys
from functools import partial
from typing import NoReturn

from PIL import Image, ImageFile, ImageOps

from moiety_engine.image_decoding.frames import DecodeOrder, DecodeReport, ImageTemplateReady
from moiety_limited_processes.child_limits import limit_child, run_to_exit
from moiety_limited_processes.frames import receive_frame, send_frame
from moiety_limited_processes.template import serve_template

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
BAND_ROWS = 256  # of an image with transparency, converted at once
NICENESS = 5  # decoding yields to the model's steps


def run_child(link: socket.socket) -> NoReturn:
    """Execute one order, and end the process."""
    run_to_exit(partial(_run_order, link))


def _run_order(link: socket.socket) -> None:
    order = receive_frame(link, DecodeOrder)
    limit_child(niceness=NICENESS, memory_bytes=order.memory_bytes, cpu_s=order.cpu_s, wall_s=order.wall_s)
    send_frame(link, decode(order))


def decode(order: DecodeOrder) -> DecodeReport:
    """Return the first frame of the image, upright, in RGB on a white ground, in the ordered size.

    Modes are converted as transformers' image processors convert them. Raises MemoryError.
    """
    try:
        with Image.open(io.BytesIO(order.data), formats=FORMATS) as image:
            if image.size != order.size:
                return DecodeReport("the head of the image file and its content differ in size; send a valid file")
            image.load()
            upright = ImageOps.exif_transpose(image)
            turned = upright.size != image.size
        resized = (order.resized[1], order.resized[0]) if turned else order.resized
        pixels = _to_rgb(upright).resize(resized, Image.Resampling.BICUBIC)
    except MemoryError:
        raise
    except Exception as exc:  # top of what one file can cause: Pillow's decoders raise many kinds for damaged files
        kinds = "PNG, JPEG, WebP or GIF"
        return DecodeReport(f"the image cannot be decoded ({type(exc).__name__}); send a valid {kinds} file")
    return DecodeReport("", *resized, pixels.tobytes())


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return the image in RGB, with transparent parts on a white ground; a band of rows at a time, to save memory."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    width, height = image.size
    whole = Image.new("RGB", image.size)
    for top in range(0, height, BAND_ROWS):
        band = image.crop((0, top, width, min(height, top + BAND_ROWS))).convert("RGBA")
        white = Image.new("RGBA", band.size, (255, 255, 255, 255))
        whole.paste(Image.alpha_composite(white, band).convert("RGB"), (0, top))
    return whole


def main() -> int:
    (fd,) = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine server decides
    control = socket.socket(fileno=int(fd))
    Image.MAX_IMAGE_PIXELS = None  # the engine server has checked the size against its own limit
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.init()
    serve_template(control, ImageTemplateReady(), run_child)
    return 0


if __name__ == "__main__":
    sys.exit(main())
