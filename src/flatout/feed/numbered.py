"""Workers that have a number: as many as declared, and batches go round them in PyTorch's order.

With a `worker_init_fn`, with `rng="stock"` and for an iterable dataset each also has a stream (of random numbers, or of
data) that a successor has to take up where it was left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flatout.feed.messages import Done, Ended, Failed, NewEpoch, Recipe, Skipped, StartWorker
from flatout.feed.table import Batch
from flatout.feed.worker_pool import WorkerHandle, WorkerPool


@dataclass(slots=True, eq=False)
class Post:
    """One number, who holds it, and what a successor is told."""

    number: int
    hand: WorkerHandle | None = None
    active: bool = True
    birth: StartWorker | None = None
    random_state: Any = None  # the latest known


class Posts:
    """All numbers of one loader; none where workers are interchangeable."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._posts = [Post(number) for number in range(recipe.declared if recipe.numbered else 0)]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._posts)

    def __iter__(self) -> Iterator[Post]:
        return iter(self._posts)

    def __getitem__(self, number: int) -> Post:
        return self._posts[number]

    def begin(self, crew: WorkerPool, births: list[StartWorker] | None, turn: int) -> None:
        """Start a pass: with new workers, born as told, or (persistent ones) with those that are there."""
        self._turn = turn
        for post in self._posts:
            post.active = True
            if births is not None:
                if post.hand is not None:
                    crew.dismiss(post.hand)
                    post.hand = None
                post.birth = births[post.number]
            elif self._recipe.iterable and post.hand is not None and post.birth is not None:
                post.birth = StartWorker(post.number, post.birth.base_seed, post.random_state)
                crew.tell(post.hand, NewEpoch())
        for post in self._posts:
            self.man(crew, post)

    def man(self, crew: WorkerPool, post: Post) -> None:
        """See that somebody holds a number."""
        if post.hand is None:
            post.hand = crew.hire(post.birth or StartWorker(post.number, 0))

    def next(self, has_room: Callable[[Post, int], bool]) -> Post | None:
        """Whose turn it is: round and round those that have data left, and room among so many of them."""
        active = sum(post.active for post in self._posts)
        for _ in self._posts:
            post = self._posts[self._turn % len(self._posts)]
            self._turn += 1
            if post.active and has_room(post, active):
                return post
        return None

    def track(self, hand: WorkerHandle, batch: Batch, message: Done | Failed | Skipped | Ended) -> None:
        """Keep what a successor of this worker has to be told."""
        post = self._posts[hand.post]
        if post.hand is not hand or post.birth is None or isinstance(message, (Failed, Skipped)):
            return
        if message.random_state is not None:
            post.random_state = message.random_state
        if isinstance(message, Done) and not batch.dropped:
            # Counted even while the dataset keeps its state: it may stop to, and is then repeated from the beginning.
            replay = post.birth.replay + self._recipe.iterable
            post.birth = post.birth._replace(replay=replay, checksum=message.checksum, data_state=message.data_state)
            if not self._recipe.iterable or message.data_state is not None:
                post.birth = post.birth._replace(random_state=post.random_state or post.birth.random_state)
            batch.after = post.birth
