"""S3Config and RetryPolicy: data that is right or refused before the first request."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import typing

import pytest

from dcp_s3 import ConfigError, RetryPolicy, S3Config

MIB = 1 << 20
INF, NAN = float("inf"), float("nan")
TIMES = ("connect_timeout_s", "read_timeout_s", "stall_limit_s", "save_deadline_s", "load_deadline_s")
INTS = ("part_bytes", "max_concurrency", "memory_bytes", "max_record_bytes", "staging_buffers")


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"part_bytes": 5 * MIB - 1}, "part_bytes must be 0 \\(chosen\\) or 5 MiB to 1 GiB"),
        ({"part_bytes": (1 << 30) + 1}, "part_bytes must be"),
        ({"part_bytes": 256 * MIB}, "at least twice part_bytes"),
        ({"addressing_style": "dns"}, "addressing_style must be one of 'auto', 'path', 'virtual'"),
        ({"checksum": "md5"}, "checksum must be one of"),
        ({"conditional_commit": "yes"}, "conditional_commit must be one of"),
        ({"sse": "rot13"}, "sse must be one of"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"memory_bytes": MIB}, "memory_bytes must be 32 MiB or more"),
        ({"max_record_bytes": 0}, "max_record_bytes must be 1 or more"),
        ({"read_timeout_s": 0}, "read_timeout_s must be more than 0"),
        ({"save_deadline_s": -1.0}, "save_deadline_s"),
        ({"access_key_id": "a"}, "go together"),
        ({"session_token": "t"}, "session_token needs"),
        ({"unsigned": True, "access_key_id": "a", "secret_access_key": "b"}, "exclude each other"),
        ({"sse_customer_key": b"short"}, "32 bytes"),
        ({"sse": "AES256", "sse_customer_key": b"k" * 32}, "exclude each other"),
        ({"sse_kms_key_id": "arn"}, "sse_kms_key_id needs"),
        ({"endpoint_url": "localhost:9000"}, "http\\(s\\)://host"),
        ({"endpoint_url": "ftp://host"}, "http\\(s\\)://host"),
        ({"endpoint_url": "http://host:99999"}, "http\\(s\\)://host"),
        ({"endpoint_url": "http://host/bucket"}, "must not have a path"),
        ({"endpoint_url": ()}, "empty tuple"),
        ({"staging_buffers": 0}, "staging_buffers"),
        ({"metadata": {"dcp-s3-token": "x"}}, "reserved"),
        *[({name: value}, name) for name in TIMES for value in (INF, -INF, NAN, 7 * 86400 + 1, True, "60", 0)],
        *[({name: None}, name) for name in ("connect_timeout_s", "read_timeout_s", "stall_limit_s")],
        *[({name: value}, name) for name in INTS for value in (True, 1e9, "8", None, INF, NAN)],
        *[({"background_cores": value}, "background_cores") for value in (-INF, NAN, True, "1")],
        *[({name: value}, name) for name in ("unsigned", "async_staging") for value in (1, "yes", None)],
        *[({name: value}, name) for name in ("region", "profile") for value in ("", "a\nb", "a\r\n", " a", 7)],
        ({"access_key_id": "AKID\n", "secret_access_key": "s"}, "access_key_id .*line break"),
        ({"access_key_id": "AKID", "secret_access_key": "s\n"}, "secret_access_key .*line break"),
        ({"storage_class": "STANDARD\r\nx-amz-acl: public-read"}, "storage_class .*line break"),
        ({"region": "ü"}, "ASCII"),
        ({"retry": 3}, "retry must be a RetryPolicy"),
        ({"verify_tls": ""}, "verify_tls"),
        ({"verify_tls": 1}, "verify_tls"),
        ({"verify_tls": None}, "verify_tls"),
        ({"sse_customer_key": "k" * 32}, "32 bytes"),
        ({"metadata": {"a": "x\r\nx-amz-acl: public-read"}}, "metadata a=.*line breaks"),
        ({"metadata": {"a\r\nb": "x"}}, "no header name"),
        ({"metadata": {"a b": "x"}}, "no header name"),
        ({"metadata": {"": "x"}}, "no header name"),
        ({"metadata": {"a": "ü"}}, "ASCII"),
        ({"metadata": {"a": " x"}}, "blanks"),
        ({"metadata": {"a": "x" * 1792}}, "takes 1793 bytes"),
        ({"metadata": {"a": "x", "A": "y"}}, "twice"),
        ({"metadata": "a=b"}, "mapping or"),
        ({"tags": {"a": "x\r\n"}}, "control characters"),
        ({"tags": {"aws:a": "x"}}, "reserved"),
        ({"tags": {"": "x"}}, "1 to 128"),
        ({"tags": {"n" * 129: "x"}}, "1 to 128"),
        ({"tags": {"n": "x" * 257}}, "at most 256"),
        ({"tags": {str(n): "x" for n in range(11)}}, "10 tags"),
        ({"tags": [("a", "x"), ("a", "y")]}, "twice"),
        ({"tags": 7}, "mapping or"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], text: str) -> None:
    """A wrong value raises at construction, naming the field and what it may be."""
    with pytest.raises(ConfigError, match=text):
        S3Config(**settings)


def test_bad_retry_policies_are_refused() -> None:
    """At least one try, and waits in order."""
    with pytest.raises(ConfigError, match="max_attempts"):
        RetryPolicy(max_attempts=0)
    with pytest.raises(ConfigError, match="initial_wait_s"):
        RetryPolicy(initial_wait_s=2.0, max_wait_s=1.0)
    for name in ("initial_wait_s", "max_wait_s"):
        for value in (INF, NAN, -1.0, 8 * 86400, True, "1", None):
            with pytest.raises(ConfigError, match=name):
                RetryPolicy(**{name: value})
    for value in (1.5, True, "8", None, 10**6):
        with pytest.raises(ConfigError, match="max_attempts"):
            RetryPolicy(max_attempts=value)


def test_what_the_limits_let_through() -> None:
    """The largest values that can work are taken."""
    config = S3Config(
        read_timeout_s=7 * 86400,
        tags={f"{n}-ü": "v" * 256 for n in range(10)},
        metadata={"a": "x" * 1791},
        profile="müller's",
        retry=RetryPolicy(max_attempts=1, initial_wait_s=0, max_wait_s=0),
    )
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_directory_of_certificates_is_refused_at_once(tmp_path) -> None:
    """Connections take one file: a directory, of hashed certificates or not, costs no try and no second."""
    (tmp_path / "ca.pem").write_text("")
    with pytest.raises(ConfigError, match=r"verify_tls names the directory .*cat .*/\*\.pem"):
        S3Config(verify_tls=str(tmp_path))


def test_is_immutable_hashable_picklable_and_slotted() -> None:
    """A config can be a dictionary's key and cross processes, and cannot change under a save."""
    config = S3Config(
        endpoint_url=("http://a:1", "http://b:2"), tags={"team": "x"}, metadata={"job": "7"}, sse="AES256"
    )
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(pickle.loads(pickle.dumps(config))) == hash(config)
    assert config.tags == (("team", "x"),)
    assert config.endpoints == ("http://a:1", "http://b:2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.region = "x"  # type: ignore[misc]
    assert not hasattr(config, "__dict__")
    with pytest.raises(TypeError):
        S3Config("http://a:1")  # type: ignore[misc]


@pytest.mark.parametrize("url", ["ftp://me:hush@host", "me:hush@host:9000", "http://me:hush@host", "s3://me:hush@h"])
def test_a_refused_endpoint_tells_no_password(url: str) -> None:
    """A URL with a password in it is refused, and the message leaves the password out."""
    with pytest.raises(ConfigError) as refused:
        S3Config(endpoint_url=url)
    assert "hush" not in str(refused.value)


def test_secrets_are_masked() -> None:
    """repr shows what was set, but never a secret."""
    text = repr(
        S3Config(
            endpoint_url="http://a:1",
            access_key_id="AKID",
            secret_access_key="hush-1",
            session_token="hush-2",
            sse_customer_key=b"hush-3" + b"." * 26,
        )
    )
    assert "AKID" in text
    assert "hush" not in text
    assert text.count("***") == 3


def test_from_env_reads_every_plain_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP_S3_<FIELD> sets a field; keyword arguments win; sizes may have units."""
    monkeypatch.setenv("DCP_S3_ENDPOINT_URL", "http://a:1, http://b:2")
    monkeypatch.setenv("DCP_S3_PART_BYTES", "64 MiB")
    monkeypatch.setenv("DCP_S3_VERIFY_TLS", "/some/ca.pem")
    monkeypatch.setenv("DCP_S3_ASYNC_STAGING", "true")
    monkeypatch.setenv("DCP_S3_SAVE_DEADLINE_S", "12.5")
    monkeypatch.setenv("DCP_S3_RETRY_MAX_ATTEMPTS", "3")
    config = S3Config.from_env(max_concurrency=5, save_deadline_s=20.0)
    assert config == S3Config(
        endpoint_url=("http://a:1", "http://b:2"),
        part_bytes=64 * MIB,
        verify_tls="/some/ca.pem",
        async_staging=True,
        save_deadline_s=20.0,
        max_concurrency=5,
        retry=RetryPolicy(max_attempts=3),
    )
    monkeypatch.setenv("DCP_S3_VERIFY_TLS", "off")
    assert S3Config.from_env().verify_tls is False


def test_from_env_names_the_variable_that_does_not_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text says which variable is wrong."""
    monkeypatch.setenv("DCP_S3_PART_BYTES", "lots")
    with pytest.raises(ConfigError, match="DCP_S3_PART_BYTES='lots'"):
        S3Config.from_env()


def test_aws_variables_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS_ENDPOINT_URL_S3 before AWS_ENDPOINT_URL, AWS_REGION before AWS_DEFAULT_REGION, a field before all."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://general:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "old-1")
    assert S3Config().resolved().endpoint_url == "http://general:1"
    assert S3Config().resolved().region == "old-1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://special:1")
    monkeypatch.setenv("AWS_REGION", "new-1")
    assert S3Config().resolved().endpoint_url == "http://special:1"
    assert S3Config().resolved().region == "new-1"
    mine = S3Config(endpoint_url="http://mine:1", region="r")
    assert mine.resolved() is mine
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert S3Config().resolved().endpoint_url is None


