"""The errors: one tree, each of which survives DCP's pickling between ranks."""

from __future__ import annotations

import inspect
import pickle

import pytest

import dcp_s3
from dcp_s3 import errors

ALL = [getattr(errors, name) for name in errors.__all__]


def test_every_class_is_exported_and_in_all() -> None:
    """Every error class of the module is public, and the package exports it."""
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined == set(errors.__all__)
    assert defined <= set(dcp_s3.__all__)


@pytest.mark.parametrize("kind", ALL)
def test_pickles_with_its_context(kind: type[errors.DcpS3Error]) -> None:
    """An error arrives at the other ranks with its text and all its facts."""
    error = kind("what happened")
    error.with_context(rank=3, operation="UploadPart", bucket="b", key="k", part=7, status=503, code="SlowDown")
    error.with_context(request_id="r-1", attempts=4)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == (
        "what happened [rank=3, operation=UploadPart, bucket=b, key=k, part=7, status=503, code=SlowDown, request_id=r-1, "
        "attempts=4]"
    )


def test_context_is_filled_in_once() -> None:
    """The innermost place knows best: later context does not overwrite it."""
    error = errors.StorageError("x")
    error.with_context(key="inner").with_context(key="outer", rank=1)
    assert (error.key, error.rank) == ("inner", 1)


def test_handlers_can_be_coarse() -> None:
    """Grouped by what a handler does: unavailable and denied are storage errors, a deadline is unavailability."""
    assert issubclass(errors.DeadlineExceededError, errors.StorageUnavailableError)
    assert issubclass(errors.AccessDeniedError, errors.StorageError)
    assert issubclass(errors.CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(errors.ConfigError, ValueError)


def test_public_names_are_what_all_says() -> None:
    """``__all__`` is the public API: everything in it can be had, and dir() shows it."""
    for name in dcp_s3.__all__:
        assert getattr(dcp_s3, name) is not None
    assert set(dcp_s3.__all__) <= set(dir(dcp_s3))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        dcp_s3.nothing_of_the_kind  # noqa: B018
