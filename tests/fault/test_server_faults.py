"""The fault server's faults: each kind once, as a client meets it, and the checks of what clients do."""

from __future__ import annotations

import base64
import gc
import http.client
import os
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    HTTPClientError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)

from tests.fault.server import (
    ODD_COMPLETES,
    Action,
    FaultServer,
    Handle,
    cut_reply,
    delay,
    drip,
    drop_reply,
    error,
    flip_reply,
    flip_stored,
    lose_stored,
    never_answer,
    never_read,
    peak_in_flight,
    reply_headers,
    reset,
    s3_error,
    truncate_stored,
)
from tests.fault.server.client import client

MIB = 2**20
B = "bucket"
DATA = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def s3():
    with FaultServer(min_part_bytes=0) as server:
        yield server


@pytest.fixture
def c(s3: Handle):
    with client(s3, connect_timeout=0.5, read_timeout=0.5, max_pool_connections=20) as opened:
        yield opened


def put(c: Any, key: str = "k", body: bytes = DATA) -> None:
    c.put_object(Bucket=B, Key=key, Body=body)


def get(c: Any, key: str = "k") -> bytes:
    return bytes(c.get_object(Bucket=B, Key=key)["Body"].read())


@pytest.mark.parametrize(
    "action, status, code, stored",
    [
        (error(503, "SlowDown"), 503, "SlowDown", False),
        (error(503), 503, "503", False),
        (s3_error("TooManyRequests"), 429, "TooManyRequests", False),
        (error(500, "InternalError", at="reply"), 500, "InternalError", True),
        (error(400, "RequestTimeout", at="head"), 400, "RequestTimeout", False),
        (error(409, "ConditionalRequestConflict") | delay(0.05), 409, "ConditionalRequestConflict", False),
    ],
)
def test_error_answers(s3: Handle, c: Any, action: Action, status: int, code: str, stored: bool):
    """An error answer has its status and code, before or after the operation; the next call succeeds."""
    s3.on("PutObject", action, nth=1)
    with pytest.raises(ClientError) as caught:
        put(c)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert caught.value.response["Error"]["Code"] == code
    assert ("k" in s3.objects()) == stored
    put(c)
    assert s3.read("k") == DATA
    assert [(r.status, r.done) for r in s3.log] == [(status, stored), (200, True)]


def test_answers_that_are_not_s3(s3: Handle):
    """Foreign bodies, empty bodies and Retry-After reach the wire as they were scripted."""
    s3.on("GetObject", error(502, body="<html>Bad Gateway</html>", headers={"Content-Type": "text/html"}), nth=1)
    s3.on("GetObject", error(400, body="not xml", retry_after=7), nth=2)
    connection = http.client.HTTPConnection("127.0.0.1", s3.ports[0], timeout=5)
    for status, body, retry_after in [(502, b"<html>Bad Gateway</html>", None), (400, b"not xml", "7")]:
        connection.request("GET", "/bucket/k")
        reply = connection.getresponse()
        assert (reply.status, reply.read(), reply.headers["Retry-After"]) == (status, body, retry_after)
    connection.close()
    assert len({record.connection for record in s3.log}) == 1  # kept alive between the two


@pytest.mark.parametrize(
    "action, exception, wire_bytes, stored, outcome",
    [
        (reset("head"), ConnectionClosedError, 0, False, "dropped"),
        (reset("body", 300_000), ConnectionClosedError, 300_000, False, "dropped"),
        (reset("handle"), ConnectionClosedError, MIB, False, "dropped"),
        (drop_reply(), ConnectionClosedError, MIB, True, "dropped"),
        (drop_reply("reset"), ConnectionClosedError, MIB, True, "dropped"),
        (never_answer(), ReadTimeoutError, MIB, False, "stalled"),
        (never_answer(commit=True), ReadTimeoutError, MIB, True, "stalled"),
        (drip(every_s=2.0), ReadTimeoutError, MIB, True, "client closed"),
    ],
)
@pytest.mark.parametrize("tls", [False, True])
def test_broken_writes(tls: bool, action: Action, exception: type, wire_bytes: int, stored: bool, outcome: str):
    """A write broken off anywhere raises at the client, and is stored exactly if it was broken off after the commit."""
    with FaultServer(tls=tls) as server, client(server, read_timeout=0.5) as c:
        server.on("PutObject", action, nth=1)
        with pytest.raises((exception, SSLError)):  # over TLS an end without close_notify is an SSL error
            put(c)
        (record,) = server.wait_for("PutObject")
        assert (record.wire_bytes, record.outcome, "k" in server.objects()) == (wire_bytes, outcome, stored)
        put(c, "next")
        assert server.read("next") == DATA


