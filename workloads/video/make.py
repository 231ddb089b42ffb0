"""Makes the data of `video`: H.264 clips of one thing moving over a photo-like ground, the motion being the class.

python -m workloads.video.make --size small --out data/video
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import av
import numpy as np

from workloads.making import Recipe, main
from workloads.pictures import Picture, developed, scene, spot, static

# Each motion with the usual colour of the thing that makes it (loosely), as real actions go with their surroundings.
MOTIONS = {
    "left": (200, 60, 50),
    "right": (60, 170, 70),
    "up": (60, 90, 200),
    "down": (210, 180, 60),
    "spin": (170, 70, 180),
    "swell": (60, 190, 190),
}
FRAMES_A_SECOND = 25
X264 = {"preset": "veryfast", "crf": "23", "x264-params": "cpu-independent=1"}  # the last: the same bytes every time
GRAIN_ROOM = 32


def recipe(items: int, val: int, width: int, height: int, frames: int, bytes_each: int) -> Recipe:
    facts = {"val": val, "width": width, "height": height, "frames": frames, "classes": list(MOTIONS)}
    return Recipe(items=items, bytes_each=bytes_each, facts=facts)


RECIPES = {
    "tiny": recipe(items=24, val=6, width=64, height=48, frames=18, bytes_each=10_000),
    "small": recipe(items=240, val=48, width=96, height=72, frames=36, bytes_each=30_000),
    "full": recipe(items=1_296, val=48, width=208, height=168, frames=136, bytes_each=125_000),
}


def paths(recipe: Recipe, index: int) -> Sequence[str]:
    return [f"videos/{index:05}_{motion_of(index)}.mp4"]


def motion_of(index: int) -> str:
    return list(MOTIONS)[index % len(MOTIONS)]


def make(recipe: Recipe, rng: np.random.Generator, index: int) -> Sequence[bytes]:
    facts = recipe.facts
    return [encoded(film(rng, motion_of(index), facts["frames"], facts["height"], facts["width"]))]


def film(rng: np.random.Generator, motion: str, frames: int, height: int, width: int) -> Iterator[Picture]:
    """The frames of one clip: a camera drifting over a scene, and a striped thing going about its motion."""
    room = max(8, height // 6)  # how far the camera can drift
    ground = developed(scene(rng, height + room, width + room), rng).astype(np.int16)
    grain = (8 * static(rng, height + GRAIN_ROOM, width + GRAIN_ROOM)).astype(np.int16)[:, :, None]
    drift = np.linspace(rng.integers(0, room, 2), rng.integers(0, room, 2), frames).astype(int)
    row, col = rng.uniform(0.3, 0.7) * height, rng.uniform(0.3, 0.7) * width
    radius = rng.uniform(0.14, 0.22) * height
    pace = rng.uniform(0.008, 0.02) * height  # pixels a frame
    turn, angle = rng.uniform(0.06, 0.15), rng.uniform(0, np.pi)
    colour = (MOTIONS[motion] + rng.uniform(-50, 50, 3)).astype(np.float32)
    for time, (down, right) in enumerate(drift):
        y, x = rng.integers(0, GRAIN_ROOM, 2)  # fresh grain on each frame, or it would compress to nothing
        noisy = ground[down : down + height, right : right + width] + grain[y : y + height, x : x + width]
        picture = np.clip(noisy, 0, 255).astype(np.uint8)
        moved = pace * time * {"left": -1, "up": -1, "right": 1, "down": 1}.get(motion, 0)
        # A thing that leaves the picture on one side comes back in on the other.
        if motion in ("left", "right"):
            centre = row, (col + moved + radius) % (width + 2 * radius) - radius
        else:
            centre = (row + moved + radius) % (height + 2 * radius) - radius, col
        size = radius * (1 + 0.5 * np.sin(turn * time)) if motion == "swell" else radius
        place = spot(*centre, (size, size), angle + (turn * time if motion == "spin" else 0), height, width)
        inside = place.u**2 + place.v**2 < 1
        shade = 40 * np.cos(9 * place.u[inside])
        picture[place.rows, place.cols][inside] = np.clip(colour + shade[:, None], 0, 255)
        yield picture


def encoded(pictures: Iterator[Picture]) -> bytes:
    """Pictures as an H.264 file; one encoder thread, since the maker already uses a process for each core."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = None
        for picture in pictures:
            if stream is None:
                stream = container.add_stream("libx264", rate=FRAMES_A_SECOND, options=X264)
                stream.codec_context.thread_count = 1
                stream.height, stream.width, stream.pix_fmt = *picture.shape[:2], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        assert stream is not None
        container.mux(stream.encode())
    return file.getvalue()


if __name__ == "__main__":
    main("video", RECIPES, paths, make)
