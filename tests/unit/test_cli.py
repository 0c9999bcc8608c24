"""The command line: exit codes, JSON with stable keys, one line for an error, nothing that moves the cursor."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

import dcp_s3
from dcp_s3 import StorageUnavailableError
from dcp_s3._checkpoint.care import maintenance
from dcp_s3._checkpoint.format.layout import CheckpointUrl
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
    monkeypatch.setattr(maintenance, "ControlStore", lambda config, bucket: (configs.append(config), fake)[1])
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
    assert first.split() == ["s3://ckpt/run/step-9", "2026-01-01", "00:00:00Z", *first.split()[3:5], "2", "committed"]
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
        "bytes": 4752 + len(b"orphan") + len(store.objects["run/step-9/.metadata"].body),
        "objects": 2,
        "ours": True,
        "state": "committed",
    }


def test_ls_of_nothing(store: FakeStore) -> None:
    """No checkpoints is said; in JSON it is an empty list. The exit code is that of nothing found."""
    text, document = run("ls", "s3://ckpt/other"), run("ls", "s3://ckpt/other", "--json")
    assert (text.exit_code, text.stdout) == (1, "no checkpoints\n")
    assert (document.exit_code, json.loads(document.stdout)) == (1, [])


def test_ls_shows_what_was_not_committed(store: FakeStore) -> None:
    """Data without a record is a line of its own, with its size; that is no failure."""
    store.put("run/step-11/data/2222222222222222/__0_0.distcp", b"12345")
    store.put("run/step-11/data/3333333333333333/__1_0.distcp", b"67890")
    result = run("ls", "s3://ckpt/run")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].split() == ["s3://ckpt/run/step-11", "-", "10", "B", "2", "uncommitted"]
    assert json.loads(run("ls", "s3://ckpt/run", "--json").stdout)[-1] == {
        "url": "s3://ckpt/run/step-11",
        "records": [],
        "write_id": None,
        "committed_at": None,
        "bytes": 10,
        "objects": 2,
        "ours": True,
        "state": "uncommitted",
    }


def test_ls_of_something_bad(store: FakeStore) -> None:
    """A corrupt checkpoint among good ones is exit code 1, and its reason is not cut off."""
    del store.objects[f"run/step-9/index-{'ab' * 16}.safetensors.gz"]
    result = run("ls", "s3://ckpt/run")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].endswith(
        f"  corrupt: .metadata: its index index-{'ab' * 16}.safetensors.gz is missing"
    )


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
    each = {"url", "ok", "problems", "notes", "objects", "checked_bytes", "seconds"}
    assert set(document) == each | {"checkpoints"}
    assert [set(checkpoint) for checkpoint in document["checkpoints"]] == [each]


def test_verify_of_a_run(store: FakeStore) -> None:
    """A URL above checkpoints: an answer for each, in the order of their numbers, and one for all. One bad one is exit code 1."""
    good = run("verify", "s3://ckpt/run")
    assert good.exit_code == 0
    first, second, last = good.stdout.splitlines()
    assert first.startswith("good: s3://ckpt/run/step-9: 1 objects")
    assert second.startswith("good: s3://ckpt/run/step-10: 1 objects")
    assert last == "good: s3://ckpt/run: 2 checkpoints, 0 bad"
    del store.objects[DATA]
    bad = run("verify", "s3://ckpt/run")
    assert bad.exit_code == 1
    assert bad.stdout.splitlines()[0].startswith(f"BAD   s3://ckpt/{DATA} is missing")
    assert bad.stdout.splitlines()[-1] == "BAD: s3://ckpt/run: 2 checkpoints, 1 bad"
    result = run("verify", "s3://ckpt/run", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["url"], document["ok"]) == (1, "s3://ckpt/run", False)
    assert [(each["url"], each["ok"]) for each in document["checkpoints"]] == [
        ("s3://ckpt/run/step-9", False),
        ("s3://ckpt/run/step-10", True),
    ]


def test_verify_without_the_right_to_list(store: FakeStore) -> None:
    """Who may read a checkpoint by its name can verify it."""
    store.before = lambda operation, key: denied(operation, key) if operation.startswith("list") else None
    assert run("verify", "s3://ckpt/run/step-9").exit_code == 0
    assert run("verify", "s3://ckpt/run").exit_code == 4


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
    result = run("gc", "s3://ckpt/run", "--delete")
    text = result.stdout
    assert result.exit_code == 4
    assert "note: 1 deletions were refused, the last with: no [" in text
    assert "status=403" in text
    assert run("gc", "s3://ckpt/run", "--delete", "--json").exit_code == 4
    assert run("gc", "s3://ckpt/run").exit_code == 0
    assert f"the store refuses to delete {ORPHAN}\n" in text
    assert "note: s3://ckpt/run/step-10 has a commit record without a matching index" in text


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
        ("gc", "s3://ckpt/run", "--older-than", "999999999999999d"),
        ("gc", "s3://ckpt/run", "--older-than", "9" * 400),
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
        "dcp-s3: there is no checkpoint at s3://ckpt/other or below it: no .metadata, no __<rank>.metadata"
    ]


@pytest.mark.parametrize(
    "arguments, code, kind, facts",
    [
        (("verify", "s3://ckpt/other"), 1, "CheckpointNotFoundError", {}),
        (("ls", "/local/run"), 2, "ConfigError", {}),
        (("gc", "s3://ckpt/run", "--older-than", "soon"), 2, "ConfigError", {}),
        (
            ("ls", "s3://ckpt/denied"),
            4,
            "AccessDeniedError",
            {"operation": "list", "status": 403, "code": "AccessDenied"},
        ),
    ],
)
def test_errors_in_json(
    store: FakeStore, arguments: tuple[str, ...], code: int, kind: str, facts: dict[str, object]
) -> None:
    """With --json an error is a document too: its class, its text, and the facts that are known; the line on stderr stays."""
    store.before = lambda operation, key: denied(operation, key) if "denied" in key else None
    result = run(*arguments, "--json")
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["class"]) == (code, kind)
    assert error["message"]
    assert facts.items() <= error.items()
    assert result.stderr.startswith(f"dcp-s3: {error['message'].splitlines()[0][:40]}")


def test_version() -> None:
    """The program tells its version."""
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"dcp-s3 {dcp_s3.__version__}\n")


@pytest.mark.parametrize("url, whole", [("s3://ckpt/run", False), ("s3://ckpt", True)])
def test_what_the_lifecycle_rule_does_is_said(store: FakeStore, url: str, *, whole: bool) -> None:
    """To apply it replaces what the bucket has; without a prefix it is about the whole bucket."""
    text = run("gc", url).stdout
    assert "REPLACES all lifecycle rules of the bucket" in text
    assert ("WHOLE bucket" in text) is whole


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
@pytest.mark.parametrize("how", ["denied", "unreachable"])
def test_a_store_that_does_not_answer_is_3_and_one_that_refuses_is_4(store: FakeStore, command: str, how: str) -> None:
    """Refused and unreachable are neither good nor bad, and two things: exit codes 4 and 3, one line with the facts."""

    def fail(operation: str, key: str) -> None:
        if how == "denied":
            denied(operation, key)
        raise StorageUnavailableError("the store\ndid not answer").with_context(attempts=8)

    store.before = fail
    result = run(command, "s3://ckpt/run")
    assert (result.exit_code, result.stdout) == (4 if how == "denied" else 3, "")
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
