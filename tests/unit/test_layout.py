"""URLs, names, and which names out of the store are trusted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import ConfigError, CorruptCheckpointError
from dcp_s3._checkpoint.format import layout
from dcp_s3._checkpoint.format.layout import CheckpointUrl, check_relative, join_id, owner_of, parse_url


@pytest.mark.parametrize(
    "text, bucket, prefix",
    [
        ("s3://ckpt/run/step-100", "ckpt", "run/step-100"),
        ("s3://ckpt/run/step-100/", "ckpt", "run/step-100"),
        ("s3://ckpt", "ckpt", ""),
        ("s3://ckpt/", "ckpt", ""),
        (Path("s3://ckpt/run/step-100"), "ckpt", "run/step-100"),
        ("s3://my.bucket-2/späte Läufe/a=b,c#1", "my.bucket-2", "späte Läufe/a=b,c#1"),
    ],
)
def test_urls_that_are_understood(text: str | Path, bucket: str, prefix: str) -> None:
    """Plain URLs, ones with a trailing slash, and ones that pathlib has shortened to a single slash."""
    assert parse_url(text) == CheckpointUrl(bucket, prefix)


@pytest.mark.parametrize(
    "text, said",
    [
        ("gs://ckpt/run", "must look like s3://"),
        ("/local/run", "must look like s3://"),
        ("ckpt/run", "must look like s3://"),
        ("", "must look like s3://"),
        ("s3://", "must look like s3://"),
        ("s3:///run", "must look like s3://"),
        ("s3:run", "must look like s3://"),
        ("S3://ckpt/run", "must look like s3://"),
        ("s3://-c/run", "no valid bucket"),
        ("s3://user:secret@ckpt/run", "no valid bucket"),
        ("s3://ckpt/run//step", "empty path segment"),
        ("s3://ckpt//run", "empty path segment"),
        ("s3://ckpt/run/../other", r"'\.\.'"),
        ("s3://ckpt/./run", r"'\.\.'"),
        ("s3://ckpt/run?versionId=3", "query"),
        ("s3://ckpt/run\x00", "control character"),
        ("s3://ckpt/run\nx", "control character"),
        ("s3://ckpt/\ud800", "UTF-8"),
        ("s3://ckpt/" + "x" * 1000, "at most 960"),
    ],
)
def test_urls_that_are_refused(text: str, said: str) -> None:
    """What cannot be a checkpoint's place is refused before any request, and the text says why."""
    with pytest.raises(ConfigError, match=said):
        parse_url(text)


def test_bytes_are_no_url() -> None:
    """A bytes path is refused with our error, not with one of the regular expression's."""
    with pytest.raises(ConfigError, match="text"):
        parse_url(b"s3://ckpt/run")
    with pytest.raises(ConfigError, match="text"):
        join_id(None, b"step-1")


def test_the_longest_prefix_still_has_room_for_every_name() -> None:
    """The keys of the longest accepted prefix stay within S3's 1,024 bytes."""
    url = parse_url("s3://ckpt/" + "x" * 960)
    names = [layout.data_key(layout.new_token(), 999_999, 999_999), layout.index_name(layout.new_write_id())]
    assert max(len(url.key(name)) for name in names) <= 1024


@pytest.mark.parametrize("text", ["s3://ckpt/run/step-1", "s3://ckpt"])
def test_str_gives_the_url_back(text: str) -> None:
    """What is printed can be pasted."""
    assert str(parse_url(text)) == text


def test_keys_below_a_url() -> None:
    """With an empty prefix keys start without a slash; the empty name is the listing prefix."""
    assert CheckpointUrl("b", "run").key(".metadata") == "run/.metadata"
    assert CheckpointUrl("b", "").key(".metadata") == ".metadata"
    assert CheckpointUrl("b", "run").key("") == "run/"
    assert CheckpointUrl("b", "").key("") == ""
    assert CheckpointUrl("b", "run").child("step-1") == CheckpointUrl("b", "run/step-1")


@pytest.mark.parametrize(
    "base, given, expected",
    [
        ("s3://ckpt/run", "step-1", "s3://ckpt/run/step-1"),
        ("s3://ckpt/run", "eval/step-1/", "s3://ckpt/run/eval/step-1"),
        ("s3://ckpt", "step-1", "s3://ckpt/step-1"),
        ("s3://ckpt/run", "s3://other/x", "s3://other/x"),
        ("s3://ckpt/run", Path("s3://other/x"), "s3://other/x"),
        (None, "s3://other/x", "s3://other/x"),
        ("s3://ckpt/run", Path("step-1"), "s3://ckpt/run/step-1"),
    ],
)
def test_checkpoint_ids(base: str | None, given: str | Path, expected: str) -> None:
    """An id is a full URL, or a name below the base."""
    assert str(join_id(parse_url(base) if base else None, given)) == expected