@pytest.mark.parametrize(
    "variable, text",
    [
        ("DCP_S3_PART_SIZE", r"DCP_S3_PART_SIZE is no setting of dcp_s3 .*DCP_S3_PART_BYTES"),
        ("DCP_S3_MAX_CONCURENCY", r"did you mean DCP_S3_MAX_CONCURRENCY\?"),
        ("DCP_S3_TAGS", r"S3Config\(tags=…\).*DCP_S3_PART_BYTES"),
        ("DCP_S3_METADATA", r"S3Config\(metadata=…\)"),
        ("DCP_S3_SSE_CUSTOMER_KEY", r"S3Config\(sse_customer_key=…\)"),
        ("DCP_S3_RETRY", "DCP_S3_RETRY_MAX_ATTEMPTS"),
        ("DCP_S3_RETRY_ATTEMPTS", "DCP_S3_RETRY_MAX_ATTEMPTS"),
        ("DCP_S3_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID"),
        ("DCP_S3_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY"),
        ("DCP_S3_SESSION_TOKEN", "AWS_SESSION_TOKEN"),
        ("DCP_S3_part_bytes", "no setting"),
    ],
)
def test_a_variable_that_sets_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    """Misspelt, or of a field that no variable can set: an error says so, with what is known, and shows no value."""
    monkeypatch.setenv(variable, "hush")
    with pytest.raises(ConfigError, match=text) as refused:
        S3Config.from_env()
    assert "hush" not in str(refused.value)


