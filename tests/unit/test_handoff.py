"""A staged state dict that crosses to another process: both ends of the pipe in this one, and when its block is free again."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from dcp_s3._staging import handoff
from dcp_s3._staging.handoff import FAILURE_KEY
from dcp_s3._staging.turn import take_turn
from dcp_s3.staging import Stager, StagingFailed, lease_of
from tests.support.staging import close_stagers
from tests.unit.test_staging import block_of, mapped_blocks, open_blocks, release


@pytest.fixture(autouse=True)
def no_block_is_left() -> Iterator[None]:
    """Neither of earlier tests, nor of these."""
    close_stagers()
    yield
    close_stagers()
    assert not mapped_blocks()
    assert not open_blocks()


def cross(staged: Any) -> Any:
    """Send a state dict through a pipe, and receive it."""
    return pickle.loads(bytes(ForkingPickler.dumps(staged)))


def ones(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"t": torch.full((1000,), value)}


def test_the_receiver_hands_back() -> None:
    """One crossing: its release lets the next staging have the block."""
    stager = Stager(wait_s=0)
    staged = stager.stage(ones())
    received, before = cross(staged), block_of(staged)
    assert received["t"].tolist() == [1.0] * 1000
    release(received)
    assert block_of(stager.stage(ones(2.0))) == before


def test_the_receivers_death_hands_back() -> None:
    """So does the end of all that it received, and not of a part of it."""
    stager = Stager(wait_s=0)
    staged = stager.stage(ones() | {"u": torch.zeros(3)})
    received, before = cross(staged), block_of(staged)
    del received["t"]
    lease = staged.lease
    assert not lease.handed_back()
    del received
    assert lease.handed_back()
    assert block_of(stager.stage(ones(2.0))) == before


@pytest.mark.parametrize("first", [0, 1])
def test_two_crossings_at_once(first: int) -> None:
    """The first receiver to hand back does not speak for the other one: nothing is written over what that still reads."""
    stager = Stager(wait_s=0)
    staged = stager.stage(ones())
    before = block_of(staged)
    receivers = [cross(staged), cross(staged)]
    release(receivers[first])
    again = stager.stage(ones(2.0))
    assert block_of(again) != before
    assert receivers[1 - first]["t"].tolist() == [1.0] * 1000
    release(receivers[1 - first])
    assert again["t"].tolist() == [2.0] * 1000


def test_the_senders_tensors_say_nothing_once_it_crossed() -> None:
    """Their death leaves the block to whoever received it."""
    stager = Stager(wait_s=0)
    staged = stager.stage(ones())
    before = block_of(staged)
    received = cross(staged)
    del staged
    assert block_of(stager.stage(ones(2.0))) != before
    assert received["t"].tolist() == [1.0] * 1000


def test_what_was_received_cannot_be_sent_on() -> None:
    """The block is not the receiver's: the state dict that arrives says so, and no pipe breaks."""
    stager = Stager(wait_s=0)
    received = cross(stager.stage(ones()))
    onward = cross(received)
    assert list(onward) == [FAILURE_KEY]
    failure = onward[FAILURE_KEY]
    assert isinstance(failure, StagingFailed)
    assert "a received state dict cannot be sent on: stage it again" in str(failure.error)


def test_ties_and_views_cross() -> None:
    """One tensor under two names stays one; a view that somebody made of a staged one arrives with its values."""
    stager = Stager(wait_s=0)
    tensor = torch.arange(12.0).view(3, 4)
    staged = stager.stage({"a": tensor, "b": tensor})
    staged["column"] = staged["a"][:, 1]
    received = cross(staged)
    assert received["a"] is received["b"]
    assert torch.equal(received["a"], tensor)
    assert torch.equal(received["column"], tensor[:, 1])
    assert lease_of(received["a"]) is not lease_of(staged["a"])


def test_conjugate_and_negative_views_cross() -> None:
    """Also those that were put in behind the staging: their values arrive, not the memory that they look at."""
    staged = Stager(wait_s=0).stage({"c": torch.tensor([1 + 2j, 3 - 4j])})
    staged["conj"] = staged["c"].conj()
    staged["imag"] = staged["conj"].imag
    assert staged["imag"].is_neg()
    received = cross(staged)
    assert received["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert received["imag"].tolist() == [-2.0, 4.0]
    assert received["c"].tolist() == [1 + 2j, 3 - 4j]


def test_what_was_put_in_from_elsewhere_crosses() -> None:
    """A tensor of another staging lies in another block: it arrives with its own values."""
    stager = Stager(buffers=2, wait_s=0)
    other = stager.stage({"front": torch.full((500,), 3.0), "t": torch.full((1000,), 4.0)})
    staged = stager.stage(ones())
    assert block_of(other) != block_of(staged)
    staged["other"] = other["t"]
    received = cross(staged)
    assert received["other"].tolist() == [4.0] * 1000
    assert received["t"].tolist() == [1.0] * 1000


def test_what_does_not_pickle() -> None:
    """It arrives as a failed staging with the reason, and its block is free when the sender's tensors are gone."""
    stager = Stager(wait_s=0)
    staged = stager.stage(ones())
    before = block_of(staged)
    staged["lock"] = threading.Lock()
    received = cross(staged)
    assert list(received) == [FAILURE_KEY]
    assert "cannot pickle" in str(received[FAILURE_KEY].error)
    del staged
    assert block_of(stager.stage(ones(2.0))) == before


def test_the_thread_that_sends_reads() -> None:
    """When it has ended without a release, the save is taken to have failed, and the next staging does not wait for it."""
    stager = Stager(wait_s=60)
    staged = stager.stage(ones())
    before = block_of(staged)
    received: list[Any] = []
    thread = threading.Thread(target=lambda: received.append(cross(staged)))
    thread.start()
    thread.join()
    assert block_of(stager.stage(ones(2.0))) != before
    assert received[0]["t"].tolist() == [1.0] * 1000


def test_a_state_dict_without_tensors_crosses() -> None:
    """There is no block to be mapped."""
    stager = Stager(wait_s=0)
    assert cross(stager.stage({"step": 7})) == {"step": 7}
    assert not mapped_blocks()


def test_who_asks_for_the_items_is_the_save() -> None:
    """Its turn has begun, and both turn and lease are over when its thread has ended or nobody holds the state dict."""
    stager = Stager(wait_s=0)
    staged = stager.stage(ones())
    turn, lease = staged.turn, staged.lease
    assert not turn.begun
    thread = threading.Thread(target=staged.items)
    thread.start()
    thread.join()
    assert turn.begun
    assert turn.over()
    assert lease.abandoned()
    staged = stager.stage(ones())
    turn = staged.turn
    assert not turn.over()
    del staged
    assert turn.over()


def test_the_turn_of_what_crosses() -> None:
    """Is over for the sender when its thread is, and has nothing more to tell; the receiver's save has one of its own."""
    staged = Stager(wait_s=0).stage(ones())
    received = cross(staged)
    assert (staged.turn.begun, staged.turn.settled) == (True, True)
    assert not received.turn.begun
    received.items()
    assert take_turn() is received.turn
    assert not received.turn.settled


def test_what_does_not_arrive() -> None:
    """The receiver has a failed staging in its place, whose save takes its turn and tells the other ranks."""
    received: Any = handoff._receive(None, b"no pickle")
    assert list(received) == [FAILURE_KEY]
    assert received.turn is not None
