"""Saves and loads in forked children: of a parent that has used the package, that only imported it, or is in the middle of a save."""

from __future__ import annotations

import multiprocessing
import threading
import traceback

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from tests.integration.support import assert_same, blank, load, reader, writer
from tests.support.ranks import run_ranks_ok

LIMIT_S = 30


def _state(value):
    return {"big": torch.full((2 << 20,), float(value)), "small": torch.full((3,), value), "step": value}


def _use(store, source, bucket, name, value):
    """Save and load with objects that may have crossed a fork, and with new ones."""
    url = bucket.url(name)
    dcp.save(_state(value), checkpoint_id=url, storage_writer=store)
    dcp.async_save(_state(value + 1), checkpoint_id=url, storage_writer=store).result(timeout=LIMIT_S)
    template = blank(_state(value + 1))
    dcp.load(template, checkpoint_id=url, storage_reader=source)
    assert_same(template, _state(value + 1))
    dcp.save(_state(value + 2), storage_writer=writer(bucket, name))
    assert_same(load(bucket, name, blank(_state(value + 2))), _state(value + 2))


def _in_a_fork(fn, *args):
    """Call a function in a forked child; raise what it raised, or an AssertionError when it does not end."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def call():
        try:
            fn(*args)
            theirs.send(None)
        except BaseException:
            theirs.send(traceback.format_exc())

    child = context.Process(target=call)
    child.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT_S), "the child hangs"
        failure = ours.recv()
        assert failure is None, f"in the child:\n{failure}"
        child.join(LIMIT_S)
        assert child.exitcode == 0, "the child does not exit"
    finally:
        child.kill()
        child.join()


def _after_use(_, bucket):
    store, source = writer(bucket), reader(bucket)
    _use(store, source, bucket, "parent", 1)
    _in_a_fork(_use, store, source, bucket, "child", 10)
    _in_a_fork(_in_a_fork, _use, store, source, bucket, "grandchild", 20)
    _use(store, source, bucket, "parent", 30)


def _before_use(_, bucket):
    store, source = writer(bucket), reader(bucket)
    _in_a_fork(_use, store, source, bucket, "child", 10)
    _use(store, source, bucket, "parent", 1)


class _Gated(DefaultSavePlanner):
    def __init__(self, reached, gate):
        super().__init__()
        self._reached, self._gate = reached, gate

    def resolve_data(self, write_item):
        if write_item.index.fqn == "small":  # the big one's parts are on their way
            self._reached.set()
            assert self._gate.wait(timeout=LIMIT_S)
        return super().resolve_data(write_item)


def _amid_a_save(_, bucket):
    store, source = writer(bucket, part_bytes=5 << 20), reader(bucket)
    reached, gate = threading.Event(), threading.Event()
    url = bucket.url("parent")
    future = dcp.async_save(_state(1), checkpoint_id=url, storage_writer=store, planner=_Gated(reached, gate))
    assert reached.wait(timeout=LIMIT_S)
    _in_a_fork(_use, store, source, bucket, "child", 10)
    gate.set()
    future.result(timeout=LIMIT_S)
    assert_same(load(bucket, "parent", blank(_state(1))), _state(1))
    _use(store, source, bucket, "parent", 30)


@pytest.mark.parametrize("when", [_after_use, _before_use, _amid_a_save])
def test_used_after_fork(bucket, when):
    """A forked child saves and loads, with its parent's writer and with its own, and the parent goes on; nobody hangs.

    So it is when the parent had used the package before, when it had only imported it, and when a save was under way.
    """
    run_ranks_ok(1, when, bucket, backend=None, timeout_s=4 * LIMIT_S)
    assert bucket.uploads() == []
