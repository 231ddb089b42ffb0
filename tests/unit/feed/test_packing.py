"""What a batch is after it travelled: itself, over shared memory."""

from __future__ import annotations

import collections
import gc
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from feed_samples import SHAPES, same
from torch.utils.data import default_collate
from torch.utils.data._utils import collate

from flatout.feed import channel, packing
from flatout.feed import slots as ring
from flatout.feed.slots import Slot, Slots

Odd = collections.namedtuple("Odd", ["tensor", "text"])


def arena(size: int) -> packing.Arena:
    return packing.Arena(memoryview(bytearray(size)))


def sent(batch: Any, room: packing.Arena) -> Any:
    """A batch after packing and unpacking."""
    skeleton, spans, _, file = packing.pack(batch, room)
    memory = packing.map_file(file) if file is not None else room.memory
    return packing.unpack(skeleton, spans, memory or memoryview(b""))


STRANGE = {
    "channels last": torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.arange(6).view(2, 3).t(),
    "expanded": torch.arange(3).expand(4, 3),
    "strided view": torch.arange(20)[::3],
    "scalar": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
    "complex": torch.ones(2, dtype=torch.complex64),
    "bool": torch.tensor([True, False]),
    "float8": torch.zeros(3).to(torch.float8_e4m3fn),
    "sparse": torch.eye(3).to_sparse(),
    "needs grad": torch.ones(2, requires_grad=True),
    "array": np.arange(6).reshape(2, 3),
    "array of strings": np.array(["a", "bb"]),
    "not contiguous array": np.arange(12).reshape(3, 4)[:, ::2],
    "named tuple": Odd(torch.ones(2), "text"),
    "ordinary objects": {"path": "a/b", "none": None, "set": {1, 2}, "big": list(range(5000))},
}


@pytest.mark.parametrize("size", [1 << 16, 8, 0], ids=["fits", "does not fit", "no slot"])
@pytest.mark.parametrize("name", STRANGE)
def test_anything_arrives_as_it_was(name: str, size: int) -> None:
    thing = STRANGE[name]
    found = sent([thing, "beside it"], arena(size) if size else packing.Arena(None))[0]
    if isinstance(thing, torch.Tensor):
        assert found.dtype == thing.dtype
        assert found.requires_grad == thing.requires_grad
        dense = (found.to_dense(), thing.to_dense())
        assert torch.equal(*(each.float() if each.element_size() == 1 else each for each in dense))
    else:
        assert same(found, thing)


def test_memory_layout_is_kept() -> None:
    assert sent(STRANGE["channels last"], arena(4096)).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", SHAPES)
def test_collating_into_a_slot_is_default_collate(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [SHAPES[shape](index) for index in range(7)]
    expected = default_collate(samples)
    room = arena(1 << 16)
    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, room.stack)
    assert same(sent(default_collate(samples), room), expected)


def test_tensors_stacked_in_the_slot_are_not_copied_again() -> None:
    room = arena(1 << 16)
    batch = room.stack([torch.ones(100) for _ in range(4)])
    _, spans, _, file = packing.pack(batch, room)
    assert spans == [(0, 1600)]
    assert file is None


# --- slots ------------------------------------------------------------------------------------------------------------


def ring_of(most_bytes: int, *, page_locked: bool = False) -> Slots:
    return Slots(most_bytes, page_locked=page_locked)


def test_a_slot_goes_round_only_when_nothing_lies_over_it() -> None:
    slots = ring_of(1 << 20)
    slots.fit(1000)
    slot = slots.take()
    assert slot is not None
    memory = slots.lease(slot)
    slot.taken = False
    tensor = torch.frombuffer(memory[64:128], dtype=torch.float32)
    view = tensor.view(4, 4)[1]
    array = np.frombuffer(memory[128:192], dtype=np.int64)[2:]
    del memory, tensor
    slots.collect()
    assert slots.take() is not slot
    del view
    slots.collect()
    assert slots.take() is not slot
    del array
    slots.collect()
    assert slots.take() is slot
    slots.close()


def test_a_slot_that_may_still_be_written_to_is_not_given_out() -> None:
    slots = ring_of(1 << 20)
    slots.fit(1000)
    slot = slots.take()
    assert slot is not None
    assert slots.take() is not slot
    slot.taken = False
    assert slots.take() is slot
    assert slots.take() is not slot
    slots.close()


def test_the_ring_does_not_outgrow_its_memory() -> None:
    slots = ring_of(10_000)
    slots.fit(3000)
    taken = [slots.take() for _ in range(3)]
    assert [slot is None for slot in taken] == [False, False, True]
    slots.close()


def test_outgrown_and_spare_slots_are_closed() -> None:
    slots = ring_of(1 << 20)
    slots.fit(1000)
    three = [slot for slot in (slots.take(), slots.take(), slots.take()) if slot]
    for slot in three:
        slot.taken = False
    slots.trim(keep=2)
    assert len(list(slots)) == 2
    slots.fit(100_000)
    large = slots.take()
    assert list(slots) == [large]
    slots.close()


def test_a_slot_that_comes_back_too_small_is_closed_when_one_is_wanted() -> None:
    slots = ring_of(1 << 20)
    slots.fit(1000)
    small = slots.take()
    assert small is not None
    slots.fit(100_000)
    small.taken = False
    assert slots.take() is not small
    assert slots.closed == {small.number}
    slots.close()


def test_a_batch_outlives_its_slot() -> None:
    slot = Slot(1, 4096, page_locked=False)
    memory = slot.lease(deque())
    torch.frombuffer(memory, dtype=torch.uint8).fill_(7)
    slot.close()
    gc.collect()
    assert bytes(memory) == b"\7" * 4096


# --- channel----------------------------------------------------------------------------------------------------------


def test_a_message_of_any_size_arrives_whole_and_the_end_is_noticed() -> None:
    near, far = channel.pair()
    for message in ("short", list(range(200_000))):
        channel.send(near, message)
        assert channel.receive(far) == (message, [])
    channel.send(near, "last")
    near.close()
    assert channel.receive(far) == ("last", [])
    with pytest.raises(EOFError):
        channel.receive(far)
    far.close()


def test_memory_is_page_locked_with_its_first_batch_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    monkeypatch.setattr(ring, "_page_lock", lambda address, size: locked.append(size) or True)
    monkeypatch.setattr(ring, "_page_unlock", lambda address: locked.pop())
    slots = ring_of(1 << 20, page_locked=True)
    slots.fit(1000)
    one, other = slots.take(), slots.take()
    assert one is not None
    assert other is not None
    assert locked == []
    for _ in range(2):
        slots.lease(one)
        slots.collect()
    assert one.locked
    assert not other.locked
    assert locked == [one.size]
    slots.close()
    assert locked == []


def test_a_slot_rests_until_the_copies_in_every_stream_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a loop that copies in a stream of its own WHEN only the stream it trains in has come so far THEN the slot
    is not given out again."""
    over: set[str] = set()

    class Event:
        def record(self, stream: str) -> None:
            self.stream = stream

        def query(self) -> bool:
            return self.stream in over

    monkeypatch.setattr(ring, "_page_lock", lambda address, size: True)
    monkeypatch.setattr(ring, "_page_unlock", lambda address: None)
    monkeypatch.setattr(ring, "_streams", {"training", "copies"})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "training")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    slots = ring_of(1 << 20, page_locked=True)
    slots.fit(1000)
    slot = slots.take()
    assert slot is not None
    slots.lease(slot)
    slot.taken = False
    over.add("training")
    slots.collect()
    assert slots.take() is not slot
    over.add("copies")
    slots.collect()
    assert slots.take() is slot
    slots.close()
