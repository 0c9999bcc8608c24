"""S3Config and RetryPolicy: data that is right or refused before the first request."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from dcp_s3 import ConfigError, RetryPolicy, S3Config

MIB = 1 << 20


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
