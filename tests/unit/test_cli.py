"""The command line: exit codes, JSON with stable keys, one line for an error, nothing that moves the cursor."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from dcp_s3 import StorageUnavailableError
from dcp_s3._checkpoint import tools
from dcp_s3._checkpoint.layout import CheckpointUrl
from dcp_s3.cli.commands import app
from dcp_s3.config import S3Config
from tests.unit.fake_store import DAY, FakeStore, denied, flip, save, stock

RUN = CheckpointUrl("ckpt", "run")
DATA = "run/step-9/data/0123456789abcdef/__0_0.distcp"
ORPHAN = "run/step-9/data/1111111111111111/__0_0.distcp"


@pytest.fixture
def configs() -> list[S3Config]:
    return []


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, configs: list[S3Config]) -> FakeStore:
    fake = FakeStore()
    fake.put(ORPHAN, b"orphan")
    save(fake, RUN.child("step-10"))
    save(fake, RUN.child("step-9"))
    fake.now += 2 * DAY
    monkeypatch.setattr(tools, "ControlStore", lambda config, bucket: (configs.append(config), fake)[1])
    return fake


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_ls(store: FakeStore) -> None:
    """One line per checkpoint, step-9 first, with time, size and state; exit code 0."""
    result = run("ls", "s3://ckpt/run")
    assert result.exit_code == 0
    _, first, second = result.stdout.splitlines()
    assert first.split() == ["s3://ckpt/run/step-9", "2026-01-01", "00:00:00Z", *first.split()[3:5], "1", "complete"]
    assert second.startswith("s3://ckpt/run/step-10 ")


def test_ls_json(store: FakeStore) -> None:
    """The keys that programs rely on."""
    documents = json.loads(run("ls", "s3://ckpt/run", "--json").stdout)
    assert [document["url"] for document in documents] == ["s3://ckpt/run/step-9", "s3://ckpt/run/step-10"]
    assert documents[0] == {
        "url": "s3://ckpt/run/step-9",
        "records": [".metadata"],
        "write_id": "ab" * 16,
        "committed_at": "2026-01-01T00:00:00+00:00",
        "bytes": 4752 + len(store.objects["run/step-9/.metadata"].body),
        "objects": 1,
        "ours": True,
        "state": "complete",
    }


def test_ls_of_nothing(store: FakeStore) -> None:
    """No checkpoints is said, and is no failure; in JSON it is an empty list."""
    assert run("ls", "s3://ckpt/other").stdout == "no checkpoints\n"
    assert json.loads(run("ls", "s3://ckpt/other", "--json").stdout) == []


def test_ls_of_something_bad(store: FakeStore) -> None:
    """A corrupt checkpoint among good ones is exit code 1, and its reason is not cut off."""
    flip(store, "run/step-9/.metadata", store.objects["run/step-9/.metadata"].body.index(b"1.0.0"))
    result = run("ls", "s3://ckpt/run")
    assert result.exit_code == 1
    assert f"manifest-{'ab' * 16}.json was written for" in result.stdout.splitlines()[1]


def test_verify(store: FakeStore) -> None:
    """Good is 0, and the last line says how deep it was."""
    shallow, deep = run("verify", "s3://ckpt/run/step-9"), run("verify", "s3://ckpt/run/step-9", "--deep")
    assert (shallow.exit_code, deep.exit_code) == (0, 0)
    assert shallow.stdout.startswith("good: s3://ckpt/run/step-9: 1 objects, 0 problems")
    assert "--deep reads the content" in shallow.stdout
    assert "of content read" in deep.stdout


def test_verify_of_something_bad(store: FakeStore) -> None:
    """A problem is exit code 1, on one line."""
    flip(store, DATA, 0)
    result = run("verify", "s3://ckpt/run/step-9", "--deep")
    assert result.exit_code == 1
    first, last = result.stdout.splitlines()
    assert first.startswith(f"BAD   s3://ckpt/{DATA} part 1 (bytes 0-999) has CRC32C")
    assert last.startswith("BAD: s3://ckpt/run/step-9: 1 objects, 1 problems")


def test_verify_json(store: FakeStore) -> None:
    """The keys that programs rely on, with the exit code of the same meaning."""
    del store.objects[DATA]
    result = run("verify", "s3://ckpt/run/step-9", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["ok"], len(document["problems"])) == (1, False, 1)
    assert set(document) == {"url", "ok", "problems", "notes", "objects", "checked_bytes", "seconds"}


def test_verify_of_another_writers(store: FakeStore) -> None:
    """A stock checkpoint is good as far as can be told, with a note."""
    stock(store, RUN.child("stock"))
    result = run("verify", "s3://ckpt/run/stock")
    assert result.exit_code == 0
    assert result.stdout.startswith("note  s3://ckpt/run/stock/.metadata: another writer's checkpoint")


def test_gc_reports_and_deletes(store: FakeStore) -> None:
    """Without --delete nothing goes; with it the orphan does; the lifecycle rule is printed."""
    dry = run("gc", "s3://ckpt/run")
    assert dry.exit_code == 0
    assert f"would delete {ORPHAN}\n" in dry.stdout
    assert "run again with --delete" in dry.stdout
    assert ORPHAN in store.objects
    wet = run("gc", "s3://ckpt/run", "--delete")
    assert f"deleted {ORPHAN}\n" in wet.stdout
    assert '"NoncurrentVersionExpiration": {"NoncurrentDays": 7}' in wet.stdout
    assert ORPHAN not in store.objects
    assert DATA in store.objects


def test_gc_json(store: FakeStore) -> None:
    """The keys that programs rely on."""
    document = json.loads(run("gc", "s3://ckpt/run", "--older-than", "1d", "--json").stdout)
    assert document["removed"] == [ORPHAN]
    assert document["older_than_s"] == 86400
    assert set(document) == {
        *("url", "dry_run", "older_than_s", "removed", "removed_bytes", "aborted", "waiting", "live", "refused"),
        *("skipped", "notes", "lifecycle_rule", "seconds"),
    }


def test_gc_names_what_it_left_alone(store: FakeStore) -> None:
    """Skipped checkpoints, refused deletions and their reasons are in the text."""
    stock(store, RUN.child("step-10"))
    store.before = lambda operation, key: denied(operation, key) if operation == "delete" else None
    text = run("gc", "s3://ckpt/run", "--delete").stdout
    assert f"the store refuses to delete {ORPHAN}\n" in text
    assert "note: s3://ckpt/run/step-10 has a commit record without a matching manifest" in text


@pytest.mark.parametrize("time, fine", [("2000s", False), ("40m", True), ("1.5h", True), ("2d", True), ("90000", True)])
def test_margins(store: FakeStore, time: str, *, fine: bool) -> None:
    """Units s, m, h, d; less than the save deadline and a quarter of an hour is a usage error, unless no writer runs."""
    assert run("gc", "s3://ckpt/run", "--older-than", time).exit_code == (0 if fine else 2)
    assert run("gc", "s3://ckpt/run", "--older-than", time, "--no-writer-runs").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("nonsense",),
        ("ls", "s3://ckpt/run", "--nonsense"),
        ("ls", "/local/run"),
        ("verify", "gs://ckpt/run"),
        ("gc", "s3://ckpt/run", "--older-than", "soon"),
        ("gc", "s3://ckpt/run", "--older-than", "-1h"),
        ("ls", "s3://ckpt/run", "--endpoint-url", "localhost:9000"),
    ],
)
def test_wrong_usage_is_2(store: FakeStore, arguments: tuple[str, ...]) -> None:
    """Wrong options, URLs, times and endpoints alike, with a text on stderr and nothing on stdout."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr
    assert result.stdout == ""