@pytest.mark.parametrize(
    "base, given, said",
    [
        (None, "step-1", "no base"),
        ("s3://ckpt/run", "../other", r"'\.\.'"),
        ("s3://ckpt/run", "/abs", "relative to"),
        ("s3://ckpt/run", "", "relative to"),
        ("s3://ckpt/run", "a//b", "empty path segment"),
        ("s3://ckpt/run", "file:///tmp/x", "must look like s3://"),
        ("s3://ckpt/run", "x" * 990, "at most 960"),
    ],
)
def test_checkpoint_ids_that_are_refused(base: str | None, given: str, said: str) -> None:
    """A name that needs a base and has none, or that leads out of it, is refused."""
    with pytest.raises(ConfigError, match=said):
        join_id(parse_url(base) if base else None, given)


def test_names() -> None:
    """The names of the format."""
    assert layout.record_name(None) == ".metadata"
    assert layout.record_name(12) == "__12.metadata"
    assert layout.index_name("ab" * 16) == "index-" + "ab" * 16 + ".safetensors.gz"
    assert layout.data_key("01" * 8, 3, 0) == "data/0101010101010101/__3_0.distcp"
    assert layout.index_write_id(layout.index_name("ab" * 16)) == "ab" * 16
    assert layout.index_write_id("index-x.safetensors.gz") is None
    assert layout.is_write_id(layout.new_write_id())
    assert not layout.is_write_id("66f5e56c-1d57-4b25-b950-52c2254a8d6e")
    assert not layout.is_write_id(None)
    assert layout.new_token() != layout.new_token()
    assert [layout.is_record_name(n) for n in (".metadata", "__0.metadata", "__01.metadata", "x.metadata")] == [
        True,
        True,
        False,
        False,
    ]


OURS = "data/0123456789abcdef/__0_0.distcp"


@pytest.mark.parametrize(
    "key, owner",
    [
        (OURS, ""),
        ("run/" + OURS, "run"),
        ("run/step-1/" + OURS, "run/step-1"),
        ("run/data/" + OURS, "run/data"),
        ("run/index-" + "ab" * 16 + ".safetensors.gz", "run"),
        ("run/.metadata", None),
        ("run/__0_0.distcp", None),
        ("run/data/0123456789abcdef/__0_0.distcp.bak", None),
        ("run/data/0123456789abcdef/x/__0_0.distcp", None),
        ("run/data/0123456789ABCDEF/__0_0.distcp", None),
        ("run/data/0123456789abcde/__0_0.distcp", None),
        ("run/xdata/0123456789abcdef/__0_0.distcp", None),
        ("run/index-" + "ab" * 16 + ".safetensors.gz\n", None),
        ("run/index-" + "ab" * 15 + ".safetensors.gz", None),
        ("run/my-index-" + "ab" * 16 + ".safetensors.gz", None),
    ],
)
def test_whose_an_object_is(key: str, owner: str | None) -> None:
    """Only exact names are ours, and belong to the checkpoint directly above them."""
    assert owner_of(key) == owner


@pytest.mark.parametrize("path", ["__0_0.distcp", OURS, "a/b c/ü.distcp", "..x/y..", "a:b/c"])
def test_relative_names_that_are_read(path: str) -> None:
    """What our writer, FileSystemWriter and others name their files passes unchanged."""
    assert check_relative(path, source="s") == path


@pytest.mark.parametrize(
    "path",
    [
        *("", "/etc/passwd", "../x", "a/../../x", "..", "a/..", "./a", "a//b", "a/"),
        *("s3://b/x", "s3:/b/x", "file:/x", "a\x00b", "\ud800", "x" * 1025),
    ],
)
def test_relative_names_that_lead_elsewhere(path: str) -> None:
    """A name that could leave the checkpoint, or cannot be a key, is corruption, and the source is named."""
    with pytest.raises(CorruptCheckpointError, match=r"^s3://b/run/\.metadata names"):
        check_relative(path, source="s3://b/run/.metadata")


@given(st.text(st.characters(codec=None), max_size=40))
def test_a_name_that_passes_stays_below_the_checkpoint(path: str) -> None:
    """Whatever the text: either it is refused as corrupt, or the key is below the URL also on path-like stores."""
    try:
        check_relative(path, source="s")
    except CorruptCheckpointError:
        return
    import posixpath

    key = parse_url("s3://ckpt/run").key(path)
    assert posixpath.normpath(key) == key
    assert key.startswith("run/")
