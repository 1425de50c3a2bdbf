"""The process that decodes media: python -m tilerank.runtime.media.decode_process, with a socket as standard input.

Files of strangers are decoded here, so that one that takes too much memory or crashes the decoder ends only this.
"""

import resource
import socket

from .decode_messages import Connection, Decode, Done, Failed, Found, Frame, Gone, Take
from .errors import MediaError
from .pictures import read_picture
from .sound_file import read_sound
from .video import ShorterVideo, describe_video, read_frames

MEMORY = 4 << 30
"""Bytes of address space."""
_MAX_MESSAGE = 1 << 34


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    connection = Connection(socket.socket(fileno=0))
    try:
        while isinstance(job := connection.receive(_MAX_MESSAGE), Decode):
            connection.send(_answer(job, connection))
    except Gone:
        return


def _answer(job: Decode, connection: Connection) -> Done | Failed:
    """Send all frames; return the message that ends the answer."""
    try:
        if job.kind == "video":
            _send_video(job, connection)
        elif job.kind == "audio":
            samples = read_sound(job.files[0])
            connection.send(Frame(len(samples) // 4, 1, samples))
        else:
            _send_pictures(job, connection)
    except MediaError as failure:
        return Failed(str(failure))
    except MemoryError:
        return Failed(f"decoding takes more than {MEMORY >> 30} GiB of memory")
    return Done()


def _send_pictures(job: Decode, connection: Connection) -> None:
    needed = 0
    for data in job.files:
        height, width, rows = read_picture(data, job.pixels)
        needed += len(rows)
        if needed > job.frame_bytes:
            raise MediaError(f"expected frames of at most {job.frame_bytes} bytes together, found more")
        connection.send(Frame(height, width, rows))


def _send_video(job: Decode, connection: Connection) -> None:
    data = job.files[0]
    total, fps = describe_video(data, job.pixels)
    while True:
        connection.send(Found(total, fps))
        take = connection.receive(_MAX_MESSAGE)
        if not isinstance(take, Take):
            raise Gone
        if not take.indices:
            return
        try:
            for height, width, rows in read_frames(data, take.indices, job.pixels, job.frame_bytes):
                connection.send(Frame(height, width, rows))
            return
        except ShorterVideo as shorter:
            total = shorter.total


if __name__ == "__main__":
    main()