def test_no_checkpoint_is_1(store: FakeStore) -> None:
    """verify of nothing: one line that says so."""
    result = run("verify", "s3://ckpt/other")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "dcp-s3: there is no checkpoint at s3://ckpt/other: neither .metadata nor __<rank>.metadata"
    ]


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
@pytest.mark.parametrize("how", ["denied", "unreachable"])
def test_a_store_that_does_not_answer_is_3(store: FakeStore, command: str, how: str) -> None:
    """Refused and unreachable are neither good nor bad: exit code 3 and one line with the facts."""

    def fail(operation: str, key: str) -> None:
        if how == "denied":
            denied(operation, key)
        raise StorageUnavailableError("the store\ndid not answer").with_context(attempts=8)

    store.before = fail
    result = run(command, "s3://ckpt/run")
    assert (result.exit_code, result.stdout) == (3, "")
    (line,) = result.stderr.splitlines()
    assert ("status=403" if how == "denied" else "the store did not answer [attempts=8]") in line


def test_options_of_the_store(store: FakeStore, configs: list[S3Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """Options win over the environment; what is not given comes from it."""
    monkeypatch.setenv("DCP_S3_REGION", "from-env")
    monkeypatch.setenv("DCP_S3_PROFILE", "from-env")
    run("ls", "s3://ckpt/run", "--endpoint-url", "http://127.0.0.1:1", "--region", "here")
    assert (configs[-1].endpoint_url, configs[-1].region, configs[-1].profile) == (
        "http://127.0.0.1:1",
        "here",
        "from-env",
    )


def test_keys_cannot_move_the_cursor(store: FakeStore) -> None:
    """Escape sequences in names from the bucket are printed as text."""
    save(store, RUN.child("\x1b[2J\x1b]0;owned\x07"))
    text = run("ls", "s3://ckpt/run").stdout
    assert "\x1b" not in text
    assert r"\x1b[2J" in text