def test_variables_of_the_scripts_and_tests_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What scripts/ and the tests read is let pass, and so is a variable without a value."""
    for variable in ("DCP_S3_VENV", "DCP_S3_PYTHON", "DCP_S3_TORCH", "DCP_S3_TEST_FULL", "DCP_S3_TEST_ENDPOINT"):
        monkeypatch.setenv(variable, "x")
    monkeypatch.setenv("DCP_S3_REGION", "")
    assert S3Config.from_env() == S3Config()


def test_none_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """``none`` is None where a field may be None, and an error where not."""
    for name in ("BACKGROUND_CORES", "SAVE_DEADLINE_S", "STORAGE_CLASS", "SSE", "REGION", "ENDPOINT_URL"):
        monkeypatch.setenv(f"DCP_S3_{name}", "none")
    assert S3Config.from_env() == S3Config(background_cores=None)
    monkeypatch.setenv("DCP_S3_CHECKSUM", "none")
    assert S3Config.from_env().checksum == "none"
    monkeypatch.setenv("DCP_S3_READ_TIMEOUT_S", "none")
    with pytest.raises(ConfigError, match="DCP_S3_READ_TIMEOUT_S='none'"):
        S3Config.from_env()


@pytest.mark.parametrize("cls", [S3Config, RetryPolicy])
def test_help_shows_each_field_with_its_default(cls: type) -> None:
    """``help()`` lists the fields in order, each with its default value, and with its unit where it has one."""
    section = inspect.getdoc(cls).split("Attributes:\n")[1].split("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section, re.MULTILINE | re.DOTALL)
    found = dataclasses.fields(cls)
    assert [name for name, _ in entries] == [field.name for field in found]
    for field, (_, text) in zip(found, entries, strict=True):
        said = re.search(r"Default: (.*?)(?:, .*)?\.\Z", " ".join(text.split()))
        assert said, field.name
        default = {"memory_bytes": "256 MiB", "max_record_bytes": "4 GiB", "retry": "RetryPolicy()"}.get(
            field.name, repr(field.default).replace("'", '"')
        )
        assert said[1] == default, field.name
        for suffix, unit in (("_s", "second"), ("_bytes", "bytes")):
            assert not field.name.endswith(suffix) or unit in text, f"{field.name} says no unit"


def test_the_types_of_the_fields_can_be_looked_up() -> None:
    """typing.get_type_hints works, as tools that build configs from types need it."""
    assert set(typing.get_type_hints(S3Config)) == {field.name for field in dataclasses.fields(S3Config)}
