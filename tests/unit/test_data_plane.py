"""What the saves and loads of one process share: clients, slots, what the store has shown of itself, and memory."""

from __future__ import annotations

import asyncio

import pytest

from dcp_s3 import CorruptCheckpointError, S3Config, StorageError
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.job import Job
from dcp_s3._transfer.limits.retry import Counter, Deadline
from dcp_s3._transfer.s3 import data_plane as module
from dcp_s3._transfer.s3 import planes
from dcp_s3._transfer.s3.data_plane import check_same
from dcp_s3._transfer.s3.planes import data_plane


@pytest.fixture(autouse=True)
def no_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of earlier tests, and none left behind; no client is made of a config that is only named."""
    for name in ("_planes", "_budgets"):
        monkeypatch.setattr(planes, name, {})
    monkeypatch.setattr(module, "CurrentDataClients", lambda config: object())


def config(number: int = 0, **settings: object) -> S3Config:
    return S3Config(endpoint_url=f"http://localhost:{number + 1}", **settings)  # type: ignore[arg-type]


def test_configs_that_need_the_same_clients_share_them() -> None:
    """With the slots and what was learnt of the store; each keeps its own settings."""
    one, other = data_plane(config(save_deadline_s=60.0)), data_plane(config(save_deadline_s=90.0))
    assert one._clients is other._clients
    assert one._slots is other._slots
    assert one.learnt is other.learnt
    assert one.budget is other.budget
    assert (one.config.save_deadline_s, other.config.save_deadline_s) == (60.0, 90.0)
    assert data_plane(config(1))._clients is not one._clients


def test_the_bound_of_memory_is_the_processes() -> None:
    """One budget for each bound that somebody has set, whatever else the configs say."""
    small, large = 1 << 26, 1 << 27
    budgets = {n: data_plane(config(n, memory_bytes=small)).budget for n in range(3)}
    assert len({id(budget) for budget in budgets.values()}) == 1
    other = data_plane(config(0, memory_bytes=large))
    assert other.budget is not budgets[0]
    assert (budgets[0].limit, other.budget.limit) == (small, large)
    assert data_plane(config(0, memory_bytes=small)).budget is budgets[0]


def failed(status: int) -> StorageError:
    return StorageError("no").with_context(status=status)


@pytest.mark.parametrize(
    "answer, size",
    [
        ({"ContentRange": "bytes 0-0/77"}, 77),
        ({"ContentRange": "bytes 0-0/*"}, 1),
        ({}, 1),
        (failed(416), 0),
        (failed(403), None),
    ],
)
def test_a_size_that_a_head_left_out(answer: dict[str, str] | StorageError, size: int | None) -> None:
    """It is asked for by a GET of one byte; an object without one has no range, and other refusals are no sizes."""
    asked = []

    async def call(job: object, operation: str, method: str, key: str, params: dict[str, str], **_: object) -> object:
        asked.append((operation, key, params["Range"]))
        if isinstance(answer, StorageError):
            raise answer
        return answer

    plane = data_plane(config())
    plane._call = call  # type: ignore[method-assign]
    job = Job("bucket", Deadline(60), Counter(), Progress(), 0)
    if size is None:
        with pytest.raises(StorageError) as caught:
            asyncio.run(plane._size(job, "k"))
        assert caught.value is answer
    else:
        assert asyncio.run(plane._size(job, "k")) == size
    assert asked == [("GetObject", "k", "bytes=0-0")]


def test_the_planes_that_are_kept() -> None:
    """The 16 that were used last: a process that goes from store to store does not keep the clients of all."""
    first = [data_plane(config(n))._clients for n in range(16)]
    assert data_plane(config(0))._clients is first[0]
    data_plane(config(16))
    assert len(planes._planes) == 16
    assert data_plane(config(0))._clients is first[0]
    assert data_plane(config(2))._clients is first[2]
    assert data_plane(config(1))._clients is not first[1]


@pytest.mark.parametrize(
    "before, now, same",
    [
        ('"a"', '"a"', True),
        ('"a"', "a", True),
        ("a", '"a"', True),
        ("", "", True),
        ('"a"', '"b"', False),
        ('"a"', "", False),
        ("", '"a"', False),
    ],
)
def test_two_etags_of_one_object(before: str, now: str, *, same: bool) -> None:
    """Quotes do not count; a missing one is another one."""
    if same:
        check_same(before, now)
        return
    with pytest.raises(CorruptCheckpointError) as caught:
        check_same(before, now)
    assert f"changed while it was read (ETag {now}, was {before})" in str(caught.value)