def test_a_chunked_body_can_be_cut_too():
    """With the SDK's trailers over HTTPS the body has two layers of framing; it breaks off, and arrives whole, alike."""
    with FaultServer(tls=True) as server, client(server, request_checksum_calculation="when_supported") as c:
        server.on("PutObject", reset("body", 300_000), nth=1)
        with pytest.raises((ConnectionClosedError, SSLError)):
            put(c)
        put(c)
        assert server.read("k") == DATA
        assert [(r.wire_bytes > MIB, r.done) for r in server.requests("PutObject")] == [(False, False), (True, True)]


@pytest.mark.parametrize("tls", [False, True])
def test_a_body_that_is_never_read(tls: bool):
    """The client's sends block; the attempt ends in the log when the client gives up, though nothing was read."""
    with FaultServer(tls=tls) as server, client(server, connect_timeout=0.3, read_timeout=0.3) as c:
        server.on("PutObject", never_read(), nth=1)
        with pytest.raises(BotoCoreError):
            put(c, body=DATA * 32)
        (record,) = server.wait_for("PutObject")
        assert (record.wire_bytes, record.outcome, record.status) == (0, "stalled", None)
        assert record.t_end is not None
        assert server.objects() == {}


@pytest.mark.parametrize("count", [0, 1, MIB // 2, MIB - 1])
@pytest.mark.parametrize("how", ["close", "stall"])
def test_cut_reads(s3: Handle, c: Any, count: int, how: Any):
    """A reply cut after n bytes gives the client at most n bytes and an error; the second read is whole."""
    s3.put("k", DATA)
    s3.on("GetObject", cut_reply(count, how), nth=1)
    body = c.get_object(Bucket=B, Key="k")["Body"]
    with pytest.raises((ResponseStreamingError, ReadTimeoutError, HTTPClientError)):
        body.read()
    assert get(c) == DATA
    assert [(r.reply_bytes, r.status) for r in s3.requests("GetObject")] == [(count, 200), (MIB, 200)]


def test_a_dripped_read_arrives_whole(s3: Handle, c: Any):
    """Pieces with pauses below the client's timeout add up to the object."""
    s3.put("k", b"abcdef")
    s3.on("GetObject", drip(every_s=0.05, piece_bytes=2))
    began = time.monotonic()
    assert get(c) == b"abcdef"
    assert time.monotonic() - began > 0.1


def test_wrong_headers_and_flipped_bits(s3: Handle, c: Any):
    """Headers can be wrong or absent, and bits flip on the wire, in the store, or after the fact."""
    s3.put("k", b"abcd")
    s3.on("GetObject", reply_headers({"Content-Range": "bytes 7-8/9", "ETag": None}), nth=1)
    reply = c.get_object(Bucket=B, Key="k", Range="bytes=0-1")
    assert (reply["Body"].read(), reply["ContentRange"], reply.get("ETag")) == (b"ab", "bytes 7-8/9", None)
    s3.on("GetObject", flip_reply(1), nth=1)
    assert (get(c), get(c)) == (b"accd", b"abcd")
    s3.on("PutObject", flip_stored(-1), nth=1)
    s3.on("PutObject", truncate_stored(3), nth=2)
    s3.on("PutObject", lose_stored(), nth=3)
    for _ in range(2):
        put(c, "t", b"abcd")
        assert s3.read("t") == (b"abce" if len(s3.requests("PutObject")) == 1 else b"abc")
    put(c, "t", b"abcd")
    assert list(s3.objects()) == ["k"]
    s3.tamper("k", "flip", 0)
    s3.tamper("k", "truncate", 2)
    assert s3.read("k") == b"`b"


def test_damaged_and_lost_parts(s3: Handle, c: Any):
    """A part that was acknowledged, then flipped or lost, is not noticed by Complete; the object shows it."""
    s3.on("UploadPart", flip_stored(0), part=1)
    s3.on("UploadPart", lose_stored(), part=2)
    upload_id = c.create_multipart_upload(Bucket=B, Key="k")["UploadId"]
    same = {"Bucket": B, "Key": "k", "UploadId": upload_id}
    parts = [{"PartNumber": n, "ETag": c.upload_part(**same, PartNumber=n, Body=b"abc")["ETag"]} for n in (1, 2, 3)]
    c.complete_multipart_upload(**same, MultipartUpload={"Parts": parts})
    assert s3.read("k") == b"`bcabc"
    assert s3.objects()["k"]["size"] == 6


@pytest.mark.parametrize("name", ODD_COMPLETES)
def test_odd_completes(s3: Handle, name: str):
    """Each odd answer of Complete has status 200 and is what its name says; the second Complete is a plain success."""
    connection = http.client.HTTPConnection("127.0.0.1", s3.ports[0], timeout=5)

    def ask(method: str, target: str, body: bytes = b"") -> tuple[int, bytes, Any]:
        connection.request(method, target, body=body)
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.headers

    s3.on("CompleteMultipartUpload", ODD_COMPLETES[name], nth=1)
    _, made, _ = ask("POST", "/bucket/k?uploads")
    upload_id = made.partition(b"<UploadId>")[2].partition(b"<")[0].decode()
    etag = ask("PUT", f"/bucket/k?partNumber=1&uploadId={upload_id}", b"abc")[2]["ETag"]
    listed = f"<C><Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part></C>".encode()
    status, odd, _ = ask("POST", f"/bucket/k?uploadId={upload_id}", listed)
    done = "k" in s3.objects()
    _, plain, _ = ask("POST", f"/bucket/k?uploadId={upload_id}", listed)
    connection.close()
    assert status == 200
    assert b"<CompleteMultipartUploadResult" in plain
    assert done == (name not in ("internal-error", "slow-down", "blanks-then-error", "empty-not-done"))
    own = s3.objects()["k"]["etag"].encode()
    expected = {
        "internal-error": b"<Code>InternalError</Code>" in odd,
        "slow-down": b"<Code>SlowDown</Code>" in odd,
        "blanks-then-error": b"?>\n \n" in odd and b"<Code>InternalError</Code>" in odd,
        "blanks-then-result": odd.lstrip() == plain and odd != plain,
        "empty": odd == b"",
        "empty-not-done": odd == b"",
        "cut-at-60": odd == plain[:60],
        "no-etag": b"ETag" not in odd and own in plain,
        "empty-etag": b"<ETag></ETag>" in odd,
        "foreign-etag": b"<ETag>" in odd and own not in odd,
    }
    assert expected[name]
    assert s3.read("k") == b"abc"


def test_which_requests_a_rule_hits(s3: Handle, c: Any):
    """Key, signer, header, n-th, since, times and chance choose the requests; a removed rule does nothing."""

    def failures(count: int, key: str = "k", used: Any = c, **extra: Any) -> list[int]:
        failed = []
        for number in range(1, count + 1):
            try:
                used.put_object(Bucket=B, Key=key, Body=b"", **extra)
            except ClientError:
                failed.append(number)
        return failed

    slow = error(503, "SlowDown")
    rule = s3.on("PutObject", slow, nth=3)
    assert failures(5) == [3]
    assert (rule.seen, rule.fired) == (5, 1)
    s3.clear()
    rule = s3.on(("PutObject", "UploadPart"), slow, since=2, times=2, key="^data/", access_key="RANK0")
    with client(s3, access_key="RANK1") as other:
        assert failures(4, "meta") == failures(4, "data/k", other) == []
    assert failures(5, "data/k") == [2, 3]
    rule.remove()
    s3.on("*", slow, header=("if-none-match", r"\*"))
    assert failures(2) == []
    assert failures(2, IfNoneMatch="*") == [1, 2]
    chosen = []
    for _ in range(2):
        with FaultServer(seed=5) as seeded, client(seeded) as used:
            seeded.on("*", slow, probability=0.3)
            chosen.append(failures(20, used=used))
    assert chosen[0] == chosen[1]
    assert 2 <= len(chosen[0]) <= 12


@pytest.mark.parametrize("certificate", ["expired", "wrong-host", "unknown-ca"])
def test_bad_certificates_are_refused(certificate: Any):
    """A client that trusts the server's CA file refuses an expired, foreign or unknown identity, and sends nothing."""
    with FaultServer(tls=True, certificate=certificate) as server:
        context = ssl.create_default_context(cafile=server.ca_bundle)
        connection = http.client.HTTPSConnection("127.0.0.1", server.ports[0], timeout=5, context=context)
        with pytest.raises(ssl.SSLCertVerificationError):
            connection.request("PUT", "/bucket/k", body=b"x")
        connection.close()
        deadline = time.monotonic() + 5
        while server.counters["failed_handshakes"] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.log == []


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("how", ["reset", "garbage", "hang"])
def test_spoiled_connections(tls: bool, how: Any):
    """A connection reset, answered with garbage or left hanging at its first bytes fails once; then all is well."""
    with FaultServer(tls=tls) as server, client(server, read_timeout=0.3, connect_timeout=0.3) as c:
        server.spoil_connections(how)
        with pytest.raises((BotoCoreError, HTTPClientError)):
            put(c)
        assert server.log == []
        put(c)
        assert server.read("k") == DATA


def test_offline_and_online_again(s3: Handle, c: Any):
    """A store that is gone refuses connections and breaks the open ones; back on its port it has kept its objects."""
    put(c)
    s3.go_offline()
    with pytest.raises((EndpointConnectionError, ConnectionClosedError)):
        put(c, "other")
    s3.go_online()
    assert get(c) == DATA
    assert list(s3.objects()) == ["k"]


def test_slow_stores(s3: Handle):
    """Latency and rate hold for each connection; the log shows how many requests were in flight at once."""
    s3.configure(latency_s=0.2)
    with client(s3, max_pool_connections=8) as c, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: put(c, f"k{n}", b"x"), range(8)))
        puts = s3.requests("PutObject")
        assert peak_in_flight(puts) > 4
        assert all(record.t_end - record.t_start >= 0.2 for record in puts if record.t_end is not None)
        assert s3.counters["peak_open"] > 4
        s3.configure(latency_s=0.0, rate_bytes_s=4 * MIB)
        put(
            c, "first", b"x"
        )  # a connection is slow from its first request on; what comes along with that one's head is not
        began = time.monotonic()
        put(c)
        middle = time.monotonic()
        assert get(c) == DATA
        assert 0.2 < middle - began < 2
        assert 0.2 < time.monotonic() - middle < 2


