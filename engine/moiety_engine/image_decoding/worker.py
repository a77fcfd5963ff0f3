"""`python -m moiety_engine.image_decoding.worker FD`: template of image processes, started by an engine server.

Each image is decoded by a process of its own, forked from the template, which has loaded the decoders and never
receives an image itself. The process ends with the image, so nothing of one tenant's image is left for another's.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import socket
import sys
from typing import NoReturn

from PIL import Image, ImageFile, ImageOps

from moiety_engine.image_decoding.frames import DecodeOrder, DecodeReport, ImageTemplateReady
from moiety_engine.limited_processes.child_limits import end_with_parent, limit_memory, limit_time
from moiety_engine.limited_processes.frames import EXIT_CRASHED, EXIT_OUT_OF_MEMORY, receive_frame, send_frame
from moiety_engine.limited_processes.template import Template

FORMATS = ("PNG", "JPEG", "WEBP")
NICENESS = 5  # decoding yields to the model's steps


def run_child(link: socket.socket) -> NoReturn:
    """Execute one order, and end the process."""
    code = EXIT_CRASHED
    try:
        end_with_parent()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 2)  # native decoders may print parts of the file
        order = receive_frame(link, DecodeOrder)
        os.nice(NICENESS)
        limit_memory(order.memory_bytes)
        limit_time(order.cpu_s, order.wall_s)
        send_frame(link, decode(order))
        code = 0
    except EOFError:
        code = 0  # the engine server is gone
    except MemoryError:
        code = EXIT_OUT_OF_MEMORY
    except BaseException:
        code = EXIT_CRASHED
    finally:
        os._exit(code)


def decode(order: DecodeOrder) -> DecodeReport:
    """Return the first frame of the image, upright, in RGB without its transparency, in the ordered size."""
    try:
        with Image.open(io.BytesIO(order.data), formats=FORMATS) as image:
            if image.size != order.size:
                return DecodeReport("the head of the image file and its content differ in size; send a valid file")
            image.load()
            upright = ImageOps.exif_transpose(image)
            turned = upright.size != image.size
            resized = (order.resized[1], order.resized[0]) if turned else order.resized
            pixels = upright.convert("RGB").resize(resized, Image.Resampling.BICUBIC)
    except (OSError, SyntaxError, ValueError) as exc:  # what Pillow raises of damaged files
        return DecodeReport(f"the image cannot be decoded ({type(exc).__name__}); send a valid PNG, JPEG or WebP file")
    return DecodeReport("", *resized, pixels.tobytes())


def main() -> int:
    (fd,) = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine server decides
    control = socket.socket(fileno=int(fd))
    Image.MAX_IMAGE_PIXELS = None  # the engine server has checked the size against its own limit
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.init()
    gc.collect()
    gc.freeze()
    gc.disable()
    send_frame(control, ImageTemplateReady())
    Template(control, run_child).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
