"""Workers whose number has a meaning: `worker_init_fn`, `rng="stock"`, iterable datasets.

Their count is the declared one, batches go round them in stock's order, and each has a stream (of random numbers, or
of data) that a successor has to take up where it was left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flatout.feed.crew import Crew, Hand
from flatout.feed.messages import Birth, Done, Ended, Failed, NewEpoch, Recipe, Skipped
from flatout.feed.table import Batch


@dataclass(slots=True, eq=False)
class Post:
    """One number, who holds it, and what a successor is told."""

    number: int
    hand: Hand | None = None
    active: bool = True
    birth: Birth | None = None
    random_state: Any = None  # the latest known


class Posts:
    """All numbers of one loader; none where workers are interchangeable."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._posts = [Post(number) for number in range(recipe.declared if recipe.streams else 0)]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._posts)

    def __iter__(self) -> Iterator[Post]:
        return iter(self._posts)

    def __getitem__(self, number: int) -> Post:
        return self._posts[number]

    def begin(self, crew: Crew, births: list[Birth] | None, turn: int) -> None:
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
                post.birth = Birth(post.number, post.birth.base_seed, post.random_state)
                crew.tell(post.hand, NewEpoch())
        for post in self._posts:
            self.man(crew, post)

    def man(self, crew: Crew, post: Post) -> None:
        """See that somebody holds a number."""
        if post.hand is None:
            assert post.birth is not None
            post.hand = crew.hire(post.birth)

    def next(self) -> Post | None:
        """Whose turn it is: round and round those that have data left."""
        for _ in self._posts:
            post = self._posts[self._turn % len(self._posts)]
            self._turn += 1
            if post.active:
                return post
        return None

    def track(self, hand: Hand, batch: Batch, message: Done | Failed | Skipped | Ended) -> None:
        """Keep what a successor of this worker has to be told."""
        post = self._posts[hand.post]
        if post.hand is not hand or post.birth is None or isinstance(message, (Failed, Skipped)):
            return
        if message.random_state is not None:
            post.random_state = message.random_state
        if isinstance(message, Done) and not batch.dropped:
            if self._recipe.iterable and message.data_state is None:  # replayed from the beginning of the pass
                post.birth = post.birth._replace(replay=post.birth.replay + 1, checksum=message.checksum)
            else:
                state = post.random_state or post.birth.random_state
                post.birth = post.birth._replace(random_state=state, data_state=message.data_state)
            batch.after = post.birth