def test_two_hundred_mebibytes_are_quick(s3: Handle):
    """The server is no bottleneck for fault tests: 192 MiB in and out within seconds, bytes equal."""
    data = os.urandom(16 * MIB)
    checksum = base64.b64encode(data[:9])
    with client(s3, max_pool_connections=4) as c, ThreadPoolExecutor(4) as pool:
        began = time.monotonic()
        list(pool.map(lambda n: put(c, f"k{n}", data), range(12)))
        assert all(pool.map(lambda n: get(c, f"k{n}") == data, range(12)))
        assert time.monotonic() - began < 20
    assert base64.b64encode(s3.read("k7")[:9]) == checksum
    assert s3.violations() == []


def test_nothing_is_left_running(caplog: pytest.LogCaptureFixture):
    """After close there is no thread and no task: a request in flight was broken off, one without a client given up."""
    before = threading.active_count()
    server = FaultServer()
    server.on("PutObject", never_answer(), key="stalled")
    server.on("PutObject", delay(60), key="zombie")
    with client(server) as c, client(server, read_timeout=0.2) as hasty, ThreadPoolExecutor(1) as pool:
        with pytest.raises(ReadTimeoutError):
            put(hasty, "zombie")
        writer = pool.submit(put, c, "stalled")
        server.wait_for("PutObject", key="stalled", ended=False)
        server.close()
        assert isinstance(writer.exception(), BotoCoreError)
    assert threading.active_count() == before
    with pytest.raises(OSError):
        http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=1).connect()
    del server
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
